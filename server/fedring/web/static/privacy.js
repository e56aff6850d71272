// What keeps updates and models private: the steps of secure aggregation, and how much of differential privacy is spent.

import { h } from "./dom.js";
import { count, duration, plural } from "./format.js";

const DOING = {
  keys: "clients send their keys",
  shares: "clients share their secrets",
  updates: "clients send masked updates",
  survivors: "clients sign whose updates count",
  unmask: "clients help to remove the masks",
};

// A line on the secure aggregation of a round; null if it has none.
export function secureLine(round) {
  const now = round?.secure;
  if (!now) return null;
  const groups = now.groups ? ` in ${plural(now.groups, "group")}` : "";
  const step = DOING[now.step] ? `${DOING[now.step]}, ${count(now.answered)} of ${count(now.asked)} have. ` : "";
  return h("p", { id: "secure", class: "muted number" }, `Secure aggregation${groups}: ${step}${lostIn(round) || "No client was lost"}.`);
}

// How many clients a round has lost in which step of secure aggregation; empty if none.
export function lostIn(round) {
  const lost = Object.entries(round.secure?.lost ?? {}).filter(([, clients]) => clients);
  return lost.length ? `Lost: ${lost.map(([step, clients]) => `${count(clients)} in ${step}`).join(", ")}` : "";
}

// How long the steps of a round's secure aggregation took; empty if nobody knows.
export function stepTimes(round) {
  const times = Object.entries(round.secure?.seconds ?? {});
  return times.length ? `secure aggregation: ${times.map(([step, seconds]) => `${step} ${duration(seconds)}`).join(", ")}` : "";
}

// What a job, and all jobs together, have spent of the clients' privacy; null if the job has no [dp], or nobody knows.
export function spentLine(job, privacy) {
  const own = privacy?.jobs[job.job_id];
  if (!own) return null;
  const limit = job.max_epsilon ? ` of at most ${job.max_epsilon}` : "";
  return h("p", { id: "epsilon", class: "muted number" },
    `Privacy spent: ε = ${written(privacy.epsilon)}${limit}, for δ = ${privacy.delta} and all jobs of this server; ` +
    `by this job alone ${written(own.epsilon)}, in ${plural(own.rounds, "round")}.`);
}

const written = (epsilon) => (epsilon == null ? "∞" : String(Number(epsilon.toPrecision(3))));
