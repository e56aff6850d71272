// The newest versions of an asynchronous job: how old their updates were, and whose they were.

import { at, bar, fill, h, table } from "./dom.js";
import { count, middle, percent } from "./format.js";

const LAST = 10;
const MOST_CLIENTS = 8;

// Show the ages and the clients of the last versions among the published rounds; nothing for other jobs.
export function showBuffers(published) {
  const last = published.filter((round) => round.asynchronous).slice(-LAST).map((round) => round.asynchronous.staleness);
  at("buffers-card").hidden = !last.length;
  if (!last.length) return;
  const ages = counts(last.flatMap((each) => Object.values(each))).sort(([a], [b]) => a - b);
  const clients = counts(last.flatMap((each) => Object.keys(each))).sort(([a, x], [b, y]) => y - x || (a < b ? -1 : 1));
  const total = ages.reduce((sum, [, times]) => sum + times, 0);
  const more = clients.length > MOST_CLIENTS ? h("p", { class: "muted" }, `and ${count(clients.length - MOST_CLIENTS)} more clients`) : null;
  at("buffers-of").textContent = `in the last ${count(last.length)}`;
  fill(at("buffers"),
    table("ages of updates", [["age, in versions", "right"], ["updates", "right"], ["share", ""]],
      ages.map(([age, times]) => [String(age), count(times), bar(times / total, `age ${age}`)])),
    table("clients", [["client", ""], ["share", "right"], ["", ""]],
      clients.slice(0, MOST_CLIENTS).map(([name, times]) =>
        [h("span", { title: name }, middle(name)), percent(times / total), bar(times / total, `updates of ${name}`)])),
    more);
}

// How often each value is there.
function counts(values) {
  const times = new Map();
  for (const value of values) times.set(value, (times.get(value) ?? 0) + 1);
  return [...times];
}
