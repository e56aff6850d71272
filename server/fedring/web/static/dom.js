// Elements made from data. Text stays text: no code of the page parses markup.

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

export const empty = (...children) => h("p", { class: "empty" }, ...children);

// A table with rows of cells. A column is [title, class].
export function table(caption, columns, rows) {
  const head = columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  const body = rows.map((cells) =>
    h("tr", {}, cells.map((cell, i) => h("td", { class: columns[i][1] }, cell))),
  );
  return h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
}

// A share as a bar. Screen readers read `label`.
export const bar = (share, label) =>
  h("div", { class: "bar", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100,
             "aria-valuenow": Math.round(100 * share) },
    h("span", { style: { width: `${100 * Math.min(Math.max(share, 0), 1)}%` } }));
