// The settings of a job: those that differ from the defaults, and the rest on demand.

import { at, empty, fill, h } from "./dom.js";

export function showSettings(job, other) {
  const all = at("all-settings").checked;
  at("settings-of").textContent = job ? `of job ${job.job_id}${other ? `, and what is different in job ${other.job_id}` : all ? "" : " that differ from the defaults"}` : "";
  if (!job?.settings) return fill(at("settings"), empty("No job has run yet."));
  const different = (key) => other?.settings && text(other.settings[key]) !== text(job.settings[key]);
  const keys = Object.keys(job.settings).filter((key) => all || job.changed.includes(key) || different(key));
  if (!keys.length) return fill(at("settings"), empty("All settings have their defaults."));
  fill(at("settings"), h("dl", { class: "settings" }, keys.map((key) => h("div", { class: job.changed.includes(key) ? "changed" : "" },
    h("dt", {}, key.split(/(?<=[._])/).map((part) => [part, h("wbr", {})])), h("dd", {}, text(job.settings[key])),
    different(key) ? h("dd", { class: "muted" }, `job ${other.job_id}: ${text(other.settings[key])}`) : null))));
}

const text = (value) => (value === "" || value == null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
