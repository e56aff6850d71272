// The curves and bars of a job, of two jobs that are compared, and of single clients.

import { showBuffers } from "./buffers.js";
import { at, fill, h } from "./dom.js";
import { bestRule, bytes, duration, middle, number, percent } from "./format.js";
import { draw, palette } from "./plots.js";

const ENCODINGS = ["uniform", "packed", "fp32", "int8", "fp32_sparse", "sq8", "fp16", "bf16", "none"];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const MOST_NAME = 24; // letters of a name in a legend
const LEAST_SPAN = 0.05; // the least part of all accuracies, 0 to 1, that an axis shows

// Draw the plots of a job's history: its job, its rounds, and `others`, the histories of jobs to compare.
export async function showCharts({ job, rounds }, others) {
  const of = (history) => history.rounds.filter((round) => round.phase === "published");
  const published = of({ rounds });
  const compared = [{ job, rounds: published }, ...others.map((other) => ({ job: other.job, rounds: of(other) }))];
  const metric = chosenMetric(published, job);
  const named = compared.map((one) => one.job?.job_id ?? 0);
  const title = (what) => `${what} of ${named.length > 1 ? "jobs" : "job"} ${named.join(", ")}`;
  putFirst(bestRule(job, published)[1]);
  fill(at("totals"), totals(published, job));
  showBuffers(published);
  await Promise.all([
    metric === "accuracy" ? draw("accuracy", accuracy(compared, title("accuracy")))
      : draw("accuracy", {
        traces: curves(compared, metric, (round) => round.metrics[metric], ".6~g"), title: title(metric), show: number, best: directionOf(metric, job, published), nothing: "",
      }),
    draw("loss", {
      traces: [...curves(compared, "clients' samples", (round) => round.loss, ".4f"), ...curves(compared, "server's samples", (round) => round.server_loss, ".4f", 1)],
      yaxis: { rangemode: "tozero" }, title: title("loss"), show: number, best: "min", nothing: "No round has been evaluated yet.",
    }),
    draw("bytes", {
      traces: bars(published, job), yaxis: { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" }, layout: { barmode: "stack", bargap: 0.25 },
      title: `bytes of job ${job?.job_id ?? 0}`, show: bytes, nothing: "No round has been published yet.",
    }),
  ]);
}

// Let the plot of what the job compares its rounds by come first.
function putFirst(best) {
  const [loss, metric] = ["loss", "accuracy"].map((id) => at(id).closest("section"));
  const first = /^(eval|server)\/loss$/.test(best) ? loss : metric;
  const second = first === loss ? metric : loss;
  if (first.nextElementSibling !== second) second.before(first);
}

// The metric that the plot beside the loss shows: the user's choice, otherwise what the job compares its rounds by,
// otherwise accuracy, otherwise what the job has instead of it.
function chosenMetric(rounds, job) {
  const select = at("metric");
  const best = bestRule(job, rounds)[1];
  const names = [...new Set(rounds.flatMap((round) => Object.keys(round.metrics)))].sort()
    .filter((name) => !/^(eval|server)\/(accuracy|loss)$/.test(name));
  const own = job?.best_by && names.includes(best) ? best : null;
  const said = JSON.stringify(names);
  if (select.dataset.said !== said) { // a list that the user has opened must stay open
    select.dataset.said = said;
    fill(select, h("option", { value: "accuracy" }, "Accuracy"), names.map((name) => h("option", { value: name }, name)));
  }
  select.disabled = !names.length;
  const usual = own ?? (isClassified(rounds) || !isEvaluated(rounds) ? "accuracy"
    : [best, ...names].find((name) => names.includes(name) && !name.startsWith("train/")) ?? "accuracy");
  select.value = names.includes(select.dataset.chosen) || select.dataset.chosen === "accuracy" ? select.dataset.chosen : usual;
  return select.value;
}

const isEvaluated = (rounds) => rounds.some((round) => round.loss != null || round.server_loss != null);
const isClassified = (rounds) => rounds.some((round) => round.accuracy != null || round.server_accuracy != null);

function directionOf(metric, job, rounds) {
  const [direction, name] = bestRule(job, rounds);
  return name === metric ? direction : null;
}

function accuracy(compared, title) {
  const traces = [...curves(compared, "clients' samples", (round) => round.accuracy, ".2%"),
                  ...curves(compared, "server's samples", (round) => round.server_accuracy, ".2%", 1)];
  const [low, high] = shareRange(traces.flatMap((trace) => trace.y));
  const evaluated = compared.some(({ rounds }) => isEvaluated(rounds));
  return {
    traces, title, show: percent, best: "max", yaxis: { tickformat: "~%", range: [low, high] },
    range: low > 0 ? `The axis shows ${Math.round(100 * low)} % to ${Math.round(100 * high)} %.` : "",
    nothing: evaluated ? "Accuracy is not defined for this job." : "No round has been evaluated yet.",
  };
}

// The part of 0 to 1, in whole percents, that an axis for these values shows: at least LEAST_SPAN, so that small
// differences look small.
export function shareRange(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const margin = Math.max(0.06 * (most - least), (LEAST_SPAN - (most - least)) / 2);
  const high = Math.min(most + margin, 1);
  const low = Math.max(Math.min(least - margin, high - LEAST_SPAN), 0);
  return [Math.floor(100 * low) / 100, Math.ceil(100 * Math.max(high, low + LEAST_SPAN) - 1e-9) / 100];
}

// A curve for each of the compared jobs, which has one colour. `kind` is 0 for the clients' samples, and 1 for the server's.
function curves(compared, name, of, format, kind = 0) {
  const several = compared.length > 1;
  return compared.map(({ job, rounds }, i) =>
    curve(rounds, several ? `job ${job?.job_id}, ${name}` : name, of, format, several ? i : kind, kind ? "dot" : DASHES[i % 2]))
    .filter((trace) => trace.x.length);
}

function curve(rounds, name, of, format, series, dash) {
  const color = palette().series[series % 6];
  const known = rounds.filter((round) => of(round) != null);
  return {
    type: "scatter", mode: "lines+markers", label: name, name: escaped(middle(name, MOST_NAME)), x: known.map((round) => round.job_round), cliponaxis: false,
    y: known.map(of), line: { color, width: 2, dash }, marker: { color, size: known.length > 60 ? 3 : 6 },
    hovertemplate: `%{y:${format}}<extra>${escaped(middle(name, MOST_NAME))}</extra>`,
  };
}

// Plotly would take a name with angle brackets for markup.
const escaped = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// The kinds of traffic: the name of each, and a function from a round to its bytes.
function traffic(rounds, job) {
  const used = new Set(rounds.flatMap((round) => Object.keys(round.upload_by_encoding)));
  const kinds = ENCODINGS.filter((name) => used.has(name)).map((name) => ({
    name: `up, ${name}`, side: "up", of: (round) => round.upload_by_encoding[name] ?? 0,
  }));
  kinds.push({ name: `down, ${job?.download_encoding || "full"}`, side: "down", of: (round) => round.download_bytes });
  kinds.push({ name: "between workers", side: "peers", of: (round) => round.peer_bytes });
  return kinds.filter((kind) => rounds.some((round) => kind.of(round)));
}

function bars(rounds, job) {
  const colors = palette();
  const fixed = { down: colors.series[4], peers: colors.series[2] };
  let next = 0;
  return traffic(rounds, job).map((kind) => ({
    type: "bar", label: kind.name, name: kind.name, offsetgroup: kind.side, x: rounds.map((round) => round.job_round), y: rounds.map(kind.of),
    marker: { color: fixed[kind.side] ?? colors.series[[0, 1, 3, 5][next++ % 4]] },
    customdata: rounds.map((round) => bytes(kind.of(round))),
    hovertemplate: `%{customdata}<extra>${kind.name}</extra>`,
  }));
}

function totals(rounds, job) {
  const kinds = traffic(rounds, job);
  return [kinds.length ? h("li", {}, "All rounds:") : null, ...kinds.map((kind) =>
    h("li", {}, `${kind.name}: `, h("span", { class: "number" }, bytes(rounds.reduce((sum, round) => sum + kind.of(round), 0)))))];
}

// A curve for each client

const FIGURES = {
  train_seconds: ["training time", (client) => client.train_seconds, duration, { ticksuffix: " s", rangemode: "tozero" }],
  upload_bytes: ["bytes sent", (client) => client.upload_bytes, bytes, { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" }],
  download_bytes: ["bytes received", (client) => client.download_bytes, bytes, { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" }],
  num_samples: ["samples", (client) => client.num_samples, (value) => value.toLocaleString("en"), { rangemode: "tozero" }],
};

export async function showClientCurves(rounds, job) {
  const told = rounds.filter((round) => round.clients?.length);
  const metrics = [...new Set(told.flatMap((round) => round.clients.flatMap((client) => Object.keys(client.metrics))))].sort();
  const select = at("figure");
  const options = [...Object.entries(FIGURES).map(([key, [title]]) => [key, title]), ...metrics.map((name) => [`metric ${name}`, name])];
  if (select.dataset.said !== JSON.stringify(options)) {
    const chosen = select.value;
    select.dataset.said = JSON.stringify(options);
    fill(select, options.map(([value, text]) => h("option", { value }, text)));
    select.value = options.some(([value]) => value === chosen) ? chosen : "train_seconds";
  }
  const name = select.value.replace("metric ", "");
  const [title, of, show, yaxis] = FIGURES[select.value] ?? [name, (client) => client.metrics[name], number, {}];
  const clients = [...new Set(told.flatMap((round) => round.clients.map((client) => client.client_id)))].sort();
  const most = Math.max(0, ...rounds.map((round) => round.delivered));
  at("by-client-note").textContent = most > clients.length && clients.length ? `the first ${clients.length} of a round, by name` : "";
  await draw("by-client", {
    traces: clients.map((id, i) => {
      const part = (round) => round.clients.find((client) => client.client_id === id);
      const took = told.filter(part).map((round) => ({ job_round: round.job_round, client: part(round) }));
      return curve(took, id, (round) => of(round.client), ".4~g", i, DASHES[Math.floor(i / 6) % 4]);
    }).filter((trace) => trace.x.length),
    title: `${title} of the clients of job ${job?.job_id ?? 0}`, show, yaxis, nothing: "No round of this job has ended yet.",
  });
}
