// What goes on now, updated by server-sent events.
"use strict";
import { bytes, count, facts, h, meter, moment, number, perSecond, seconds, section, show, state, table, versionLink } from "./lib.js";
import { draw, said } from "./chart.js";

function tiles(now) {
  const t = now.totals;
  const tile = (name, value, more) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, more));
  const waiting = t.waiting_for_memory + t.waiting_for_disk;
  return h(
    "dl",
    { class: "tiles" },
    tile("Versions", t.models === null ? "-" : number(t.models)),
    tile("Pins", t.pins === null ? "-" : number(t.pins)),
    tile("Memory", bytes(t.bytes_used), meter(t.bytes_used, t.capacity, "memory in use")),
    tile("On disk", bytes(t.bytes_disk)),
    tile("Requests", perSecond(t.requests_per_s)),
    tile("Saved", perSecond(t.saved_per_s, bytes)),
    tile("Sent", perSecond(t.sent_per_s, bytes)),
    tile("Waiting", waiting ? `${number(waiting)} requests` : "0"),
    tile("Missing replicas", t.replicas_missing === null ? "-" : number(t.replicas_missing)),
    tile("Not on disk", t.versions_unwritten === null ? "-" : t.versions_unwritten ? `${number(t.versions_unwritten)} (${bytes(t.bytes_unwritten)})` : "0"),
  );
}

function shards(now) {
  const known = (write) => (s) => (s.answers ? write(s) : "-");
  const queue = (s) => [[s.waiting_for_memory, "memory"], [s.waiting_for_disk, "disk"]].filter(([n]) => n).map(([n, what]) => `${n} for ${what}`).join(", ") || "0";
  return table(
    "Shards",
    [
      ["Shard", (s) => number(s.shard)],
      ["Node", (s) => s.node],
      ["Memory", known((s) => [`${bytes(s.bytes_used)} of ${bytes(s.capacity)}`, meter(s.bytes_used, s.capacity, `memory of shard ${s.shard}`)])],
      ["On disk", known((s) => bytes(s.bytes_disk)), "right"],
      ["Tensors", known((s) => number(s.tensors)), "right"],
      ["Waiting", known(queue), "right"],
      ["Not on disk", known((s) => bytes(s.bytes_unwritten)), "right"],
      ["Requests", known((s) => perSecond(s.requests_per_s)), "right"],
      ["Sent", known((s) => perSecond(s.sent_per_s, bytes)), "right"],
      ["State", (s) => (s.answers ? "answers" : `does not answer: ${s.trouble}`)],
    ],
    now.shards.map((s) => ({ ...s, key: `shard-${s.shard}` })),
    "No shards.",
  );
}

const nodes = (now) =>
  table(
    "Nodes",
    [
      ["Node", (n) => n.address],
      ["Shards", (n) => n.shards.join(", ") || "-"],
      ["CPUs", (n) => number(n.cpus), "right"],
      ["GPUs", (n) => number(n.gpus), "right"],
      ["Memory", (n) => bytes(n.memory_bytes), "right"],
    ],
    now.nodes.map((n) => ({ ...n, key: n.id })),
    "The cluster does not answer.",
  );

const consumers = (now) =>
  table(
    "Consumers",
    [
      ["Model", (c) => c.model],
      ["Serves", (c) => (c.trouble ? c.trouble : versionLink(c.ref))],
      ["Behind", (c) => (c.trouble ? "-" : c.lag_versions ? `${count(c.lag_versions, "version")}, ${seconds(c.lag_s)}` : "up to date")],
      ["Answers", (c) => (c.trouble ? "-" : perSecond(c.answers_per_s)), "right"],
      ["Last delivery", (c) => (c.delivered ? `${seconds(c.delivery_s)} by ${c.transport}` : "-")],
      ["Skipped", (c) => number(c.skipped), "right"],
      ["Refused", (c) => (c.refusals ? h("details", {}, h("summary", {}, number(c.refusals)), c.refused.map((r) => h("p", {}, `${r.ref}: ${r.why}`))) : number(c.refusals)), "right"],
    ],
    now.consumers.map((c) => ({ ...c, key: c.consumer })),
    "No consumers in this cluster. Consumers outside the cluster and in Ray Serve are not listed.",
  );

function training(run) {
  const costs = run.costs;
  const last = run.losses.length ? run.losses[run.losses.length - 1] : null;
  return h(
    "article",
    { class: "card", "data-key": run.model },
    h("h3", {}, run.model),
    h("div", { class: "chart", role: "img", "data-keep": true, "data-key": `chart-${run.model}`, "aria-label": said(run) }),
    facts([
      ["Iteration", number(run.iteration)],
      ["Loss", last ? number(last[1]) : "-"],
      ["Curve", run.curve ? `${run.curve.form}, error ${number(run.curve.mse, 3)}` : "not fitted yet"],
      ["Published", run.published.length ? `${run.published.length}, last after ${number(run.published[run.published.length - 1])}` : "0"],
      ["Planned", run.planned.length ? `${run.planned.length}, next after ${number(run.planned[0])}` : run.why || "-"],
      ["Pause per update", costs ? seconds(costs.stall_s) : "-"],
    ]),
  );
}

const versions = (now) =>
  table(
    "Newest versions",
    [
      ["Version", (v) => versionLink(v.ref)],
      ["Parent", (v) => versionLink(v.parent)],
      ["Created (UTC)", (v) => moment(v.created)],
      ["Quality", (v) => number(v.quality), "right"],
      ["Written", (v) => bytes(v.bytes_owned), "right"],
      ["Total", (v) => bytes(v.bytes_total), "right"],
    ],
    now.newest.map((v) => ({ ...v, key: v.ref })),
    "No versions.",
  );

const traffic = (now) =>
  table(
    "Last deliveries to consumers, by transport",
    [["Transport", (t) => t.transport], ["Deliveries", (t) => number(t.deliveries), "right"], ["Bytes", (t) => bytes(t.bytes), "right"]],
    now.traffic.map((t) => ({ ...t, key: t.transport })),
    "No deliveries.",
  );

const runs = (now) =>
  table(
    "Training runs of ranks",
    [["Run", (r) => r.run], ["Ranks", (r) => number(r.ranks), "right"]],
    now.runs.map((r) => ({ ...r, key: r.run })),
    "No ranks run in this cluster.",
  );

let last = null;

function render(now) {
  if (now.state !== "ok") {
    state(`${now.repository} does not answer`, true);
    const why = h("p", { class: "bad", role: "alert" }, `The repository does not answer: ${now.trouble}. The page waits for it.`);
    if (!last) show(why);
    return;
  }
  last = now;
  const silent = now.shards.filter((s) => !s.answers).length;
  const missing = Object.entries(now.missing);
  state(silent ? `${count(silent, "shard")} not answering` : `live, ${moment(now.time)} UTC`, silent > 0);
  show(
    missing.map(([what, why]) => h("p", { class: "bad" }, `Unknown: ${what}: ${why}`)),
    tiles(now),
    section("Nodes and shards", shards(now), nodes(now)),
    section("Training runs", now.trainings.length ? h("div", { class: "cards" }, now.trainings.map(training)) : h("p", { class: "dim" }, "No training run publishes versions."), h("h3", {}, "Ranks and clones"), runs(now)),
    section("Consumers", consumers(now)),
    section("Traffic", traffic(now)),
    section("Newest versions", versions(now)),
  );
  for (const run of now.trainings) {
    const place = document.querySelector(`[data-key="${CSS.escape(`chart-${run.model}`)}"]`);
    if (place) draw(place, run);
  }
}

function listen() {
  const events = new EventSource("api/events");
  events.addEventListener("now", (event) => render(JSON.parse(event.data)));
  events.onerror = () => {
    state("no connection to the server", true);
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
  addEventListener("pagehide", () => events.close());
}

listen();
