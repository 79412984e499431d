// One field of the form: label, control, unit, meaning, and what is wrong with its value.

import { fill, h, later, prose } from "./dom.js";

/** Return the element of a parameter's field. `set(name, value)` is called with the text, or null for "not set". */
export function fieldOf(parameter, set) {
  const { name, kind, choices, unit, meaning, rows } = parameter;
  const id = `field-${name}`;
  const described = `${id}-meaning ${id}-problem`;
  const control = kind === "text" ? textControl(parameter, set, id) : choiceControl(name, kind === "boolean" ? ["true", "false"] : choices, set, id);
  control.setAttribute("aria-describedby", described);
  const [first, ...rest] = meaning.split(/(?<=\.) /);
  const more = h("details", {}, h("summary", {}, prose(first)), rest.length ? h("p", {}, prose(rest.join(" "))) : null, attributes(rows));
  return h("div", { class: "field", id: `${id}-row` },
    h("label", { for: id }, name),
    h("div", { class: "control" }, control, unit ? h("span", { class: "unit" }, unit) : null),
    h("div", { class: "meaning", id: `${id}-meaning` }, more),
    h("p", { class: "problem", id: `${id}-problem` }));
}

/** Return the attributes of a declaration: type, bounds, where it applies. */
export function attributes(rows) {
  return h("dl", { class: "attributes" }, rows.map(([label, text]) => [h("dt", {}, label), h("dd", {}, prose(text))]).flat());
}

function textControl({ name, number, required }, set, id) {
  const control = h("input", { id, type: "text", inputmode: number ? "decimal" : null, autocomplete: "off", spellcheck: "false", "aria-required": required ? "true" : null });
  const send = () => set(name, control.value.trim() === "" ? null : control.value);
  control.addEventListener("input", later(send, 350));
  return control;
}

function choiceControl(name, choices, set, id) {
  const control = h("select", { id }, h("option", { value: "" }), choices.map((choice) => h("option", { value: choice }, choice)));
  control.addEventListener("change", () => set(name, control.value === "" ? null : control.value));
  return control;
}

/** Show in a field what the text writes, the default, and the problems. The field that is being typed into stays. */
export function refresh(element, parameter, answer) {
  const control = element.querySelector("input, select");
  const written = answer.written[parameter.name];
  const value = answer.values[parameter.name];
  const fallback = value && !value.set ? `${value.text} (${value.origin})` : parameter.default;
  const isText = control.tagName === "INPUT";
  if (isText) {
    control.placeholder = parameter.required && !fallback ? "required" : fallback;
  } else {
    control.options[0].textContent = fallback ? `default: ${fallback.replaceAll("`", "")}` : "not set";
    takeWritten(control, written);
  }
  if (document.activeElement !== control && control.value !== (written ?? "")) control.value = written ?? "";
  element.classList.toggle("set", written !== undefined);
  const own = answer.problems.filter(({ name }) => name === parameter.name);
  control.setAttribute("aria-invalid", own.length ? "true" : "false");
  fill(element.querySelector(".problem"), own.map(({ text }) => text).join("\n"));
}

/** Let a choice show a value that is written otherwise or wrong, so that it can be seen and corrected. */
function takeWritten(control, written) {
  control.querySelector("option[data-other]")?.remove();
  if (written !== undefined && ![...control.options].some(({ value }) => value === written)) {
    control.append(h("option", { value: written, "data-other": true }, written));
  }
}
