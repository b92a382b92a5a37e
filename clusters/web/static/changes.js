// Retire a version, or change the number of shards: each after a confirmation that names what goes.
"use strict";
import { api, bytes, chooser, count, facts, given, h, number, run, section, show, state } from "./lib.js";

// Ask before a change is made; the dialog names what goes.
function confirmed(title, lines, action) {
  return new Promise((resolve) => {
    const dialog = h(
      "dialog",
      { "aria-labelledby": "asks" },
      h("h2", { id: "asks" }, title),
      lines,
      h(
        "form",
        { method: "dialog", class: "row" },
        h("button", { value: "no", autofocus: true }, "Cancel"),
        h("button", { value: "yes", class: "danger" }, action),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

async function change(path, body, done) {
  state("changing ...");
  try {
    state(done(await api(path, {}, body)));
  } catch (error) {
    state(error.message, true);
  }
}

async function retire(event) {
  event.preventDefault();
  const { retire: going } = await api("changes", { ref: document.getElementById("ref").value }).catch((error) => (state(error.message, true), {}));
  if (!going) return;
  const lines = facts([
    ["Version", going.ref],
    ["Tensors that it wrote", `${number(going.tensors_owned)}, ${bytes(going.bytes_owned)}; those that live versions share stay`],
    ["Descendants", `${number(going.descendants)}; they stay`],
    ["Consumers that serve it", going.consumers.join(", ") || "none"],
  ]);
  if (await confirmed(`Retire ${going.ref}?`, lines, `Retire ${going.ref}`))
    await change("retire", { ref: going.ref, confirm: going.confirm }, (told) => `${told.retired} is retired`);
}

async function scale(event) {
  event.preventDefault();
  const { shards } = await api("changes");
  const wanted = Number(document.getElementById("shards").value);
  const fewer = shards.length - wanted;
  const line = h("p", {}, fewer > 0 ? `${count(fewer, "shard")} of ${shards.join(", ")} will drain: its data moves to the others.` : `${count(-fewer, "shard")} will start.`);
  const text = `scale from ${shards.length} to ${wanted}`;
  if (await confirmed(`Change ${count(shards.length, "shard")} to ${wanted}?`, line, `Scale to ${wanted}`))
    await change("scale", { shards: wanted, confirm: text }, (told) => `${count(told.shards_after, "shard")} now; before: ${told.shards_before}`);
}

run(async () => {
  const { allowed, shards } = await api("changes");
  if (!allowed) return show(h("p", { role: "alert" }, "Changes are not allowed. Start the server with --allow-changes."));
  show(
    section("Retire a version", h("form", { class: "row", onsubmit: retire }, chooser("ref", "Version", given("ref")), h("button", {}, "Retire ..."))),
    section(
      "Number of shards",
      h("form", { class: "row", onsubmit: scale }, h("label", { for: "shards" }, "Shards", h("input", { id: "shards", type: "number", min: 1, max: 10000, value: shards.length, required: true })), h("button", {}, "Scale ...")),
    ),
  );
});
