// The settings of a job: those that differ from the defaults, and the rest on demand.

import { at, empty, fill, h } from "./dom.js";

export function showSettings(job, others) {
  const all = at("all-settings").checked;
  at("settings-of").textContent = job ? `of job ${job.job_id}${others.length ? `, and what is different in ${others.map((other) => `job ${other.job_id}`).join(", ")}` : all ? "" : " that differ from the defaults"}` : "";
  if (!job?.settings) return fill(at("settings"), empty("No job has run yet."));
  const differing = (key) => others.filter((other) => other.settings && text(other.settings[key]) !== text(job.settings[key]));
  const keys = Object.keys(job.settings).filter((key) => all || job.changed.includes(key) || differing(key).length);
  if (!keys.length) return fill(at("settings"), empty("All settings have their defaults."));
  fill(at("settings"), h("dl", { class: "settings" }, keys.map((key) => h("div", { class: job.changed.includes(key) ? "changed" : "" },
    h("dt", {}, key.split(/(?<=[._])/).map((part) => [part, h("wbr", {})])), h("dd", {}, text(job.settings[key])),
    differing(key).map((other) => h("dd", { class: "muted" }, `job ${other.job_id}: ${text(other.settings[key])}`))))));
}

const text = (value) => (value === "" || value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
