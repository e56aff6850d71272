// Elements made from data. Text stays text: no code of the page parses markup.

import { middle } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "style") Object.assign(element.style, value); // the content security policy forbids the attribute
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

export const h = (tag, attributes, ...children) => build(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => build(document.createElementNS(SVG, tag), attributes, children);
export const at = (id) => document.getElementById(id);

// Replace the children of `element`, and keep its scroll position.
export function fill(element, ...children) {
  const { scrollTop, scrollLeft } = element;
  element.replaceChildren(...children.flat(Infinity).filter((child) => child != null && child !== false));
  element.scrollTop = scrollTop;
  element.scrollLeft = scrollLeft;
}

// A name that others have chosen, which may be long: cut in the middle, whole in the tooltip.
export const called = (name, most) => h("span", { title: name }, middle(name, most));

export const empty = (...children) => h("p", { class: "empty" }, ...children);

// A table with rows of cells. A column is [title, class]. On narrow screens, each row becomes a block with the titles in
// it. The roles keep it a table for screen readers there.
export function table(caption, columns, rows) {
  const head = columns.map(([title, kind]) => h("th", { scope: "col", role: "columnheader", class: kind }, title));
  const body = rows.map((cells) =>
    h("tr", { role: "row" }, cells.map((cell, i) => h("td", { role: "cell", class: columns[i][1], "data-title": columns[i][0] }, h("span", {}, cell)))),
  );
  return h("table", { role: "table" }, h("caption", { class: "unseen" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)), h("tbody", { role: "rowgroup" }, body));
}

// A share as a bar. Screen readers read `label`.
export const bar = (share, label) =>
  h("div", { class: "bar", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
             "aria-valuenow": Math.round(100 * share) },
    h("span", { style: { width: `${100 * Math.min(Math.max(share, 0), 1)}%` } }));
