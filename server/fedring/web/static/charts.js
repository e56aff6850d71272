// Curves and bars, drawn by plotly.

import { at, empty, fill, h } from "./dom.js";
import { bestRule, bytes } from "./format.js";

const ENCODINGS = ["uniform", "packed", "fp32", "int8", "fp32_sparse", "sq8", "fp16", "bf16", "none"];
const CONFIG = { displayModeBar: false, responsive: true };

// The script is large, so the page does not wait for it.
export const plotly = new Promise((resolve, reject) => {
  const script = document.createElement("script");
  script.src = "plotly.min.js";
  script.onload = () => resolve(window.Plotly);
  script.onerror = () => reject(new Error("plotly did not load"));
  document.head.append(script);
});
plotly.catch(() => {}); // the function that draws shows the error

export async function showCharts(rounds, job) {
  const published = rounds.filter((round) => round.phase === "published");
  const metric = chosenMetric(published, job);
  fill(at("totals"), totals(published, job));
  await Promise.all([
    metric === "accuracy"
      ? draw(at("accuracy"), curves(published, "accuracy", ".2%"), { tickformat: "~%" }, noAccuracy(published))
      : draw(at("accuracy"), [curve(published, metric, (round) => round.metrics[metric], ".6~g", 0)], {}, ""),
    draw(at("loss"), curves(published, "loss", ".4f"), { rangemode: "tozero" }, "No round has been evaluated yet."),
    draw(at("bytes"), bars(published, job), { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" },
      "No round has been published yet.", { barmode: "stack", bargap: 0.25 }),
  ]);
}

// The metric that the first plot shows: the user's choice, otherwise accuracy, otherwise what the job has instead of it.
function chosenMetric(rounds, job) {
  const select = at("metric");
  const names = [...new Set(rounds.flatMap((round) => Object.keys(round.metrics)))].sort()
    .filter((name) => !/^(eval|server)\/(accuracy|loss)$/.test(name));
  const said = JSON.stringify(names);
  if (select.dataset.said !== said) { // a list that the user has opened must stay open
    select.dataset.said = said;
    fill(select, h("option", { value: "accuracy" }, "Accuracy"), names.map((name) => h("option", { value: name }, name)));
  }
  const usual = isClassified(rounds) || !isEvaluated(rounds) ? "accuracy"
    : [bestRule(job)[1], ...names].find((name) => names.includes(name) && !name.startsWith("train/")) ?? "accuracy";
  select.value = names.includes(select.dataset.chosen) || select.dataset.chosen === "accuracy" ? select.dataset.chosen : usual;
  return select.value;
}

const isEvaluated = (rounds) => rounds.some((round) => round.loss != null || round.server_loss != null);
const isClassified = (rounds) => rounds.some((round) => round.accuracy != null || round.server_accuracy != null);
const noAccuracy = (rounds) => (isEvaluated(rounds) ? "Accuracy is not defined for this job." : "No round has been evaluated yet.");

function curves(rounds, key, format) {
  const traces = [curve(rounds, "clients' samples", (round) => round[key], format, 0),
                  curve(rounds, "server's samples", (round) => round[`server_${key}`], format, 1, "dot")];
  return traces.filter((trace) => trace.x.length);
}

function curve(rounds, name, of, format, series, dash) {
  const color = palette().series[series];
  const known = rounds.filter((round) => of(round) != null);
  return {
    type: "scatter", mode: "lines+markers", name, x: known.map((round) => round.job_round),
    y: known.map(of), line: { color, width: 2, dash }, marker: { color, size: known.length > 60 ? 3 : 6 },
    hovertemplate: `%{y:${format}}<extra>${name}</extra>`,
  };
}

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
    type: "bar", name: kind.name, offsetgroup: kind.side, x: rounds.map((round) => round.job_round), y: rounds.map(kind.of),
    marker: { color: fixed[kind.side] ?? colors.series[[0, 1, 3, 5][next++ % 4]] },
    customdata: rounds.map((round) => bytes(kind.of(round))),
    hovertemplate: `%{customdata}<extra>${kind.name}</extra>`,
  }));
}

function totals(rounds, job) {
  return traffic(rounds, job).map((kind) =>
    h("li", {}, `${kind.name}: `, h("span", { class: "number" }, bytes(rounds.reduce((sum, round) => sum + kind.of(round), 0)))));
}

async function draw(element, traces, yaxis, nothing, more = {}) {
  if (!traces.length) {
    if (element.data) (await plotly).purge(element);
    return fill(element, empty(nothing));
  }
  try {
    const Plotly = await plotly;
    if (!element.data) element.replaceChildren();
    await Plotly.react(element, traces, { ...layout(yaxis, traces), ...more }, CONFIG);
  } catch (error) {
    fill(element, empty(`The plot cannot be drawn: ${error.message}.`));
  }
}

function layout(yaxis, traces) {
  const { ink, line, card } = palette();
  const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, fixedrange: true, automargin: true };
  const most = Math.max(...traces.flatMap((trace) => trace.x));
  return {
    autosize: true, dragmode: false, hovermode: "x unified", hoverdistance: -1, uirevision: "same",
    margin: { l: 48, r: 8, t: 6, b: 32 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, Segoe UI, DejaVu Sans, sans-serif", size: 12, color: ink },
    hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink } },
    showlegend: traces.length > 1, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
    xaxis: { ...axis, showgrid: false, tickformat: "d", unifiedhovertitle: { text: "round %{x}" }, ...(most < 11 ? { dtick: 1 } : {}) },
    yaxis: { ...axis, ...yaxis },
  };
}

function palette() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: color("muted"), line: color("line"), card: color("card"), series: [1, 2, 3, 4, 5, 6].map((i) => color(`c${i}`)) };
}
