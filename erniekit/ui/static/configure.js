// The page Configure: a form of all parameters, and the YAML text beside it. Each changes the other.

import { post } from "./api.js";
import { change, check, chooser, current, isChanged, save, schema } from "./configuration.js";
import { fieldOf, refresh } from "./field.js";
import { fill, h, heading, later, tell } from "./dom.js";

export async function show(main, signal) {
  const [described, file] = await Promise.all([schema(), chooser(() => redraw())]);
  await check(current.text);
  if (signal.aborted) return;
  const fields = new Map(); // name -> the element of its field; those that have been opened
  const everything = described.sections.flatMap((section) => section.parameters);
  const byName = new Map(everything.map((parameter) => [parameter.name, parameter]));

  const text = h("textarea", { id: "yaml", spellcheck: "false", autocapitalize: "off", "aria-describedby": "verdict" });
  const verdict = h("p", { id: "verdict", class: "note", role: "status" });
  const problems = h("ul", { class: "problems" });
  const notes = h("div", {});
  const saving = h("button", { onclick: () => attempt(store) }, "Save");
  const starting = h("button", { class: "main", onclick: () => attempt(begin) }, "Start run");
  const name = h("input", { id: "path", autocomplete: "off", spellcheck: "false", placeholder: "my-run.yaml" });
  const search = h("input", { id: "search", type: "search", placeholder: "learning rate, lora, save …", autocomplete: "off" });
  const form = h("form", { onsubmit: (event) => event.preventDefault() });

  const typed = later(async () => (await check(text.value)) && tellAll(), 250);
  text.addEventListener("input", () => {
    current.text = text.value;
    typed();
  });
  name.addEventListener("input", () => (saving.disabled = !isChanged() && name.value === current.path));
  search.addEventListener("input", later(drawForm, 120));

  async function set(name, value) {
    try {
      if (await change(name, value)) tellAll();
    } catch (error) {
      tell(error.message);
      redraw();
    }
  }

  function field(parameter) {
    if (!fields.has(parameter.name)) fields.set(parameter.name, fieldOf(parameter, set));
    const element = fields.get(parameter.name);
    refresh(element, parameter, current.answer);
    return element;
  }

  /** Draw the fields that the search finds, or all: the essential ones open, each section behind its title. */
  function drawForm() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) {
      const found = everything.filter(({ name, meaning, choices }) => words.every((word) => `${name} ${meaning} ${choices.join(" ")}`.toLowerCase().includes(word)));
      found.sort((a, b) => named(b) - named(a));
      const title = h("h2", { role: "status" }, `${found.length} of ${everything.length} parameters`);
      fill(form, h("div", { class: "card" }, title, h("div", {}, found.slice(0, 60).map(field))));
      return;
    }
    const first = h("div", { class: "card" }, h("h2", {}, "Essentials"), h("div", {}, described.first.map((name) => field(byName.get(name)))));
    fill(form, first, h("div", { class: "card" }, described.sections.map(section)));
  }

  function named({ name }) {
    return search.value.toLowerCase().split(/\s+/).filter(Boolean).some((word) => name.includes(word)) ? 1 : 0;
  }

  function section({ title, summary, parameters }) {
    const others = parameters.filter(({ name }) => !described.first.includes(name));
    const count = h("span", { class: "soft small" }, ` ${others.length}`);
    const element = h("details", { class: "section" }, h("summary", {}, title, count), h("p", { class: "soft small" }, summary));
    element.addEventListener("toggle", () => element.open && element.childElementCount === 2 && element.append(h("div", {}, others.map(field))));
    return element;
  }

  /** Show what the check has said: at the fields, above the text, and on the buttons. */
  function tellAll() {
    const { answer } = current;
    if (document.activeElement !== text || text.value !== answer.text) {
      const { selectionStart, selectionEnd } = text;
      if (text.value !== answer.text) text.value = answer.text;
      if (document.activeElement === text) text.setSelectionRange(selectionStart, selectionEnd);
    }
    for (const [name, element] of fields) refresh(element, byName.get(name), answer);
    verdict.className = `note ${answer.valid ? "good" : "bad"}`;
    const count = answer.problems.length;
    fill(verdict, answer.valid ? "Valid: this run can begin." : count === 1 ? "1 problem" : `${count} problems`);
    fill(problems, answer.problems.map((problem) => h("li", {}, problem.name && byName.has(problem.name) ? h("button", { type: "button", class: "link", onclick: () => goTo(problem.name) }, problem.name) : null, " ", problem.text)));
    fill(notes, answer.notes.length ? h("details", {}, h("summary", {}, `${answer.notes.length} notes: what was expanded, changed or has no effect`), h("p", { class: "note warn" }, answer.notes.join("\n"))) : null);
    saving.disabled = !isChanged() && name.value === current.path;
    starting.disabled = !answer.valid;
  }

  /** Bring the field of a parameter into view. */
  function goTo(name) {
    if (!fields.get(name)?.isConnected) {
      search.value = name;
      drawForm();
    }
    const element = fields.get(name);
    element.closest("details")?.setAttribute("open", "");
    element.querySelector("input, select").focus();
    element.scrollIntoView({ block: "center" });
  }

  async function store() {
    const path = name.value.trim();
    if (!path) {
      name.focus();
      throw new Error("Name the file first, such as my-run.yaml.");
    }
    await save(path);
    fill(place, await chooser(() => redraw()));
    tellAll();
    tell(`saved ${path}`);
  }

  async function begin() {
    if (isChanged() || !current.path) await store();
    const run = await post("run/start", { path: current.path, resume: resume.checked });
    location.hash = `#/runs/${encodeURIComponent(run.output)}`;
  }

  async function attempt(work) {
    try {
      await work();
    } catch (error) {
      fill(problems, h("li", { class: "note bad", role: "alert" }, error.message));
    }
  }

  function redraw() {
    fields.clear();
    drawForm();
    text.value = current.text;
    name.value = current.path;
    tellAll();
  }

  const place = h("div", {}, file);
  const resume = h("input", { type: "checkbox", id: "resume" });
  const labelled = (title, control) => h("div", { class: "grow" }, h("label", { for: control.id || "file" }, title), control);
  const bar = h("div", { class: "card" },
    h("div", { class: "row ends" }, labelled("Configuration file", place), labelled("Save as", name), saving, starting),
    h("div", { class: "row" }, verdict, h("label", { class: "inline" }, resume, "continue from the newest checkpoint")), problems, notes);
  const find = h("div", { class: "card" }, h("label", { for: "search" }, `Search ${everything.length} parameters`), search);
  const left = h("div", { class: "stack", role: "region", "aria-label": "Form" }, find, form);
  const right = h("div", { class: "card yaml" }, h("label", { for: "yaml" }, "YAML"), text);
  fill(main, heading("Configure", "Fill in the form or write the YAML; each follows the other. A run is a process of its own: it goes on when this page is closed."), bar, h("div", { class: "split" }, left, right));
  redraw();
}
