// Loss curves, drawn by uPlot: losses, the fitted curve, and when versions were and will be published.
"use strict";
import { number } from "./lib.js";

const drawn = new Map(); // element -> chart

const finite = (pairs) => pairs.filter(([x, y]) => typeof x === "number" && typeof y === "number");
const columns = (pairs) => [pairs.map(([x]) => x), pairs.map(([, y]) => y)];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function said(run) {
  const last = run.losses.length ? run.losses[run.losses.length - 1] : null;
  const loss = last ? `loss ${number(last[1])} at iteration ${last[0]}` : "no loss yet";
  return `${run.model}: ${loss}, ${run.published.length} updates published, ${run.planned.length} planned`;
}

// Draw a training run into an element that `patch` keeps.
export function draw(place, run) {
  const losses = finite(run.losses);
  const curve = finite(run.curve ? run.curve.points : []);
  if (!losses.length) return;
  const data = uPlot.join([columns(losses), columns(curve.length ? curve : [losses[losses.length - 1]])]);
  const marks = { published: run.published, planned: run.planned };
  place.setAttribute("aria-label", said(run));
  let chart = drawn.get(place);
  if (chart) {
    chart.marks = marks;
    chart.setData(data);
    return;
  }
  const axis = () => ({ stroke: () => color("--dim"), grid: { stroke: () => color("--line"), width: 1 }, ticks: { show: false }, size: 44 });
  chart = new uPlot(
    {
      width: Math.max(place.clientWidth, 200),
      height: 190,
      scales: { x: { time: false } },
      cursor: { drag: { x: false, y: false } },
      legend: { live: false },
      axes: [axis(), axis()],
      series: [
        { label: "iteration" },
        { label: "loss", stroke: () => color("--good"), width: 1, spanGaps: true, points: { show: false } },
        { label: "fitted curve", stroke: () => color("--link"), width: 2, dash: [6, 4], spanGaps: true, points: { show: false } },
      ],
      hooks: { drawSeries: [lines] },
    },
    data,
    place,
  );
  chart.marks = marks;
  drawn.set(place, chart);
  new ResizeObserver(() => chart.setSize({ width: Math.max(place.clientWidth, 200), height: 190 })).observe(place);
}

// Published updates are full lines at the foot of the chart, planned ones are dashed lines through it.
function lines(chart, series) {
  if (series !== 2 || !chart.marks) return;
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const [kind, share] of [["planned", 1], ["published", 0.12]]) {
    ctx.strokeStyle = color(kind === "planned" ? "--line-strong" : "--good");
    ctx.setLineDash(kind === "planned" ? [3, 4] : []);
    for (const iteration of chart.marks[kind]) {
      const x = chart.valToPos(iteration, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top + bbox.height * (1 - share));
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}
