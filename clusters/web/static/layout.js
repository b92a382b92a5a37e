// A worker: places the nodes of a graph by dagre, so that the page stays responsive.
"use strict";
/* global dagre, importScripts */
importScripts("vendor/dagre.min.js");

onmessage = ({ data }) => {
  const graph = new dagre.graphlib.Graph().setGraph({ rankdir: data.down ? "TB" : "LR", nodesep: 10, ranksep: data.down ? 36 : 48, ranker: "tight-tree" });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const node of data.nodes) graph.setNode(node.id, { width: data.width, height: data.height });
  for (const node of data.nodes) if (node.parent) graph.setEdge(node.parent, node.id);
  dagre.layout(graph);
  const places = Object.fromEntries(graph.nodes().map((id) => [id, [graph.node(id).x, graph.node(id).y]]));
  postMessage({ serial: data.serial, places, width: graph.graph().width, height: graph.graph().height });
};
