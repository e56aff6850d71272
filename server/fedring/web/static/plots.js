// A plot with all that belongs to it: its caption, the same figures as a table, and files to take away.

import { at, empty, fill, h, table } from "./dom.js";

const CONFIG = { displayModeBar: false, responsive: true };
const MOST_ROWS = 200;
const frames = new Map(); // by the id of the plot: what it shows now

// The script is large, so it is loaded when there is something to draw, and the page does not wait for it.
let loading = null;
function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = new URL("plotly.min.js", import.meta.url);
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      loading = null; // the next plot tries again
      reject(new Error("plotly did not load"));
    };
    document.head.append(script);
  });
  return loading;
}

// Draw a plot, and say in words what it shows. `plot` has: traces; title, for files; show, from a value to its text;
// yaxis and layout, for plotly; range, what the axis shows if that is not from 0; nothing, the text without traces.
// Each trace has a label besides what plotly knows: its name as it is, since plotly takes some names for markup.
export async function draw(id, plot) {
  const element = at(id);
  frame(id).plot = plot;
  showFrame(id);
  if (!plot.traces.length) {
    if (element.data) (await plotly()).purge(element);
    return fill(element, empty(plot.nothing));
  }
  try {
    const Plotly = await plotly();
    if (frame(id).plot !== plot) return; // there is something newer to draw
    if (!element.data) element.replaceChildren();
    await Plotly.react(element, plot.traces, layout(plot), CONFIG);
  } catch (error) {
    fill(element, empty(`The plot cannot be drawn: ${error.message}.`));
  }
}

// The table, the caption and the buttons of a plot

function frame(id) {
  if (!frames.has(id)) {
    const button = (text, what, act) => {
      const made = h("button", { type: "button", "aria-label": what, title: what }, text);
      made.addEventListener("click", act);
      return made;
    };
    const made = { plot: null, asTable: false };
    made.caption = h("p", { class: "caption", id: `${id}-caption` });
    made.table = h("div", { class: "scroll plain", tabindex: 0, role: "group", hidden: true, "aria-labelledby": `${id}-title` });
    made.toggle = button("Table", "show the figures of this plot as a table", () => {
      made.asTable = !made.asTable;
      showFrame(id);
      if (!made.asTable) draw(id, made.plot); // its width may have changed
    });
    made.tools = h("div", { class: "tools" }, made.toggle,
      button("CSV", "save the figures of this plot as a CSV file", () => saveCsv(made.plot)),
      button("PNG", "save this plot as a PNG file", () => savePng(id, made.plot)));
    at(`${id}-title`).after(made.tools);
    at(id).after(made.caption, made.table);
    at(id).setAttribute("role", "img");
    at(id).setAttribute("aria-labelledby", `${id}-title`);
    at(id).setAttribute("aria-describedby", `${id}-caption`);
    frames.set(id, made);
  }
  return frames.get(id);
}

function showFrame(id) {
  const { plot, asTable, caption, tools, toggle, table: place } = frame(id);
  const some = plot.traces.length > 0;
  tools.hidden = !some;
  toggle.setAttribute("aria-pressed", String(asTable));
  place.hidden = !(some && asTable);
  at(id).hidden = some && asTable;
  caption.textContent = some ? [...plot.traces.map((trace) => sentence(trace, plot)), (!asTable && plot.range) || ""].filter(Boolean).join(" ") : "";
  if (!place.hidden) {
    const { names, rows } = figures(plot);
    const shown = rows.slice(-MOST_ROWS).reverse().map(([round, ...values]) => [String(round), ...values.map((value) => (value == null ? "–" : plot.show(value)))]);
    const more = rows.length > MOST_ROWS ? empty(`and ${rows.length - MOST_ROWS} older rounds, which the CSV file has`) : null;
    fill(place, table(plot.title, names.map((name) => [name, "right"]), shown), more);
  }
}

// What a curve shows, in words: screen readers read it, and so can everybody else.
function sentence(trace, { traces, show, best }) {
  const name = traces.length > 1 ? `${trace.label}: ` : "";
  const text = `${name}${show(trace.y.at(-1))} in round ${trace.x.at(-1)}`;
  if (!best || trace.y.length < 2) return `${text}.`;
  const most = trace.y.reduce((chosen, value, i) => (best === "max" ? value > trace.y[chosen] : value < trace.y[chosen]) ? i : chosen, 0);
  return `${text}; ${best === "max" ? "highest" : "lowest"} ${show(trace.y[most])} in round ${trace.x[most]}.`;
}

// The figures of a plot: a row for each round, with a value for each curve.
export function figures({ traces }) {
  const rounds = [...new Set(traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
  const columns = traces.map((trace) => new Map(trace.x.map((round, i) => [round, trace.y[i]])));
  return { names: ["round", ...traces.map((trace) => trace.label)], rows: rounds.map((round) => [round, ...columns.map((column) => column.get(round))]) };
}

// Files

export function csv(plot) {
  const { names, rows } = figures(plot);
  return [names.map(quoted), ...rows.map((row) => row.map((value) => value ?? ""))].map((cells) => `${cells.join(",")}\r\n`).join("");
}

// Clients choose their own names, and a spreadsheet computes what begins with one of these characters.
const quoted = (name) => `"${name.replace(/^[=+\-@\t]/, "'$&").replaceAll('"', '""')}"`;

const fileName = (plot, kind) => `fedring ${plot.title}.${kind}`.replace(/[^\w.]+/g, "-");

function save(url, name) {
  const link = h("a", { href: url, download: name });
  link.click();
}

function saveCsv(plot) {
  const url = URL.createObjectURL(new Blob([csv(plot)], { type: "text/csv" }));
  save(url, fileName(plot, "csv"));
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

async function savePng(id, plot) {
  const Plotly = await plotly();
  const { ink, card } = palette();
  const own = layout(plot);
  const title = { text: plot.title, font: { size: 15, color: ink }, x: 0.02, xanchor: "left", y: 0.97, yanchor: "top" };
  const xaxis = { ...own.xaxis, title: { text: "round" } };
  const picture = { data: plot.traces, layout: { ...own, title, xaxis, paper_bgcolor: card, margin: { ...own.margin, t: 76, b: 52 } } };
  save(await Plotly.toImage(picture, { format: "png", width: 900, height: 480, scale: 2 }), fileName(plot, "png"));
}

// Looks

function layout({ traces, yaxis, layout: more }) {
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
    ...more,
  };
}

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  return { ink: color("muted"), line: color("line"), card: color("card"), series: [1, 2, 3, 4, 5, 6].map((i) => color(`c${i}`)) };
}
