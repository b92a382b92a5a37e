// A window of the graph of versions: folded, searched, zoomed and coloured.
"use strict";
import { address, api, bytes, count, facts, given, h, moment, number, run, show, state } from "./lib.js";

const [WIDTH, HEIGHT] = [170, 40];
const worker = new Worker("static/layout.js");
const pending = new Map();
worker.onmessage = ({ data }) => pending.get(data.serial)?.(data);

const view = { ref: given("ref"), open: new URLSearchParams(location.search).getAll("open"), by: "quality", x: 0, y: 0, zoom: 1 };
let told = null;
let placed = null;
let serial = 0;
let chosen = null;

function layout(nodes) {
  const mine = ++serial;
  const answer = new Promise((resolve) => pending.set(mine, resolve)).finally(() => pending.delete(mine));
  worker.postMessage({ serial: mine, nodes: nodes.map(({ id, parent }) => ({ id, parent })), width: WIDTH, height: HEIGHT, down: false });
  return answer;
}

// ---- colour

const VALUE = { quality: (n) => n.quality, age: (n) => (n.created ? Date.parse(n.created) : null), bytes: (n) => Math.log10(n.bytes_owned + 1) };

function shades(nodes) {
  const values = nodes.map(VALUE[view.by]).filter((v) => typeof v === "number" && Number.isFinite(v));
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return (node) => {
    const value = VALUE[view.by](node);
    if (typeof value !== "number" || !Number.isFinite(value)) return "none";
    return high > low ? Math.round(((value - low) / (high - low)) * 6) : 3;
  };
}

const worth = (n) => ({ quality: `quality ${number(n.quality)}`, age: moment(n.created), bytes: `${bytes(n.bytes_owned)} written` })[view.by];

// ---- picture

const cut = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);
const hidden = (n) => n.children > 0 && !told.nodes.some((one) => one.parent === n.id);
const LABEL = {
  version: (n) => [cut(n.first, 24), `${worth(n)}${hidden(n) ? `, +${number(n.children)}` : ""}`],
  retired: (n) => [cut(n.first, 24), "retired"],
  fold: (n) => [`${number(n.count)} ${n.id.startsWith("branches:") ? "with children" : "alike"}`, cut(n.first, 24)],
  more: (n) => [`${number(n.count)} more`, cut(n.first, 24)],
};

function box(node, shade) {
  const [x, y] = placed.places[node.id];
  const [title, below] = LABEL[node.kind](node);
  return h(
    "g",
    { class: `node ${node.kind} shade-${shade}`, transform: `translate(${x - WIDTH / 2} ${y - HEIGHT / 2})`, tabindex: node.id === chosen?.id ? "0" : "-1", role: "button", "data-id": node.id },
    node.kind === "fold" ? h("rect", { x: 4, y: 4, width: WIDTH, height: HEIGHT, rx: 6, class: "behind" }) : null,
    h("rect", { width: WIDTH, height: HEIGHT, rx: 6, class: "box" }),
    h("rect", { width: 6, height: HEIGHT, rx: 3, class: "shade" }),
    h("text", { x: 14, y: 17 }, title),
    h("text", { x: 14, y: 32, class: "small" }, below),
  );
}

function edge(node) {
  const [x1, y1] = placed.places[node.parent];
  const [x2, y2] = placed.places[node.id];
  const [from, to] = [x1 + WIDTH / 2, x2 - WIDTH / 2];
  const middle = (from + to) / 2;
  return h("path", { d: `M${from} ${y1}C${middle} ${y1} ${middle} ${y2} ${to} ${y2}`, class: "edge" });
}

function paint() {
  const shade = shades(told.nodes.filter((n) => n.kind !== "more"));
  const edges = told.nodes.filter((n) => n.parent && placed.places[n.parent]).map(edge);
  stage.replaceChildren(...edges, ...told.nodes.map((node) => box(node, shade(node))));
  move();
}

const move = () => stage.setAttribute("transform", `translate(${view.x} ${view.y}) scale(${view.zoom})`);

// Show the whole window if it stays readable, or else the focus and what is near it.
function fit() {
  const room = picture.getBoundingClientRect();
  view.zoom = Math.min(Math.max(Math.min(room.width / (placed.width + 20), room.height / (placed.height + 20)), 0.55), 1.2);
  const [x, y] = placed.places[view.ref] ?? placed.places[told.nodes[0]?.id] ?? [0, 0];
  view.x = placed.width * view.zoom < room.width ? (room.width - placed.width * view.zoom) / 2 : room.width * 0.3 - x * view.zoom;
  const tall = room.height - placed.height * view.zoom;
  view.y = tall > 0 ? tall / 2 : Math.min(Math.max(room.height / 2 - y * view.zoom, tall - 10), 10);
  move();
}

function zoom(factor, x, y) {
  const to = Math.min(Math.max(view.zoom * factor, 0.15), 4);
  view.x = x - ((x - view.x) * to) / view.zoom;
  view.y = y - ((y - view.y) * to) / view.zoom;
  view.zoom = to;
  move();
}

// ---- what is chosen

function choose(node, focus = true) {
  chosen = node;
  for (const each of stage.querySelectorAll(".node")) {
    const mine = each.dataset.id === node.id;
    each.setAttribute("tabindex", mine ? "0" : "-1");
    each.classList.toggle("chosen", mine);
    if (mine && focus) each.focus({ preventScroll: true });
  }
  const [title] = LABEL[node.kind](node);
  const at = (text, change) => h("a", { href: address("lineage", change), onclick: (event) => go(event, change) }, text);
  const links = {
    version: () => [h("a", { href: address("version", { ref: node.first }) }, "Facts"), at("Focus", { ref: node.first }), view.ref && view.ref !== node.first ? h("a", { href: address("compare", { a: view.ref, b: node.first }) }, "Compare with the focus") : null],
    retired: () => [],
    fold: () => [at("Unfold", { ref: view.ref, open: [...view.open, node.id] }), at("Focus on the first", { ref: node.first })],
    more: () => [at("Focus on the first", { ref: node.first })],
  };
  const stands = node.kind === "fold" || node.kind === "more" ? [["Versions", number(node.count)], ["First", node.first], ["Last", node.last]] : [["Version", node.first]];
  panel.replaceChildren(
    h("h2", {}, title),
    facts([...stands, ["Best quality", number(node.quality)], ["Created (UTC)", moment(node.created)], ["Written", bytes(node.bytes_owned)], [node.kind === "fold" ? "Versions derived from them" : "Children", number(node.children)]]),
    h("p", { class: "row" }, links[node.kind]()),
  );
}

const byId = (id) => told.nodes.find((n) => n.id === id);
const childrenOf = (id) => told.nodes.filter((n) => n.parent === id);

function walk(event) {
  if (!chosen || event.target.closest("input, select, a, button")) return;
  const siblings = childrenOf(chosen.parent).sort((a, b) => placed.places[a.id][1] - placed.places[b.id][1]);
  const at = siblings.findIndex((n) => n.id === chosen.id);
  const next = { ArrowLeft: byId(chosen.parent), ArrowRight: childrenOf(chosen.id)[0], ArrowUp: siblings[at - 1], ArrowDown: siblings[at + 1] }[event.key];
  const room = picture.getBoundingClientRect();
  if (event.key === "+" || event.key === "-") zoom(event.key === "+" ? 1.25 : 0.8, room.width / 2, room.height / 2);
  else if (event.key === "Enter" && chosen.kind === "version") go(event, { ref: chosen.first });
  else if (event.key === "Enter" && chosen.kind === "fold") go(event, { ref: view.ref, open: [...view.open, chosen.id] });
  else if (next) {
    choose(next);
    const [x, y] = placed.places[next.id].map((v, i) => v * view.zoom + (i ? view.y : view.x));
    if (x < 90 || x > room.width - 90) view.x += room.width / 2 - x;
    if (y < 30 || y > room.height - 30) view.y += room.height / 2 - y;
    move();
  } else return;
  event.preventDefault();
}

// ---- search

async function search(event) {
  const words = event.target.value;
  if (!words.trim()) return found.replaceChildren();
  const answer = await api("versions", { q: words, limit: 20 }).catch(() => null);
  if (!answer || event.target.value !== words) return;
  found.replaceChildren(
    h("p", { role: "status" }, `${count(answer.count, "version")} found`),
    h("ul", { class: "plain" }, answer.versions.map((v) => h("li", {}, h("a", { href: address("lineage", { ref: v.ref }), onclick: (e) => go(e, { ref: v.ref }) }, v.ref), ` ${number(v.quality)}`))),
  );
}

// ---- the page

function go(event, { ref = "", open = [] }) {
  event.preventDefault();
  Object.assign(view, { ref, open });
  history.pushState({}, "", address("lineage", { ref, open }));
  load().catch((error) => state(error.message, true));
}

async function load() {
  const began = performance.now();
  const answer = await api("lineage", { ref: view.ref, open: view.open });
  placed = await layout(answer.nodes);
  told = answer;
  if (told.focus) view.ref = told.focus;
  paint();
  fit();
  const first = byId(view.ref) ?? told.nodes[0];
  if (first) choose(first, false);
  state(`${number(told.count)} versions, ${told.nodes.length} nodes, ${Math.round(performance.now() - began)} ms`);
}

const stage = h("g");
const picture = h("svg", { class: "picture", role: "group", "aria-label": "Graph of versions: arrow keys walk, Enter focuses or unfolds, plus and minus zoom" }, stage);
const panel = h("aside", { class: "card", "aria-label": "Chosen node", "aria-live": "polite" });
const found = h("div", { class: "found" });

picture.addEventListener("wheel", (event) => {
  event.preventDefault();
  const room = picture.getBoundingClientRect();
  zoom(event.deltaY < 0 ? 1.15 : 0.87, event.clientX - room.left, event.clientY - room.top);
}, { passive: false });
let held = null;
picture.addEventListener("pointerdown", (event) => { held = { x: event.clientX - view.x, y: event.clientY - view.y }; });
addEventListener("pointerup", () => { held = null; });
picture.addEventListener("pointermove", (event) => {
  if (!held) return;
  [view.x, view.y] = [event.clientX - held.x, event.clientY - held.y];
  move();
});
picture.addEventListener("click", (event) => {
  const node = byId(event.target.closest(".node")?.dataset.id);
  if (node) choose(node);
});
picture.addEventListener("keydown", walk);
addEventListener("popstate", () => {
  Object.assign(view, { ref: given("ref"), open: new URLSearchParams(location.search).getAll("open") });
  load().catch((error) => state(error.message, true));
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.target.closest("input")) return;
  event.preventDefault();
  document.getElementById("search").focus();
});

run(async () => {
  const colour = (event) => { view.by = event.target.value; paint(); choose(chosen, false); };
  const button = (text, label, factor) => h("button", { type: "button", "aria-label": label, onclick: () => { const r = picture.getBoundingClientRect(); zoom(factor, r.width / 2, r.height / 2); } }, text);
  const shown = h(
    "div",
    {},
    h(
      "div",
      { class: "row tools" },
      h("label", { for: "search" }, "Search ", h("input", { id: "search", type: "search", oninput: search, autocomplete: "off", placeholder: "words of a name" })),
      h("label", { for: "colour" }, "Colour ", h("select", { id: "colour", onchange: colour }, ["quality", "age", "bytes"].map((by) => h("option", { value: by }, by)))),
      h("span", { class: "scale", "aria-hidden": "true" }, "low ", [0, 1, 2, 3, 4, 5, 6].map((n) => h("i", { class: `shade-${n}` })), " high"),
      button("+", "Zoom in", 1.25),
      button("−", "Zoom out", 0.8),
      h("button", { type: "button", onclick: () => fit() }, "Fit"),
      h("a", { href: "lineage", onclick: (event) => go(event, {}) }, "All roots"),
    ),
    found,
    h("div", { class: "graph" }, picture, panel),
  );
  show();
  document.getElementById("page").replaceChildren(shown);
  await load();
});
