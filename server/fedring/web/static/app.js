// The page: it listens to the server's stream, keeps the newest state, and shows what has changed.

import { showCharts, showClientCurves } from "./charts.js";
import { searchClients, showSome } from "./clients.js";
import { at, fill, h } from "./dom.js";
import { clock, longDuration, middle, setClock } from "./format.js";
import { showGroup } from "./group.js";
import { presentJob, showNow, showTiles } from "./now.js";
import { showSettings } from "./settings.js";
import { showEvents, showModels, showRounds } from "./tables.js";

const SILENCE = 12_000; // milliseconds; without a message for so long, the connection counts as lost
const state = {}; // the parts of api/state
// The rounds of a job: `job` as api/rounds tells it, `known` the id of the job that they belong to.
const history = () => ({ job: null, known: null, rounds: new Map(), clients: false, fetching: false, again: false });
const main = history();
const others = new Map(); // by the id of a job that is compared: its history
let chosen = 0; // the job that the user has chosen; 0 = the current one
const MOST_COMPARED = 5; // other jobs, since there are six colours

// The parts of the page

const chosenId = () => chosen || presentJob(state)?.job_id || 0;
const compared = () => [...others].filter(([id]) => id !== chosenId());
const jobOf = (id) => state.jobs?.find((job) => job.job_id === id) ?? (main.job?.job_id === id ? main.job : undefined);
// The number of each known round within its job, by the server's number.
const numbers = () => new Map([state.round, ...main.rounds.values()].filter(Boolean).map((round) => [round.round, round.job_round]));

function show(parts) {
  const has = (...names) => names.some((name) => parts.has(name));
  if (has("server")) showServer();
  if (has("jobs", "round")) showJobs();
  if (has("jobs", "round", "rounds", "waits_for", "group", "server", "privacy")) showNow(state);
  if (has("server", "jobs")) showHistory(false);
  if (has("clients", "server")) showSome(state);
  if (has("group")) showGroup(state.group);
  if (has("models")) showModels(state.models);
  if (has("events") || has("jobs")) showEvents(state.events, state.jobs, numbers());
  if (has("round", "jobs")) refreshRounds();
}

function showServer() {
  const up = state.server ? ` · up ${longDuration((Date.now() - Date.parse(state.server.started_at)) / 1000)}` : "";
  at("server").textContent = state.server ? `fl-server ${state.server.version}${up}${leads(state.server.leadership)}` : "";
}

function leads(lead) {
  if (!lead) return "";
  const since = `${new Date(lead.since).toLocaleString()}, term ${lead.term}`;
  if (!lead.here) return ` · a standby: ${lead.leader} leads since ${since}`;
  return ` · leads since ${since} · ${lead.standbys.length ? `waiting: ${lead.standbys.join(", ")}` : "no other server waits"}`;
}

function showJobs() {
  const jobs = state.jobs ?? [];
  const old = chosen && !jobs.some((job) => job.job_id === chosen) ? jobOf(chosen) ?? { job_id: chosen, name: "", state: "" } : null;
  const named = [...jobs, ...(old ? [old] : [])].map((job) =>
    ({ id: job.job_id, title: job.name, text: [job.job_id, middle(job.name, 40), job.state].filter(Boolean).join(" · ") }));
  const select = at("job");
  if (isNew(select, named)) {
    fill(select, h("option", { value: 0 }, jobs.length ? "current job" : "none yet"),
      named.map(({ id, title, text }) => h("option", { value: id, title }, text)));
  }
  if (select.value !== String(chosen)) select.value = String(chosen);
  select.disabled = !jobs.length;
  const link = at("job-link");
  link.hidden = !chosenId();
  link.href = `#job=${chosenId()}`;
  link.setAttribute("aria-label", `link to job ${chosenId()}`);
  showOthers(named.filter(({ id }) => id !== chosenId()));
}

function showOthers(named) {
  at("others").hidden = !named.length;
  const full = compared().length >= MOST_COMPARED;
  if (isNew(at("other"), [named, compared().map(([id]) => id), full])) {
    const focused = document.activeElement?.name === "other" ? document.activeElement.value : null;
    fill(at("other"), h("legend", { class: "unseen" }, "Jobs to compare with"), named.map(({ id, title, text }) =>
      h("label", { title }, h("input", { type: "checkbox", name: "other", value: id, checked: others.has(id), disabled: full && !others.has(id) }), text)));
    if (focused) at("other").querySelector(`[value="${focused}"]`)?.focus();
  }
  at("others").querySelector("summary").textContent = compared().length ? `Compare: ${compared().map(([id]) => id).join(", ")}` : "Compare";
}

// Whether a list differs from what it shows: one that the user has opened must stay as it is.
function isNew(element, content) {
  const said = JSON.stringify(content);
  if (element.dataset.said === said) return false;
  element.dataset.said = said;
  return true;
}

function showHistory(drawn = true) {
  const job = jobOf(chosenId());
  const rounds = [...main.rounds.values()];
  showTiles(state, job, rounds);
  if (!drawn) return;
  showRounds(rounds, job);
  const told = compared().filter(([id, other]) => other.job?.job_id === id).map(([, other]) => ({ job: other.job, rounds: [...other.rounds.values()] }));
  showCharts({ job, rounds }, told);
  showSettings(main.job?.job_id === chosenId() ? main.job : null, told.map((other) => other.job));
  showEvents(state.events, state.jobs, numbers());
  if (at("client-curves").open) showClientCurves(rounds, job);
}

// The rounds of the chosen job, and of the job that it is compared with

function refreshRounds() {
  refresh(main, chosenId, at("client-curves").open);
  for (const [id, other] of compared()) refresh(other, () => (others.get(id) === other ? id : 0), false);
}

async function refresh(told, idNow, clients) {
  if (told.fetching) return void (told.again = true);
  const id = idNow();
  if (told.known !== id || (clients && !told.clients)) {
    Object.assign(told, { known: id, clients });
    told.rounds.clear();
  }
  if (!id) return showHistory();
  told.fetching = true;
  // The newest known round is fetched again: it may have been evaluated since.
  const after = Math.max(0, Math.max(0, ...told.rounds.keys()) - 1);
  try {
    const response = await fetch(`api/rounds?job=${id}&after=${after}${told.clients ? "&clients=1" : ""}`);
    if (!response.ok) throw new Error(response.statusText);
    setClock(response.headers.get("date"));
    const answer = await response.json();
    if (id === idNow() && id === told.known) {
      told.job = answer.job;
      for (const round of answer.rounds) told.rounds.set(round.round, round);
      if (told === main) showUnknown(answer.job ? 0 : id);
      showJobs();
      showHistory();
    } else told.again = true;
  } catch {
    // When the stream is connected again, it sends everything, and the rounds are fetched again.
  }
  told.fetching = false;
  if (told.again) {
    told.again = false;
    refreshRounds();
  }
}

// The connection

let stream = null;
let asked = 0; // when the stream was opened or last received a message, whichever is later
let heard = 0; // when the stream last received a message
let retry = 1000;
let timer = 0;

function connect() {
  clearTimeout(timer);
  stream?.close();
  asked = Date.now();
  stream = new EventSource("api/stream");
  stream.addEventListener("beat", alive);
  stream.onmessage = (message) => {
    alive();
    const parts = JSON.parse(message.data);
    if (parts.server && parts.server.run_id !== state.server?.run_id) main.known = null, others.forEach((other) => (other.known = null)); // the page is connected to another server
    Object.assign(state, parts);
    show(new Set(Object.keys(parts)));
  };
  stream.onerror = lose;
}

function alive() {
  asked = heard = Date.now();
  retry = 1000;
  setLink("live");
  at("lost").hidden = true;
}

function lose() {
  stream?.close();
  stream = null;
  if (at("lost").hidden) {
    const asOf = heard ? `What you see is as of ${clock(heard)}; trying again.` : "Trying again.";
    at("lost").textContent = `The connection to the server is lost. ${asOf}`;
    at("lost").hidden = false;
  }
  setLink("lost");
  clearTimeout(timer);
  timer = setTimeout(connect, retry * (0.5 + Math.random()));
  retry = Math.min(2 * retry, 8000);
}

function pause() {
  clearTimeout(timer);
  stream?.close();
  stream = null;
  setLink("paused");
}

function setLink(word) {
  const link = at("link");
  if (link.dataset.link === word) return;
  link.dataset.link = word;
  link.textContent = word === "lost" ? "connection lost" : word;
}

// Links: the address names the job, and those that it is compared with, as in #job=7&with=5,6.

const ids = (text) => (text ?? "").split(",").map(Number).filter((id) => Number.isSafeInteger(id) && id > 0);

function follow() {
  const told = new URLSearchParams(location.hash.slice(1));
  if (location.hash.length > 1 && !told.has("job")) return; // it leads to a place in the page
  chosen = ids(told.get("job"))[0] ?? 0;
  const wanted = ids(told.get("with")).slice(0, MOST_COMPARED);
  for (const id of others.keys()) if (!wanted.includes(id)) others.delete(id);
  for (const id of wanted) if (!others.has(id)) others.set(id, history());
  showUnknown(0);
  if (!state.jobs) return; // the stream is about to tell them
  showJobs();
  refreshRounds();
}

// Choose a job, and others to compare it with, as a link would.
function go(job, wanted) {
  wanted = wanted.filter((id) => id !== (job || chosenId()));
  const told = [job ? `job=${job}` : wanted.length ? `job=${chosenId()}` : "", wanted.length ? `with=${wanted.join(",")}` : ""].filter(Boolean).join("&");
  window.history.replaceState(null, "", told ? `#${told}` : location.pathname + location.search);
  follow();
}

function showUnknown(id) {
  at("unknown").hidden = !id;
  at("unknown").textContent = id ? `This server knows no job ${id}.` : "";
}

at("job").addEventListener("change", (event) => go(Number(event.target.value), compared().map(([id]) => id)));
at("other").addEventListener("change", () => go(chosen, [...at("other").querySelectorAll(":checked")].map((box) => Number(box.value))));
at("client-search").addEventListener("input", () => searchClients(state));
at("client-order").addEventListener("input", () => showSome(state));
window.addEventListener("hashchange", follow);
at("all-settings").addEventListener("change", () => showHistory());
at("client-curves").addEventListener("toggle", () => refreshRounds());
at("figure").addEventListener("change", () => showHistory());
at("metric").addEventListener("change", (event) => {
  event.target.dataset.chosen = event.target.value;
  showHistory();
});
// A hidden page needs no messages, so it closes the stream.
document.addEventListener("visibilitychange", () => (document.hidden ? pause() : connect()));
window.addEventListener("online", connect);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => showHistory());
setInterval(() => {
  if (stream && Date.now() - asked > SILENCE) lose();
  if (stream && state.waits_for) showNow(state); // it shows how much time is left
  showServer();
}, 1000);
follow();
connect();
