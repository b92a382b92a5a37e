// What all pages share: elements without markup from strings, requests, and numbers as people read them.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "g", "rect", "path", "circle", "text", "title", "line"]);

// Make an element. Children are elements or text; text is never parsed as HTML.
export function h(tag, attributes = {}, ...children) {
  const made = SHAPES.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Make the children of `place` equal to `fresh`, and keep elements that stay: focus and selection are not lost.
export function patch(place, fresh) {
  const news = [...fresh.childNodes];
  news.forEach((node, number) => {
    const old = place.childNodes[number];
    if (!old) place.append(node);
    else if (!alike(old, node)) old.replaceWith(node);
    else if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== node.data) old.data = node.data;
    } else if (!old.hasAttribute("data-keep")) {
      for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
      for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      patch(old, node);
    }
  });
  while (place.childNodes.length > news.length) place.lastChild.remove();
}

function alike(old, node) {
  if (old.nodeType !== node.nodeType || old.nodeName !== node.nodeName) return false;
  return old.nodeType !== Node.ELEMENT_NODE || old.getAttribute("data-key") === node.getAttribute("data-key");
}

export function show(...children) {
  const place = document.getElementById("page");
  patch(place, h("div", {}, children));
  place.removeAttribute("aria-busy");
}

// Say in the header how things stand; `bad` marks trouble.
export function state(text, bad = false) {
  const place = document.getElementById("state");
  if (place.textContent !== text) place.textContent = text;
  place.className = bad ? "bad" : "";
}

export function address(page, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters))
    for (const one of [value].flat()) if (one !== null && one !== undefined && one !== "") query.append(name, one);
  return `${query}` ? `${page}?${query}` : page;
}

export class Refused extends Error {}

export async function api(path, parameters = {}, body = undefined) {
  const options = { headers: { Accept: "application/json" }, redirect: "error" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    options.headers["Content-Type"] = "application/json";
  }
  let answer;
  try {
    answer = await fetch(address(`api/${path}`, parameters), options);
  } catch {
    throw new Refused("The server does not answer.");
  }
  const told = await answer.json().catch(() => ({ error: `status ${answer.status}` }));
  if (answer.status === 401) throw new Refused("Open the page again with the token.");
  if (!answer.ok) throw new Refused(told.error || `status ${answer.status}`);
  return told;
}

// Run a page, and show its error in place of what it could not show.
export async function run(page) {
  try {
    await page();
  } catch (error) {
    if (!(error instanceof Refused)) console.error(error);
    show(h("p", { class: "bad", role: "alert" }, error.message));
  }
}

export const given = (name) => new URLSearchParams(location.search).get(name) || "";

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "-";
  if (typeof value === "string") return value; // NaN, infinity, or an integer that a double does not hold
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 2) : String(Number(value.toPrecision(digits)));
}

export function bytes(value) {
  if (value === null || value === undefined || typeof value === "string") return value || "-";
  const units = ["B", "kB", "MB", "GB", "TB", "PB"]; // as the command line
  let place = 0;
  while (Math.abs(value) >= 999.95 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${place && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[place]}`;
}

export const perSecond = (value, write = number) => (value === null || value === undefined ? "-" : `${write(value, 3)}/s`);

export function seconds(value) {
  if (value === null || value === undefined || typeof value === "string") return value || "-";
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  if (value < 120) return `${number(value, 3)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${number(value / 3600, 3)} h`;
}

export const moment = (iso) => (iso ? `${iso.slice(0, 10)} ${iso.slice(11, 19)}` : "-");
export const count = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
export const versionLink = (ref) => (ref ? h("a", { href: address("version", { ref }) }, ref) : "-");

// A table whose columns are [title, cell of a row, class]; it scrolls by itself on a narrow screen.
export function table(caption, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "dim" }, empty);
  const head = columns.map(([title, , kind]) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((row) =>
    h("tr", { "data-key": row.key ?? null, class: row.trouble ? "bad" : null }, columns.map(([, cell, kind]) => h("td", { class: kind }, cell(row)))),
  );
  return h(
    "div",
    { class: columns.length < 4 ? "scroll narrow" : "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

export function meter(part, whole, label) {
  const share = whole ? Math.min(part / whole, 1) : 0;
  const bar = h("rect", { width: `${(share * 100).toFixed(1)}%`, height: "100%", class: share > 0.9 ? "full" : "part" });
  return h("svg", { class: "meter", role: "img", "aria-label": `${label}: ${Math.round(share * 100)} percent` }, bar);
}

export const section = (title, ...children) =>
  h("section", { "aria-label": title }, h("h2", {}, title), children);

export const facts = (pairs) =>
  h("dl", {}, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));

// A field that suggests versions while somebody types.
export function chooser(id, label, value) {
  const list = h("datalist", { id: `${id}-list` });
  const input = h("input", { id, name: id, value, list: `${id}-list`, autocomplete: "off", spellcheck: "false", required: true });
  let asked = 0;
  input.addEventListener("input", async () => {
    const mine = ++asked;
    const found = await api("versions", { q: input.value.replace("@", " @"), limit: 20 }).catch(() => null);
    if (found && mine === asked) list.replaceChildren(...found.versions.map((one) => h("option", { value: one.ref })));
  });
  return h("label", { for: id }, label, input, list);
}
