// Numbers, times and sizes as text.

let ahead = 0; // milliseconds by which the server's clock is ahead of this computer's clock

export function setClock(date) {
  const told = Date.parse(date ?? "");
  if (!Number.isNaN(told) && Math.abs(told - Date.now()) > 2000) ahead = told - Date.now();
}

const RULES = ["max eval/accuracy", "max server/accuracy", "min eval/loss", "min server/loss"];

// How the rounds of a job are compared: "max" or "min", and the name of a metric. It is the job's key best_by, or else the
// first of RULES whose metric any round has.
export function bestRule(job, rounds) {
  const rules = (job?.best_by ? [job.best_by] : RULES).map((rule) => rule.split(" "));
  return rules.find(([, name]) => rounds.some((round) => round.metrics[name] != null)) ?? rules[0];
}

export const secondsUntil = (time) => (Date.parse(time) - Date.now() - ahead) / 1000;

export function bytes(count) {
  for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (count >= 0.9995 * scale) {
      const value = count / scale;
      return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
    }
  }
  return `${count} B`;
}

export const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(2)} %`);

export const number = (value, digits = 3) =>
  value == null ? "–" : Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toFixed(digits);

export const count = (value) => value.toLocaleString("en");

export function duration(seconds) {
  if (seconds < 0.1 && seconds > 0) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return longDuration(seconds);
}

// A duration whose text changes at most once per second.
export function longDuration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const hours = Math.floor(whole / 3600);
  return hours < 48 ? `${hours} h ${Math.floor((whole % 3600) / 60)} min` : `${Math.floor(hours / 24)} days`;
}

// A long name without its middle: the ends are what people tell names apart by.
export function middle(name, most = 28) {
  const letters = [...name];
  if (letters.length <= most) return name;
  const end = Math.floor((most - 1) / 2);
  return `${letters.slice(0, most - 1 - end).join("")}…${letters.slice(-end).join("")}`;
}

export const clock = (time) => new Date(time).toLocaleTimeString("en-GB");

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
