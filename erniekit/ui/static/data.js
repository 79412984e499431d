// The page Data: the first packs as the model sees them. Trained text is marked; borders of documents are drawn.

import { post } from "./api.js";
import { check, chooser, current } from "./configuration.js";
import { fill, h, heading } from "./dom.js";
import { number } from "./format.js";

export async function show(main, signal) {
  const shown = h("div", { class: "card", "aria-live": "polite" }, h("p", { class: "empty" }, "Nothing is read yet."));
  const rows = h("input", { id: "rows", type: "number", min: "1", max: "8", value: "1" });
  const documents = h("input", { id: "documents", type: "number", min: "1", max: "100", value: "8" });
  const button = h("button", { class: "main" }, "Show the data");
  const form = h("form", { class: "card" }, h("div", { class: "row" },
    h("div", { class: "grow" }, h("label", { for: "file" }, "Configuration file"), await chooser(() => fill(shown, h("p", { class: "empty" }, "Nothing is read yet.")))),
    h("div", {}, h("label", { for: "rows" }, "Packs"), rows),
    h("div", {}, h("label", { for: "documents" }, "Documents of each"), documents),
    h("div", {}, button)));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    fill(shown, h("p", { class: "empty" }, "Reading and tokenising the data …"));
    try {
      await check(current.text);
      const answer = await post("preview", { text: current.text, path: current.path || "config.yaml", rows: Number(rows.value), documents: Number(documents.value) }, { signal });
      fill(shown, drawn(answer));
    } catch (error) {
      if (!signal.aborted) fill(shown, h("p", { class: "note bad", role: "alert" }, error.message));
    } finally {
      button.disabled = false;
    }
  });
  fill(main, heading("Data", "The first packs of the first step, as the model reads them: what the template adds, which text it is trained to say, where one document ends."), form, shown);
}

function drawn({ rows, report, plan }) {
  const legend = h("p", { class: "small soft" }, h("mark", {}, "underlined"), " is trained, ", h("mark", { class: "rejected" }, "dashed"), " is a rejected answer, the rest is only read. A dashed border begins a new document: attention does not cross it.");
  return [legend, rows.map(row), h("details", {}, h("summary", {}, "Files and steps"), h("pre", { class: "note" }, `${report}\n\n${plan}`))].flat();
}

function row({ what, total, positions, padding, documents }, index) {
  const title = `Pack ${index + 1}: ${total} ${what}, ${number(positions)} positions${padding ? `, ${number(padding)} padding` : ""}`;
  const whole = positions + padding;
  const rest = positions - (documents.at(-1)?.end ?? 0);
  const bar = h("div", { class: "pack", role: "img", "aria-label": title }, documents.map(({ start, end }, place) => part(end - start, whole, "", place + 1)), rest ? part(rest, whole, "", "…") : null, padding ? part(padding, whole, "padding", "padding") : null);
  return h("section", { class: "stage" }, h("h2", {}, title), bar, documents.map(document_), rest ? h("p", { class: "soft small" }, `and ${total - documents.length} more`) : null);
}

function part(size, whole, kind, text) {
  const element = h("span", { class: kind, title: `${number(size)} positions` }, size / whole > 0.03 ? String(text) : "");
  element.style.width = `${(100 * size) / whole}%`;
  return element;
}

function document_({ location, start, end, targets, parts }, place) {
  const counts = targets.map(number).join(" + ");
  return h("article", { class: "document" },
    h("h3", {}, `${place + 1} `, h("span", { class: "soft small mono" }, `${location} · positions ${number(start)}–${number(end - 1)} · ${counts} trained`)),
    parts.map(({ name, stretches }) => [name ? h("p", { class: "small soft" }, `${name} answer`) : null, h("pre", { class: "tokens" }, stretches.map(({ trained, text }) => (trained ? h("mark", { class: name === "rejected" ? "rejected" : null }, text) : text)))]).flat());
}
