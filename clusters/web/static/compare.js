// Two versions side by side: which layers match, and what became of each tensor.
"use strict";
import { address, api, bytes, chooser, count, given, h, number, run, section, show, state, table, versionLink } from "./lib.js";

const MATCH = { prefix: "same", name: "same name", new: "new", gone: "gone", rest: "" };
const OPEN = 12; // rows that are open at first

function form() {
  const swap = () => {
    const [a, b] = ["a", "b"].map((id) => document.getElementById(id));
    [a.value, b.value] = [b.value, a.value];
  };
  return h(
    "form",
    { class: "row", method: "get", action: "compare" },
    chooser("a", "From", given("a")),
    chooser("b", "To", given("b")),
    h("button", {}, "Compare"),
    h("button", { type: "button", onclick: swap }, "Swap"),
  );
}

// Counts are drawn by their logarithm: most differences lie in few bins.
function histogram(tensor) {
  const most = Math.max(...tensor.histogram);
  if (!most) return "-";
  const bars = tensor.histogram.map((n, place) => {
    const height = n ? 4 + (Math.log1p(n) / Math.log1p(most)) * 36 : 0;
    return h("rect", { x: place * 3, y: 40 - height, width: 2.4, height, class: "part" });
  });
  const label = `differences from ${number(tensor.low, 3)} to ${number(tensor.high, 3)}, in ${tensor.histogram.length} bins`;
  const zero = tensor.low < 0 && tensor.high > 0 ? (-tensor.low / (tensor.high - tensor.low)) * 192 : null;
  return h(
    "figure",
    {},
    h("svg", { viewBox: "0 0 192 41", class: "histogram", role: "img", "aria-label": label }, bars, zero === null ? null : h("line", { x1: zero, x2: zero, y1: 0, y2: 41, class: "zero" })),
    h("figcaption", {}, h("span", {}, number(tensor.low, 3)), h("span", {}, number(tensor.high, 3))),
  );
}

const shape = (dims) => `(${dims.join(", ")})`;
const both = (pair, write = (one) => one) => {
  const [a, b] = pair.map(write);
  return b === undefined || a === b ? a : `${a} → ${b}`;
};
const elements = (dims) => dims.reduce((all, one) => all * one, 1);

function changed(tensor) {
  const total = elements(tensor.shapes[0]);
  return `${number(tensor.changed)} of ${number(total)}${tensor.not_finite ? `, ${tensor.not_finite} not finite` : ""}`;
}

const tensors = (row, name) =>
  table(
    `Tensors of ${name}`,
    [
      ["Tensor", (t) => both([t.a ?? t.b, t.b ?? t.a])],
      ["State", (t) => h("span", { class: `mark ${t.state}` }, t.state)],
      ["Type", (t) => `${both(t.dtypes)} ${both(t.shapes, shape)}`],
      ["Bytes", (t) => bytes(t.nbytes), "right"],
      ["Norm", (t) => (t.norm === null || t.norm === undefined ? "-" : number(t.norm)), "right"],
      ["Relative", (t) => (t.relative === null || t.relative === undefined ? "-" : number(t.relative, 3)), "right"],
      ["Largest", (t) => (t.largest === null || t.largest === undefined ? "-" : number(t.largest, 3)), "right"],
      ["Elements changed", (t) => (t.changed === null || t.changed === undefined ? "-" : changed(t)), "right"],
      ["Differences", (t) => (t.histogram && t.histogram.length ? histogram(t) : "-")],
      ["Written by", (t) => (t.owner_a === t.owner_b || !t.owner_a || !t.owner_b ? versionLink(t.owner_b ?? t.owner_a) : [versionLink(t.owner_a), " → ", versionLink(t.owner_b)])],
    ],
    row.tensors,
    "No tensors.",
  );

function summed(row) {
  const states = ["equal", "changed", "new", "gone"].map((state) => [state, row.tensors.filter((t) => t.state === state).length]);
  return states.filter(([, n]) => n).map(([state, n]) => h("span", { class: `mark ${state}` }, `${n} ${state}`));
}

const configs = (row) =>
  row.config.length ? h("ul", {}, row.config.map((one) => h("li", {}, `${one.key}: ${JSON.stringify(one.a) ?? "-"} → ${JSON.stringify(one.b) ?? "-"}`))) : null;

const differs = (row) => row.match !== "prefix" || row.tensors.some((t) => t.state !== "equal");

function layer(row, open) {
  const name = row.b ?? row.a ?? row.class;
  return h(
    "details",
    { class: `layer ${row.match}`, open, "data-differs": differs(row) },
    h(
      "summary",
      {},
      h("span", { class: "side" }, row.a ?? "-"),
      h("span", { class: "side" }, row.b ?? "-"),
      h("span", { class: "dim" }, row.class),
      h("span", { class: `mark ${row.match}` }, MATCH[row.match]),
      h("span", {}, summed(row)),
    ),
    configs(row),
    tensors(row, name),
  );
}

function result(told) {
  const { layers, tensors: of, bytes: sizes } = told.summary;
  let left = OPEN;
  const rows = told.layers.map((row) => layer(row, differs(row) && row.tensors.length > 0 && left-- > 0));
  const list = h("div", { class: "layers" }, rows);
  const only = (event) => list.classList.toggle("differing", event.target.checked);
  return [
    h(
      "dl",
      { class: "tiles" },
      ["equal", "changed", "new", "gone"].map((state) =>
        h("div", { class: "tile" }, h("dt", {}, `Tensors ${state}`), h("dd", {}, number(of[state]), h("small", {}, bytes(sizes[state])))),
      ),
    ),
    section(
      "Layers",
      h("p", {}, `${count(layers.prefix, "layer")} in the longest common prefix, ${layers.name} after it with the same name, ${layers.new} new, ${layers.gone} gone. `, h("a", { href: address("lineage", { ref: told.b }) }, "Lineage")),
      h("label", { class: "check" }, h("input", { type: "checkbox", onchange: only }), "Only differences"),
      h("div", { class: "heads", "aria-hidden": "true" }, h("span", {}, told.a), h("span", {}, told.b)),
      list,
    ),
  ];
}

run(async () => {
  const [a, b] = [given("a"), given("b")];
  show(form());
  if (!a || !b) return;
  state("comparing ...");
  const place = document.getElementById("page");
  const note = h("p", { class: "dim" }, "Comparing the tensors ...");
  place.append(note);
  try {
    const told = await api("compare", { a, b });
    note.replaceWith(h("h2", { class: "pair" }, versionLink(told.a), " → ", versionLink(told.b)), ...result(told));
  } catch (error) {
    note.replaceWith(h("p", { class: "bad", role: "alert" }, error.message));
  }
  state("");
});
