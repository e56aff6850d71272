// The workers that train together: a ring (data-parallel), or stages in a row (pipeline).

import { at, fill, h, s } from "./dom.js";
import { count, middle, plural } from "./format.js";

const WORDS = { ready: "ready", joined: "joined", done: "done", lost: "lost", expected: "expected" };
const MOST_NAMED = 16;

export function showGroup(group) {
  at("group").hidden = !group;
  at("bytes-card").classList.toggle("alone", !group);
  if (!group) return;
  const title = group.mode === "pipeline" ? "Pipeline" : "Ring";
  at("group-title").textContent = `${title} of ${plural(group.members.length || group.target, "worker")}`;
  // Before a group has formed, the gathering workers are shown in the places of its members.
  const workers = group.members.length ? group.members : group.others;
  const drawn = group.mode === "pipeline" ? stages(workers, group) : ring(workers, group);
  fill(at("group-body"), facts(group), h("div", { class: "drawing" }, drawn), legend(workers), list(workers));
}

function facts(group) {
  const rows = [["generation", count(group.generation)], ["phase", group.phase], ["steps before this round", count(group.steps)]];
  if (group.reason) rows.push([group.phase === "ended" ? "ended" : "last one ended", group.reason]);
  if (group.members.length && group.others.length) rows.push(["not in it", group.others.map((worker) => worker.client_id).join(", ")]);
  return h("dl", { class: "group-facts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function legend(workers) {
  const used = Object.keys(WORDS).filter((state) => workers.some((worker) => worker.state === state));
  const kinds = { ready: "warn", joined: "busy", done: "good", lost: "bad", expected: "muted" };
  return h("div", { class: "legend", "aria-hidden": "true" }, used.map((state) => h("span", { class: `dot ${kinds[state]}` }, WORDS[state])));
}

const list = (workers) =>
  h("ol", { class: "unseen", id: "members" }, workers.map((worker) => h("li", {}, `${worker.client_id}: ${WORDS[worker.state]}`)));

function ring(workers, group) {
  const [x, y, radius] = [210, 140, workers.length < 4 ? 84 : 98];
  const size = workers.length <= 8 ? 21 : workers.length <= MOST_NAMED ? 15 : 220 / workers.length;
  const place = (i) => {
    const angle = (2 * Math.PI * i) / Math.max(workers.length, 1) - Math.PI / 2;
    return { x: x + radius * Math.cos(angle), y: y + radius * Math.sin(angle), cos: Math.cos(angle), sin: Math.sin(angle), angle };
  };
  const wires = group.members.length < 2 ? [] : workers.length > MOST_NAMED ? s("circle", { class: "wire", cx: x, cy: y, r: radius })
    : workers.map((_, i) => arc(place(i), workers.length, { x, y, radius, size }));
  const nodes = workers.map((worker, i) => {
    const { x: cx, y: cy, cos, sin } = place(i);
    const side = Math.abs(cos) < 0.3 ? "middle" : cos > 0 ? "start" : "end";
    const gap = size + 10;
    return s("g", { class: worker.state },
      s("title", {}, `${worker.client_id}: ${WORDS[worker.state]}`),
      s("circle", { class: "node", cx, cy, r: size }),
      workers.length <= MOST_NAMED && group.members.length ? s("text", { class: "rank", x: cx, y: cy + 1 }, String(i)) : null,
      workers.length <= MOST_NAMED
        ? s("text", { class: "small", x: cx + gap * cos, y: cy + gap * sin + (side === "middle" ? 4 * Math.sign(sin) : 0), style: { textAnchor: side } }, short(worker.client_id))
        : null);
  });
  return svg(`0 0 420 284`, group, `a ring of ${workers.length} workers`, wires, nodes);
}

// The line from one worker to the next, clockwise, with an arrowhead in its middle.
function arc(from, total, { x, y, radius, size }) {
  const gap = (size + 3) / radius;
  const step = (2 * Math.PI) / total;
  const point = (angle) => [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
  const [start, middle, end] = [from.angle + gap, from.angle + step / 2, from.angle + step - gap];
  const [x1, y1] = point(start);
  const [x2, y2] = point(end);
  const large = end - start > Math.PI ? 1 : 0;
  const [mx, my] = point(middle);
  const turn = (middle * 180) / Math.PI + 90;
  return [
    s("path", { class: "wire", d: `M ${x1} ${y1} A ${radius} ${radius} 0 ${large} 1 ${x2} ${y2}` }),
    s("path", { class: "tip", d: "M -6 -5 L 7 0 L -6 5 Z", transform: `translate(${mx} ${my}) rotate(${turn})` }),
  ];
}

// The stages of a worker by its place in a row: each stage has its own number of workers, or they are dealt out in turns.
function heldBy(place, inRow, group) {
  const firsts = (group.stage_workers ?? []).map((_, stage, counts) => counts.slice(0, stage).reduce((a, b) => a + b, 0));
  if (firsts.length) return [firsts.findLastIndex((first) => first <= place)];
  return Array.from({ length: group.stages_per_worker }, (_, k) => place + k * inRow);
}

// One row per parallel pipeline. Workers of the same stage do not send to each other.
function stages(workers, group) {
  const [wide, high, gap, line] = [104, 64, 38, 84];
  const inRow = Math.ceil(workers.length / group.replicas);
  const width = inRow * (wide + gap) - gap + 8;
  const held = (i) => heldBy(i % inRow, inRow, group).join(", ");
  const wires = workers.flatMap((_, i) => (i % inRow && held(i) !== held(i - 1) ? [wire(4 + (i % inRow) * (wide + gap) - gap, Math.floor(i / inRow) * line, gap)] : []));
  const nodes = workers.map((worker, i) => {
    const [x, y] = [4 + (i % inRow) * (wide + gap), Math.floor(i / inRow) * line];
    return s("g", { class: worker.state },
      s("title", {}, `${worker.client_id}: ${WORDS[worker.state]}`),
      s("rect", { class: "node", x, y: y + 10, width: wide, height: high, rx: 10 }),
      s("text", { class: "rank", x: x + wide / 2, y: y + 34 }, group.members.length ? `stage ${held(i)}` : "–"),
      s("text", { class: "small", x: x + wide / 2, y: y + 54 }, short(worker.client_id)));
  });
  const rows = Math.ceil(workers.length / Math.max(inRow, 1));
  const drawing = svg(`0 0 ${width} ${rows * line}`, group, `${inRow} workers with stages in a row, ${rows} times`, wires, nodes);
  drawing.classList.add("row");
  return drawing;
}

// Two arrows between neighbours: activations go one way, gradients the other.
const wire = (x, y, gap) => [
  s("path", { class: "wire", d: `M ${x + 3} ${y + 34} H ${x + gap - 9}` }),
  s("path", { class: "tip", d: `M ${x + gap - 13} ${y + 29} L ${x + gap - 2} ${y + 34} L ${x + gap - 13} ${y + 39} Z` }),
  s("path", { class: "wire", d: `M ${x + gap - 3} ${y + 50} H ${x + 9}` }),
  s("path", { class: "tip", d: `M ${x + 13} ${y + 45} L ${x + 2} ${y + 50} L ${x + 13} ${y + 55} Z` }),
];

const svg = (viewBox, group, label, ...children) =>
  s("svg", { viewBox, width: viewBox.split(" ")[2], class: group.phase, role: "img", "aria-label": label },
    s("g", { class: group.phase }, children));

const short = (name) => middle(name, 15);
