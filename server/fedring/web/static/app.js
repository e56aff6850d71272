// The page: it listens to the server's stream, keeps the newest state, and shows what has changed.

import { showCharts, showClientCurves } from "./charts.js";
import { at, fill, h } from "./dom.js";
import { clock, longDuration, setClock } from "./format.js";
import { showGroup } from "./group.js";
import { presentJob, showNow, showTiles } from "./now.js";
import { showSettings } from "./settings.js";
import { showClients, showEvents, showModels, showRounds } from "./tables.js";

const SILENCE = 12_000; // milliseconds; without a message for so long, the connection counts as lost
const state = {}; // the parts of api/state
// The rounds of a job: `job` as api/rounds tells it, `known` the id of the job that they belong to.
const history = () => ({ job: null, known: null, rounds: new Map(), clients: false, fetching: false, again: false });
const main = history();
const other = history(); // of the job that is compared
let chosen = 0; // the job that the user has chosen; 0 = the current one
let compared = 0; // the job to compare it with; 0 = none

// The parts of the page

const chosenId = () => chosen || presentJob(state)?.job_id || 0;
const comparedId = () => (compared === chosenId() ? 0 : compared);
const jobOf = (id) => state.jobs?.find((job) => job.job_id === id);

function show(parts) {
  const has = (...names) => names.some((name) => parts.has(name));
  if (has("server")) showServer();
  if (has("jobs", "round")) showJobs();
  if (has("jobs", "round", "waits_for", "group", "server", "privacy")) showNow(state);
  if (has("server", "jobs")) showHistory(false);
  if (has("clients", "server")) showClients(state.clients, state.server);
  if (has("group")) showGroup(state.group);
  if (has("models")) showModels(state.models);
  if (has("events") || has("jobs")) showEvents(state.events, state.jobs);
  if (has("round", "jobs")) refreshRounds();
}

function showServer() {
  const up = state.server ? ` · up ${longDuration((Date.now() - Date.parse(state.server.started_at)) / 1000)}` : "";
  at("server").textContent = state.server ? `fl-server ${state.server.version}${up}` : "";
}

function showJobs() {
  const jobs = state.jobs ?? [];
  const named = jobs.map((job) => [String(job.job_id), `${job.job_id} · ${job.name} · ${job.state}`]);
  showOptions(at("job"), [["0", jobs.length ? "current job" : "none yet"], ...named], chosen, !jobs.length);
  showOptions(at("other"), [["0", "no other"], ...named.filter(([id]) => Number(id) !== chosenId())], comparedId(), jobs.length < 2);
}

function showOptions(select, options, value, disabled) {
  const said = JSON.stringify(options);
  if (select.dataset.said !== said) { // a list that the user has opened must stay open
    select.dataset.said = said;
    fill(select, options.map(([id, text]) => h("option", { value: id }, text)));
  }
  if (select.value !== String(value)) select.value = String(value);
  select.disabled = disabled;
}

function showHistory(drawn = true) {
  const job = jobOf(chosenId());
  const rounds = [...main.rounds.values()];
  showTiles(state, job, rounds);
  if (!drawn) return;
  showRounds(rounds, job);
  const second = comparedId() && other.job?.job_id === comparedId() ? { job: other.job, rounds: [...other.rounds.values()] } : null;
  showCharts({ job, rounds }, second);
  showSettings(main.job?.job_id === chosenId() ? main.job : null, second?.job);
  if (at("client-curves").open) showClientCurves(rounds, job);
}

// The rounds of the chosen job, and of the job that it is compared with

function refreshRounds() {
  refresh(main, chosenId, at("client-curves").open);
  refresh(other, comparedId, false);
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
    if (parts.server && parts.server.run_id !== state.server?.run_id) main.known = other.known = null; // the page is connected to another server
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

at("job").addEventListener("change", (event) => {
  chosen = Number(event.target.value);
  showJobs();
  refreshRounds();
});
at("other").addEventListener("change", (event) => {
  compared = Number(event.target.value);
  refreshRounds();
});
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
connect();
