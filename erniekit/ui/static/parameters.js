// The page Parameters: the reference, searched as one types.

import { schema } from "./configuration.js";
import { attributes } from "./field.js";
import { fill, h, heading, later, prose } from "./dom.js";

const MOST = 80;

export async function show(main, signal, asked) {
  const { sections } = await schema();
  if (signal.aborted) return;
  const all = sections.flatMap(({ title, parameters, aliases }) => [...parameters.map((each) => ({ ...each, title })), ...aliases.map((each) => ({ ...each, title, rows: [["stands for", each.target]], choices: [] }))]);
  const search = h("input", { id: "search", type: "search", autocomplete: "off", placeholder: "warmup, memory, checkpoint …" });
  search.value = asked;
  const section = h("select", { id: "section" }, h("option", { value: "" }, "all sections"), sections.map(({ title }) => h("option", {}, title)));
  const found = h("div", { class: "card" });
  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = ({ name, meaning, choices, title }) => (!section.value || section.value === title) && words.every((word) => `${name} ${meaning} ${choices.join(" ")}`.toLowerCase().includes(word));
    const hits = all.filter(fits);
    const rank = ({ name }) => (words.includes(name) ? 2 : words.some((word) => name.includes(word)) ? 1 : 0);
    hits.sort((a, b) => rank(b) - rank(a));
    fill(found, h("h2", { role: "status" }, `${hits.length} of ${all.length}`), hits.slice(0, MOST).map(entry), hits.length > MOST ? h("p", { class: "soft" }, "Search for a word to see the others.") : null);
  }
  search.addEventListener("input", later(draw, 100));
  section.addEventListener("change", draw);
  fill(main, heading("Parameters", "What each line of a configuration means, from the same declarations as `erniekit params`."),
    h("div", { class: "card" }, h("div", { class: "row" }, h("div", { class: "grow" }, h("label", { for: "search" }, "Search"), search), h("div", { class: "grow" }, h("label", { for: "section" }, "Section"), section))), found);
  draw();
}

function entry({ name, meaning, rows, title, example }) {
  return h("article", { class: "sample", id: `parameter-${name}` }, h("h3", {}, h("code", {}, name), h("span", { class: "soft small" }, `  ${title}`)), h("p", {}, prose(meaning)), attributes(rows), example ? h("pre", { class: "note" }, example) : null);
}
