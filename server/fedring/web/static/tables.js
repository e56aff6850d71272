// Clients, rounds, models and events as tables and lists.

import { at, bar, called, empty, fill, h, table } from "./dom.js";
import { bytes, clock, count, duration, middle, number, percent } from "./format.js";
import { badge } from "./now.js";
import { lostIn, stepTimes } from "./privacy.js";

const MOST_ROWS = 200;
const GOOD = new Set(["round_published", "round_evaluated", "group_formed"]);
const BAD = new Set([
  "round_abandoned", "client_failed", "evaluation_failed", "client_lied", "client_stalled", "round_stragglers", "client_lost", "client_refused", "update_refused", "group_lost", "storage_failed",
  "blob_damaged", "other_samples",
]);
const STATES = { watching: ["good", "ready"], joined: ["warn", "joining"], away: ["bad", "away"] };

// How clients can be sorted: the word for people, and what is compared.
const READY = { watching: 1, joined: 2, away: 3 };
const ready = (client) => (client.why ? (client.state === "watching" ? 1.5 : READY[client.state]) : READY[client.state]);
const ORDERS = {
  "client-name": (a, b) => 0, // as the server sends them
  "client-ready": (a, b) => ready(b) - ready(a),
  "client-slow": (a, b) => !!b.activity - !!a.activity || (a.progress ?? 0) - (b.progress ?? 0),
  "client-updates": (a, b) => b.updates - a.updates,
};

// `page` is what the server has found, if it was asked; `turn` shows another part.
export function showClients(clients, server, page, turn) {
  at("clients-title").replaceChildren("Clients ", h("span", { class: "muted" }, `${count(server?.clients ?? 0)} connected`));
  at("client-tools").hidden = !clients?.length && !page;
  if (!clients?.length && !page) {
    return fill(at("clients"), empty("No client is connected. On each client's machine: ", h("code", {}, "fl-client server=HOST:PORT")));
  }
  const wanted = at("client-search").value.trim().toLowerCase();
  const found = clients.filter((client) => page || !wanted || searched(client).includes(wanted)).sort(ORDERS[at("client-order").value]);
  const columns = [["client", ""], ["state", ""], ["activity", ""], ["this round", ""], ["updates", "right"], ["software", ""], ["address", ""]];
  if (found.some((client) => client.why)) columns.splice(2, 0, ["why not ready", "why"]);
  const rows = found.map((client) => {
    const [kind, word] = stateOf(client);
    const cells = [called(client.client_id), h("span", { class: `dot ${kind}` }, word),
      doing(client), client.part || "–", count(client.updates), client.software, client.address.replace(/^ipv[46]:/, "")];
    if (columns.length > cells.length) cells.splice(2, 0, client.why ? h("span", { class: "warn" }, client.why) : "–");
    return cells;
  });
  const skip = page?.skip ?? 0, total = page?.total ?? known(server), left = total - skip - clients.length;
  const more = left > 0 || skip ? empty(left > 0 ? `and ${count(left)} more: flctl clients ` : "", pager("earlier", skip > 0, turn, skip - MOST_ROWS), " ", pager("later", left > 0, turn, skip + MOST_ROWS)) : null;
  at("client-count").textContent = page ? `${count(total)} of ${count(known(server))}` : wanted ? `${count(found.length)} of ${count(clients.length)}` : "";
  fill(at("clients"), found.length ? table("clients", columns, rows) : empty("No client fits the search."), more);
}

// How many clients there are, with those that are away.
export const known = (server) => server?.known ?? server?.clients ?? 0;

function pager(word, shown, turn, skip) {
  if (!shown) return "";
  const button = h("button", { type: "button", class: "page" }, word);
  button.addEventListener("click", () => turn(Math.max(0, skip)));
  return button;
}

// A client in session that the round cannot draw is not ready for it.
const stateOf = (client) => (client.state === "watching" && client.why ? ["warn", "not ready"] : STATES[client.state] ?? ["", client.state]);
const searched = (client) => [client.client_id, stateOf(client)[1], client.activity, client.part, client.why, client.software, client.address].join(" ").toLowerCase();

function doing(client) {
  if (client.state === "away") return "–";
  if (!client.activity) return h("span", { class: "muted" }, "idle");
  return [client.activity, bar(client.progress ?? 0, `${client.client_id}: ${client.activity}`)];
}

export function showRounds(rounds, job) {
  at("rounds-of").textContent = job ? `of job ${job.job_id}, newest first` : "";
  if (!rounds.length) return fill(at("rounds"), empty("No round of this job has ended yet."));
  const columns = [["round", "right"], ["phase", ""], ["clients", "right"], ["accuracy", "right"], ["loss", "right"], ["time", "right"],
                   ["sent", "right"], ["received", "right"], ["from model", "right"], ["new model", "right"], ["missing", ""]];
  const rows = rounds.slice(-MOST_ROWS).reverse().map((round) => [
    h("span", { title: `number ${round.round} of the server` }, count(round.job_round)), badge(round.reason || round.phase, round.phase === "published" ? "good" : "bad"),
    h("span", { title: guarded(round) }, `${count(round.delivered)} of ${count(round.selected)}`),
    warned(round, percent(round.accuracy)), number(round.loss), round.seconds ? duration(round.seconds) : "–",
    bytes(round.upload_bytes), bytes(round.download_bytes), round.base_version || "–", round.model_version || "–",
    h("span", { title: missing(round, (name) => name) || lostIn(round) }, missing(round, (name) => middle(name)) || lostIn(round) || "–"),
  ]);
  const more = rounds.length > MOST_ROWS ? empty(`and ${count(rounds.length - MOST_ROWS)} older ones: flctl rounds --job ${job.job_id}`) : null;
  fill(at("rounds"), table("rounds of the job", columns, rows), more);
}

// The clients whose updates the guards of the job have changed, how long secure aggregation took, and what went wrong.
function guarded(round) {
  const named = [["shortened to the job's bound", round.clipped], ["counted for max_samples", round.capped],
    ["left out from now on for wrong shares", round.liars], ["left out for wrong shares before", round.left_out]];
  const told = named.filter(([, names]) => names?.length).map(([what, names]) => `${what}: ${names.join(", ")}`);
  return [...told, stepTimes(round), ...(round.warnings ?? [])].filter(Boolean).join("; ");
}

// A figure, marked if something is missing from it, such as the evaluation of a client.
function warned(round, figure) {
  return round.warnings?.length ? h("span", { class: "bad", title: round.warnings.join("; ") }, `${figure} (!)`) : figure;
}

// The clients that did not deliver, and why if the round did not wait for them.
function missing(round, written) {
  const why = (name) => (round.stalled?.includes(name) ? " (stalled)" : round.stragglers?.includes(name) ? " (straggler)" : "");
  return round.missing.map((name) => written(name) + why(name)).join(", ");
}

export function showModels(models) {
  if (!models?.length) return fill(at("models"), empty("The server has no model yet."));
  const columns = [["version", "right"], ["round", "right"], ["accuracy", "right"], ["loss", "right"], ["size", "right"], ["digest", ""]];
  const rows = models.map((model) => [
    count(model.version), publisher(model),
    percent(model.accuracy), number(model.loss), bytes(model.bytes),
    h("code", { title: `${model.digest}, ${count(model.parameters)} parameters` }, model.digest.replace("blake3-", "").slice(0, 8)),
  ]);
  fill(at("models"), table("models that the server keeps", columns, rows));
}

const publisher = (model) => (model.job_round
  ? [model.best_of_job ? h("span", { class: "badge good", title: `the best model of job ${model.job_id}` }, "best") : "", " ",
     h("span", { title: `round ${model.job_round} of job ${model.job_id}, number ${model.round} of the server` }, `${model.job_id}.${model.job_round}`)]
  : model.round ? String(model.round) : "first");

// What has happened, newest first, under a heading for each round. `numbers` gives the round of the job by the server's number.
export function showEvents(events, jobs, numbers) {
  if (!events?.length) return fill(at("events"), empty("Nothing has happened yet."));
  const failed = new Set((jobs ?? []).filter((job) => job.state === "failed").map((job) => job.job_id));
  const bad = (event) => BAD.has(event.kind) || (event.kind === "job_ended" && failed.has(event.job_id));
  const groups = []; // events of the same round that follow each other
  for (const event of events.toReversed()) {
    const key = `${event.job_id} ${event.round}`;
    if (groups.at(-1)?.key !== key) groups.push({ key, event, rows: [] });
    groups.at(-1).rows.push(h("li", {},
      h("time", { datetime: event.at, title: event.at }, clock(event.at)),
      h("span", { class: bad(event) ? "bad" : GOOD.has(event.kind) ? "good" : "" }, event.text)));
  }
  fill(at("events"), groups.map(({ event, rows }) => [h("h3", {}, heading(event, numbers)), h("ol", { class: "events" }, rows)]));
}

function heading({ job_id: job, round }, numbers) {
  if (!job) return "Server and clients";
  const name = h("a", { href: `#job=${job}` }, `Job ${job}`);
  if (!round) return name;
  const own = numbers.get(round);
  return [name, own ? `, round ${own}` : h("span", { class: "muted" }, `, number ${round} of the server`)];
}
