// Make elements without markup in strings, so that no text of a file is ever read as markup.

/** Return an element: h("a", {href: "#", class: "link"}, "text", [more]). Names that begin with "on" are listeners. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat());
  return element;
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Say something at the foot of the page for some seconds; a screen reader says it, too. */
export function tell(text) {
  const place = document.getElementById("told");
  const line = h("p", {}, text);
  place.replaceChildren(line);
  setTimeout(() => line.remove(), 5000);
}

/** Return a function that calls `work` once no call has come for some time. */
export function later(work, milliseconds = 250) {
  let timer;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), milliseconds);
  };
}

/** Return a table. `columns`: titles; those in `numbers` are aligned to the right. */
export function table(columns, rows, numbers = []) {
  const kind = (index) => (numbers.includes(index) ? { class: "number" } : {});
  const head = h("tr", {}, columns.map((title, index) => h("th", { scope: "col", ...kind(index) }, title)));
  const body = rows.map((row) => h("tr", {}, row.map((cell, index) => h("td", kind(index), cell))));
  return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "table" }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
}

/** Return a list of figures with their names. */
export function figures(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: "figures" }, shown.map(([name, value]) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value))));
}

/** Return the top of a page. */
export function heading(title, text, ...actions) {
  return h("div", { class: "head" }, h("div", {}, h("h1", {}, title), h("p", {}, prose(text))), actions.length ? h("div", { class: "row" }, actions) : null);
}

/** Return a text of a declaration, with what stands in backticks as code. */
export function prose(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}
