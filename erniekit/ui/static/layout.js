// The page Layout: which rank holds what, and the estimated memory of each, as a picture.

import { post } from "./api.js";
import { check, chooser, current } from "./configuration.js";
import { fill, figures, h, heading, later, table } from "./dom.js";
import { bytes, number, percent } from "./format.js";

const NAMES = { data: "data", pipeline: "pipeline", sharding: "sharding", tensor: "tensor" };

export async function show(main, signal) {
  const shown = h("div", { class: "card", "aria-live": "polite" });
  const ranks = h("input", { id: "ranks", type: "number", min: "1", max: "100000", placeholder: "as few as it needs" });
  async function draw() {
    try {
      await check(current.text);
      const answer = await post("layout", { text: current.text, path: current.path || "config.yaml", ranks: Number(ranks.value) || 0 }, { signal });
      fill(shown, drawn(answer));
    } catch (error) {
      if (!signal.aborted) fill(shown, h("p", { class: "note bad", role: "alert" }, error.message));
    }
  }
  ranks.addEventListener("input", later(draw, 300));
  const form = h("form", { class: "card", onsubmit: (event) => event.preventDefault() }, h("div", { class: "row" },
    h("div", { class: "grow" }, h("label", { for: "file" }, "Configuration file"), await chooser(draw)),
    h("div", { class: "grow" }, h("label", { for: "ranks" }, "Ranks (GPUs, or processes on a CPU)"), ranks)));
  fill(main, heading("Layout and memory", "What each rank would hold, computed without running anything: full rows, the formats of the device, and the measured overhead of a process."), form, shown);
  await draw();
}

function drawn(answer) {
  const { ranks, degrees, stages, unknown } = answer;
  const layout = Object.entries(degrees).filter(([, degree]) => degree > 1).map(([axis, degree]) => `${NAMES[axis]} ${degree}`).join(" × ");
  const most = stages ? Math.max(...stages.map(({ total }) => total)) : 0;
  const top = figures([
    ["ranks", number(ranks)],
    ["layout", layout || "one process"],
    ["parameters", stages && number(answer.parameters)],
    ["of them trained", answer.trained !== null && stages && number(answer.trained)],
    ["memory of a rank", stages && bytes(most)],
    ["tokens of a step", stages && number(answer.tokens)],
    ["pipeline bubble", degrees.pipeline > 1 && stages ? percent(answer.bubble) : null],
    ...Object.entries(answer.traffic ?? {}).map(([axis, size]) => [`sent in a step, ${axis}`, bytes(size)]),
  ].filter(([, value]) => value !== false));
  const memory = unknown ? h("p", { class: "note warn" }, `The memory is not known: ${unknown}`) : memoryOf(answer, most);
  const missing = (answer.not_counted ?? []).map((what) => h("p", { class: "note warn" }, `Not counted: ${what}`));
  return [top, memory, ...missing, ranksOf(answer)];
}

function memoryOf({ stages, formats }, most) {
  const purposes = [...new Set(stages.flatMap(({ memory }) => Object.keys(memory)))];
  const colour = (purpose) => `c${(purposes.indexOf(purpose) % 8) + 1}`;
  const label = (purpose) => purpose.replaceAll("_", " ");
  const bars = stages.map(({ layers, memory, total }, index) => {
    const name = `${stages.length > 1 ? `Stage ${index}: ` : ""}layers ${layers}, ${bytes(total)}`;
    const parts = Object.entries(memory).map(([purpose, size]) => {
      const part = h("span", { class: `fill ${colour(purpose)}`, title: `${label(purpose)}: ${bytes(size)}` });
      part.style.width = `${(100 * size) / most}%`;
      return part;
    });
    return h("div", { class: "stage" }, h("h3", {}, name), h("div", { class: "bar", role: "img", "aria-label": `${name}; the table below has the parts` }, parts));
  });
  const legend = h("ul", { class: "legend" }, purposes.map((purpose) => h("li", {}, h("i", { class: `fill ${colour(purpose)}` }), label(purpose))));
  const rows = stages.map(({ layers, memory, total }, index) => [String(index), layers, ...purposes.map((purpose) => (memory[purpose] ? bytes(memory[purpose]) : "")), bytes(total)]);
  const numbers = purposes.map((_, index) => index + 2).concat(purposes.length + 2);
  return h("section", { class: "card" }, h("h2", {}, "Memory of each rank"), h("p", { class: "soft small" }, formats), bars, legend, h("details", {}, h("summary", {}, "As a table"), table(["stage", "layers", ...purposes.map(label), "total"], rows, numbers)));
}

function ranksOf({ ranks, degrees, places }) {
  const parts = (place) => [
    `batch ${place.batch}`,
    degrees.pipeline > 1 && `stage ${place.pipeline}`,
    degrees.tensor > 1 && `matrices ${place.tensor} of ${degrees.tensor}`,
    degrees.sharding > 1 && `optimizer ${place.sharding} of ${degrees.sharding}`,
  ].filter(Boolean);
  const cards = places.map((place) => h("li", { class: `rank c${(place.pipeline % 8) + 1}` }, h("b", {}, `rank ${place.rank}`), parts(place).map((text) => h("div", {}, text))));
  const more = ranks > places.length ? h("p", { class: "soft small" }, `and ${number(ranks - places.length)} more, numbered in the same way`) : null;
  return h("section", { class: "card" }, h("h2", {}, "Which rank holds what"), h("ul", { class: "ranks" }, cards), more);
}
