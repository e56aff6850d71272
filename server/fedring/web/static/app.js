// The page: it listens to the server's stream, keeps the newest state, and shows what has changed.

import { showCharts } from "./charts.js";
import { at, fill, h } from "./dom.js";
import { clock, longDuration, setClock } from "./format.js";
import { showGroup } from "./group.js";
import { presentJob, showNow, showTiles } from "./now.js";
import { showClients, showEvents, showModels, showRounds } from "./tables.js";

const SILENCE = 12_000; // milliseconds; without a message for so long, the connection counts as lost
const state = {}; // the parts of api/state
const shown = { job: 0, known: null, rounds: new Map() }; // job: the chosen job, 0 = the present one; known: the job that `rounds` belongs to

// The parts of the page

const chosenId = () => shown.job || presentJob(state)?.job_id || 0;
const chosenJob = () => state.jobs?.find((job) => job.job_id === chosenId());

function show(parts) {
  const has = (...names) => names.some((name) => parts.has(name));
  if (has("server")) showServer();
  if (has("jobs", "round")) showJobs();
  if (has("jobs", "round", "waits_for", "group", "server")) showNow(state);
  if (has("server", "jobs")) showHistory(false);
  if (has("clients", "server")) showClients(state.clients, state.server);
  if (has("group")) showGroup(state.group);
  if (has("models")) showModels(state.models);
  if (has("events")) showEvents(state.events);
  if (has("round", "jobs")) refreshRounds();
}

function showServer() {
  const up = state.server ? ` · up ${longDuration((Date.now() - Date.parse(state.server.started_at)) / 1000)}` : "";
  at("server").textContent = state.server ? `fl-server ${state.server.version}${up}` : "";
}

function showJobs() {
  const select = at("job");
  const jobs = state.jobs ?? [];
  const options = [["0", jobs.length ? "the present one" : "none yet"],
                   ...jobs.map((job) => [String(job.job_id), `${job.job_id} · ${job.name} · ${job.state}`])];
  const said = JSON.stringify(options);
  if (select.dataset.said !== said) { // a list that the user has opened must stay open
    select.dataset.said = said;
    fill(select, options.map(([value, text]) => h("option", { value }, text)));
    select.value = String(shown.job);
  }
  select.disabled = !jobs.length;
}

function showHistory(drawn = true) {
  const job = chosenJob();
  const rounds = [...shown.rounds.values()];
  showTiles(state, job, rounds);
  if (!drawn) return;
  showRounds(rounds, job);
  showCharts(rounds, job);
}

// The rounds of the chosen job

let fetching = false;
let again = false;

async function refreshRounds() {
  if (fetching) return void (again = true);
  const job = chosenId();
  if (shown.known !== job) {
    shown.known = job;
    shown.rounds.clear();
  }
  if (!job) return showHistory();
  fetching = true;
  // The newest known round is fetched again: it may have been evaluated since.
  const after = Math.max(0, ...shown.rounds.keys()) - 1;
  try {
    const response = await fetch(`api/rounds?job=${job}&after=${Math.max(0, after)}`);
    if (!response.ok) throw new Error(response.statusText);
    setClock(response.headers.get("date"));
    const told = await response.json();
    if (job === chosenId()) {
      for (const round of told.rounds) shown.rounds.set(round.round, round);
      showHistory();
    } else again = true;
  } catch {
    // When the stream is connected again, it sends everything, and the rounds are fetched again.
  }
  fetching = false;
  if (again) {
    again = false;
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
    if (parts.server && parts.server.run_id !== state.server?.run_id) shown.known = null; // the page is connected to another server
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
  shown.job = Number(event.target.value);
  refreshRounds();
});
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
