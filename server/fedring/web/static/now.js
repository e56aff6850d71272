// The present state: the job, the phase of its round, and the clients that it waits for.

import { at, bar, fill, h, empty } from "./dom.js";
import { bestRule, bytes, count, duration, longDuration, middle, number, percent, plural, secondsUntil } from "./format.js";
import { secureLine, spentLine } from "./privacy.js";

const PHASES = [
  ["waiting", "Waiting"],
  ["training", "Training"],
  ["aggregating", "Aggregating"],
  ["evaluating", "Evaluating"],
];
const KINDS = { running: "busy", completed: "good", failed: "bad", published: "good", abandoned: "bad", stopped: "warn" };

export const badge = (word, kind = KINDS[word] ?? "") => h("span", { class: `badge ${kind}` }, word);

// The job to show: the running job, otherwise the job of the last round, otherwise the newest job.
export function presentJob(state) {
  const jobs = state.jobs ?? [];
  return jobs.find((job) => job.state === "running")
    ?? jobs.find((job) => job.job_id === state.round?.job_id) ?? jobs[0];
}

export function showNow(state) {
  const job = presentJob(state);
  document.title = job ? `${middle(job.name)} ${job.rounds_done}/${job.rounds} – fedring` : "fedring";
  if (!job) return fill(at("now-body"), nothingYet(state));
  const own = state.round?.job_id === job.job_id ? { round: state.round, waits_for: state.waits_for } : openRound(state, job);
  const round = own?.round, waiting = own?.waits_for;
  const queued = state.jobs.filter((other) => other.state === "queued" && other !== job).length;
  fill(at("now-body"), h("div", { class: "now" },
    h("div", {},
      h("p", { class: "headline" }, h("strong", { title: job.name }, middle(job.name, 48)), badge(job.state)),
      h("p", { class: "muted number" }, jobLine(job), queued ? ` · ${plural(queued, "job")} queued` : ""),
      bar(job.rounds_done / job.rounds, "published rounds of the job"),
      job.reason ? h("p", { class: job.state === "completed" ? "muted" : "bad" }, job.reason) : null,
      spentLine(job, state.privacy),
    ),
    h("div", {}, round ? [phases(round, waiting), waits(round, waiting, state), secureLine(round), bufferLine(round)] : h("p", { class: "muted" }, before(job))),
  ), besides(state, job));
}

// The open round of a job, with its wait.
const openRound = (state, job) => (state.rounds ?? []).find((open) => open.round?.job_id === job.job_id);

// The other jobs that run at the same time, a line for each.
function besides(state, shown) {
  const others = state.jobs.filter((job) => job.state === "running" && job !== shown);
  return others.length ? h("ul", { class: "besides number", "aria-label": "other jobs that run" }, others.map((job) => {
    const open = openRound(state, job);
    const now = open ? [` Round ${open.round.job_round} `, sentence(open.round, open.waits_for, null)] : [` ${before(job)}`];
    return h("li", {}, h("strong", { title: job.name }, middle(job.name, 48)), ` ${jobLine(job)}.`, now);
  })) : null;
}

const jobLine = (job) =>
  `job ${job.job_id} · ${job.mode.replace("_", "-")} · ${count(job.rounds_done)} of ${plural(job.rounds, "round")} published${beginning(job)}`;

// What the job has started from: "fresh" or a file makes a version, the other choices name one.
function beginning(job) {
  if (!job.start || !job.start_version) return "";
  const from = { fresh: "a new model", newest: "the newest model", best: "the best model" }[job.start];
  const version = `version ${job.start_version}`;
  if (from) return ` · started from ${from} (${version})`;
  return ` · started from ${job.start === `${job.start_version}` ? version : `${job.start} (${version})`}`;
}

function before(job) {
  if (job.state === "queued") return "It waits for its turn.";
  return job.state === "running" ? "Its next round is about to open." : "It has no round.";
}

function nothingYet(state) {
  const clients = state.server?.clients ?? 0;
  return [
    empty("No job has run yet. Start one: ", h("code", {}, "flctl start-round --wait"), " or ",
      h("code", {}, "flctl run job.toml")),
    h("p", { class: "empty" }, clients ? `${plural(clients, "client")} ${clients === 1 ? "is" : "are"} connected.`
      : ["No client is connected yet. On each client's machine: ", h("code", {}, "fl-client server=HOST:PORT")]),
  ];
}

function phases(round, open) {
  const current = round.phase === "published" ? (open ? 3 : 4) : PHASES.findIndex(([name]) => name === round.phase);
  return h("ol", { class: "phases", "aria-label": `phases of round ${round.job_round}` },
    PHASES.map(([, title], i) => h("li", {
      class: round.phase === "abandoned" ? "failed" : i < current ? "past" : i === current ? "current" : "",
      "aria-current": i === current ? "step" : null,
    }, title)));
}

function waits(round, open, state) {
  const name = h("strong", { id: "round-name", title: `number ${round.round} of the server` }, `Round ${round.job_round}`);
  return h("p", { class: "waits number" }, name, " ", sentence(round, open, state.group));
}

function sentence(round, open, group) {
  if (round.phase === "abandoned") return `was abandoned: ${round.reason}.`;
  if (!open) return round.model_version ? `published model ${round.model_version} in ${duration(round.seconds)}.` : "has ended.";
  if (open.what === "aggregation") return `adds up ${plural(round.delivered, "update")}.`;
  const names = open.clients.length && open.need - open.have <= open.clients.length ? open.clients.map((name) => middle(name)).join(", ") : "";
  const left = secondsUntil(open.until);
  const limit = left > 0 ? ` (at most ${longDuration(left)} more)` : "";
  if (open.what === "clients") return `waits for clients: ${open.have} of ${open.need} are ready${limit}.`;
  if (open.what === "evaluations") return `is evaluated: ${open.have} of ${open.need} have reported${names && `, it waits for ${names}`}.`;
  if (group && group.phase === "gathering") return `forms its group: it waits for workers to be ready${limit}.`;
  if (group && group.phase === "running") return `is trained by ${plural(group.members.length, "worker")} together${limit}.`;
  const stalled = round.stalled?.length ? `, not for ${round.stalled.map((name) => middle(name)).join(", ")} (stalled)` : "";
  return `has ${open.have} of ${open.need} updates${names && `, and waits for ${names}`}${stalled}${limit}.`;
}

export function showTiles(state, job, rounds) {
  const published = rounds.filter((round) => round.phase === "published");
  const last = published.at(-1);
  const rated = published.filter((round) => round.loss != null);
  const sums = (key) => rounds.reduce((sum, round) => sum + round[key], 0);
  const server = state.server;
  const peer = sums("peer_bytes");
  const tiles = [
    ...quality(published, rated, job),
    ["Loss", number(rated.at(-1)?.loss), rated.length ? `after round ${rated.at(-1).job_round}` : ""],
    ["Round time", last ? duration(last.seconds) : "–", last ? `training ${duration(last.train_seconds_max)} at most` : ""],
    ["Clients", server ? count(server.watching) : "–", server ? `ready, of ${count(server.clients)} connected` : ""],
    ["Sent up", bytes(sums("upload_bytes")), peer ? `+ ${bytes(peer)} to peers` : encodingNote(job?.mode === "federated" ? job.encoding : "fp32", job)],
    ["Sent down", bytes(sums("download_bytes")), encodingNote(job?.download_encoding, job)],
  ];
  fill(at("tiles"), tiles.map(([name, value, note]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value), h("dd", { class: "note", title: note }, note || "\u00a0"))));
}

// The figure by which the models of the job are compared; nothing if that is the clients' loss, which has its own tile.
function quality(published, rated, job) {
  const [direction, name] = bestRule(job, published);
  const values = published.map((round) => round.metrics[name]).filter((value) => value != null);
  if (!values.length) return rated.length ? [] : [["Accuracy", percent(null), "not evaluated yet"]];
  if (name === "eval/loss" && !job?.best_by) return [];
  const best = direction === "max" ? Math.max(...values) : Math.min(...values);
  const show = name.endsWith("/accuracy") ? percent : number;
  return [[name === "eval/accuracy" ? "Accuracy" : name, show(values.at(-1)), `best ${show(best)}`]];
}

const encodingNote = (encoding, job) => (job && encoding ? `as ${encoding === "full" ? "full models" : encoding}` : "");

// How full the buffer of an asynchronous round is, how old its updates are, and who is at work; null if it has none.
function bufferLine(round) {
  const now = round?.asynchronous;
  if (!now) return null;
  const ages = {};
  for (const age of Object.values(now.staleness)) ages[age] = (ages[age] ?? 0) + 1;
  const shown = Object.entries(ages).map(([age, times]) => `${count(times)} of age ${age}`).join(", ");
  const old = shown ? ` (${shown}, in versions)` : "";
  return h("p", { id: "buffer", class: "muted number" },
    `Buffer: ${count(Object.keys(now.staleness).length)} of ${plural(now.buffer, "update")}${old}; ` +
    `${count(now.at_work)} of ${plural(now.concurrency, "client")} at work.`);
}
