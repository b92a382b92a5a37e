// One version.
"use strict";
import { address, api, bytes, facts, given, h, moment, number, run, section, show, table, versionLink } from "./lib.js";
import { draw, said } from "./chart.js";

const config = (layer) =>
  Object.entries(layer.config).filter(([key, value]) => key !== "class" && value !== null).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ");

const relatives = (caption, rows, ref) =>
  table(
    caption,
    [
      ["Version", (r) => (r.live ? versionLink(r.ref) : `${r.ref} (retired)`)],
      ["Quality", (r) => number(r.quality), "right"],
      ["Created (UTC)", (r) => moment(r.created)],
      ["Written", (r) => bytes(r.bytes_owned), "right"],
      ["Tensors shared", (r) => number(r.tensors), "right"],
      ["", (r) => (r.live ? h("a", { href: address("compare", { a: r.ref, b: ref }), "aria-label": `Compare with ${r.ref}` }, "compare") : "")],
    ],
    rows,
    "None.",
  );

function owners(tensors) {
  const names = Object.entries(tensors);
  return names.length ? h("ul", { class: "plain" }, names.map(([name, owner]) => h("li", {}, name, " ", h("small", {}, "by ", versionLink(owner))))) : "-";
}

function layers(v) {
  const rest = Object.keys(v.other_tensors).length ? [{ name: "(tensors of no layer)", config: {}, inputs: [], tensors: v.other_tensors }] : [];
  return table(
    "Layers",
    [
      ["Layer", (l) => l.name],
      ["Class", (l) => String(l.config.class ?? "-")],
      ["Config", (l) => h("span", { class: "config", title: config(l) }, config(l).slice(0, 120))],
      ["Inputs", (l) => l.inputs.join(", ")],
      ["Tensors", (l) => owners(l.tensors)],
    ],
    [...v.layers, ...rest],
    "No architecture was saved.",
  );
}

function links(v, allowed) {
  const parent = v.parent ? h("a", { href: address("compare", { a: v.parent, b: v.ref }) }, "Compare with the parent") : null;
  const retire = allowed ? h("a", { href: address("changes", { ref: v.ref }) }, "Retire ...") : null;
  return h("p", { class: "row" }, h("a", { href: address("lineage", { ref: v.ref }) }, "Lineage"), parent, h("a", { href: address("compare", { a: v.ref }) }, "Compare with another version"), retire);
}

function metadata(v) {
  if (v.metadata_chars <= 2) return h("p", { class: "dim" }, "None.");
  const cut = v.metadata_chars > v.metadata_text.length;
  const more = cut ? h("p", {}, `The first ${number(v.metadata_text.length)} of ${number(v.metadata_chars)} characters. `, h("a", { href: address("api/version", { ref: v.ref }) }, "All as JSON")) : null;
  return [h("pre", { tabindex: "0", "aria-label": "Metadata" }, v.metadata_text), more];
}

run(async () => {
  if (!given("ref")) return show(h("p", {}, "Choose a version: ", h("a", { href: "lineage" }, "Lineage")));
  const v = await api("version", { ref: given("ref"), brief: 1 });
  const { allowed } = await api("changes").catch(() => ({ allowed: false }));
  document.title = `${v.ref} - TensorVine`;
  document.querySelector("h1").textContent = v.ref;
  const served = v.consumers.map((c) => h("li", {}, `${c.consumer}, ${number(c.answered)} answers`));
  const shares = Object.entries(v.owners).map(([ref, tensors]) => ({ ref, tensors }));
  show(
    links(v, allowed),
    facts([
      ["Parent", versionLink(v.parent)],
      ["Quality", number(v.quality)],
      ["Created", `${moment(v.created)} UTC`],
      ["Written", `${bytes(v.bytes_owned)} of ${bytes(v.bytes_total)}`],
      ["Codec", v.codec ?? "-"],
      ["Latest of its name", v.latest ? "yes" : "no"],
    ]),
    section("Consumers that serve it", served.length ? h("ul", {}, served) : h("p", { class: "dim" }, "None in this cluster.")),
    v.training ? section("Training run of this name", h("div", { class: "chart", role: "img", "data-keep": true, id: "curve", "aria-label": said(v.training) })) : null,
    section("Owners of its tensors", table("Owners", [["Version", (s) => versionLink(s.ref)], ["Tensors", (s) => number(s.tensors), "right"]], shares, "No tensors.")),
    section("Layers", layers(v)),
    section("Ancestors", relatives("Ancestors", v.ancestors, v.ref), v.more_ancestors ? h("p", {}, `${number(v.more_ancestors)} more.`) : null),
    section("Descendants", relatives("Descendants", v.descendants, v.ref), v.more_descendants ? h("p", {}, `${number(v.more_descendants)} more. `, h("a", { href: address("lineage", { ref: v.ref }) }, "Lineage")) : null),
    section("Metadata", metadata(v)),
  );
  if (v.training) draw(document.getElementById("curve"), v.training);
});
