// The page Runs: all runs of the folder, one of them live, and several side by side.

import { get, post } from "./api.js";
import { chart } from "./chart.js";
import { fill, figures, h, heading, table, tell } from "./dom.js";
import { number, time } from "./format.js";

const EVERY = 1500; // milliseconds between two looks at a run
const CURVES = [["Loss", ["loss", "eval_loss"]], ["Learning rate", ["learning_rate"]], ["Tokens per second", ["tokens_per_second"]], ["Gradient norm", ["grad_norm"]]];
const LABELS = { loss: "training", eval_loss: "held out", learning_rate: "learning rate", tokens_per_second: "tokens/s", grad_norm: "norm" };
const MOST_COMPARED = 8;

export async function show(main, signal, chosen) {
  const list = h("ul", { class: "runs" });
  const detail = h("div", { class: "card" });
  const compared = new Set();
  fill(main, heading("Runs", "Every run of this folder, also those that a terminal has started. Choose one to watch it, tick several to compare them."), h("div", { class: "split thin" }, h("div", { class: "card" }, h("h2", {}, "Runs"), list), detail));

  async function drawList() {
    const runs = await get("runs");
    if (signal.aborted) return runs;
    if (!runs.length) fill(list, h("li", {}, h("p", { class: "soft" }, "There is no run yet. Start one from ", h("a", { href: "#/configure" }, "Configure"), ".")));
    else fill(list, runs.map(item));
    return runs;
  }

  function item(run) {
    const box = h("input", { type: "checkbox", "aria-label": `compare ${run.output}` });
    box.checked = compared.has(run.output);
    box.addEventListener("change", () => {
      if (box.checked) compared.add(run.output);
      else compared.delete(run.output);
      if (compared.size > MOST_COMPARED) compared.delete([...compared][0]);
      for (const other of list.children) other.classList.toggle("chosen", compared.size ? other.querySelector("input").checked : other.querySelector("a").textContent === chosen);
      compare();
    });
    const link = h("a", { href: `#/runs/${encodeURIComponent(run.output)}`, "aria-current": run.output === chosen ? "true" : null }, run.output);
    return h("li", { class: run.output === chosen ? "chosen" : null }, box, h("div", {}, link, h("span", { class: "small soft" }, badge(run), ` ${time(run.at)}`)));
  }

  async function compare() {
    if (compared.size < 2) {
      if (compared.size === 0) watch();
      else fill(detail, h("p", { class: "empty" }, "Tick another run to compare it."));
      return;
    }
    live += 1;
    try {
      fill(detail, await comparison([...compared]));
    } catch (error) {
      fill(detail, h("p", { class: "note bad", role: "alert" }, error.message));
    }
  }

  let live = 0; // of the run that is watched now
  async function watch() {
    live += 1;
    const own = live;
    if (!chosen) {
      fill(detail, h("p", { class: "empty" }, "Choose a run."));
      return;
    }
    const view = viewOf(chosen);
    fill(detail, view.element);
    let cursor = "", records = [];
    while (!signal.aborted && own === live) {
      try {
        const run = await get("run", { output: chosen, cursor });
        if (signal.aborted || own !== live) return;
        records = run.fresh ? run.records : records.concat(run.records);
        const changed = run.fresh || run.records.length > 0;
        cursor = run.cursor;
        const ended = view.draw(run, records, changed);
        if (ended) {
          await drawList();
          return;
        }
      } catch (error) {
        view.refuse(error.message);
        if (error.status) return;
      }
      await pause(EVERY, signal);
    }
  }

  const runs = await drawList();
  if (!chosen && runs.length) chosen = runs[0].output;
  if (runs.length) fill(list, runs.map(item));
  watch();
}

const badge = ({ state, code }) => h("span", { class: `badge ${state}` }, state === "failed" ? `failed (${code})` : state);

/** Wait; while the page is hidden, until it is seen again. */
function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const finish = () => (document.hidden && !signal.aborted ? document.addEventListener("visibilitychange", finish, { once: true }) : resolve());
    setTimeout(finish, milliseconds);
    signal.addEventListener("abort", resolve, { once: true });
  });
}

/** Return the view of one run: its element, `draw(run, records, changed)` -> whether it has ended, and `refuse(text)`. */
function viewOf(output) {
  const state = h("div", { class: "row" }), progress = h("div", {}), top = h("div", {}), charts = h("div", { class: "charts" });
  const problem = h("div", { role: "alert" }), samples = h("div", {}), said = h("pre", { class: "output", tabindex: "0", "aria-label": "Output of the run" });
  const outputs = h("details", { open: true }, h("summary", {}, "Output"), said);
  const controls = controlsOf(output);
  const element = h("div", { class: "talk" }, h("div", { class: "row" }, h("h2", { class: "grow" }, output), state), problem, progress, controls, top, charts, samples, outputs);
  let samplesShown = "";

  function draw(run, records, changed) {
    const ended = run.state === "ended" || run.state === "failed";
    fill(state, badge(run), run.file ? h("span", { class: "small soft mono" }, run.file) : null);
    controls.hidden = ended;
    const latest = records.findLast((record) => record.loss !== undefined) ?? {};
    const judged = records.findLast((record) => record.eval_loss !== undefined) ?? {};
    if (run.total && latest.step) fill(progress, h("label", { class: "small soft" }, `step ${number(latest.step)} of ${number(run.total)}`, h("progress", { max: String(run.total), value: latest.step })));
    fill(top, figures([["step", latest.step && number(latest.step)], ["epoch", latest.epoch && number(latest.epoch)], ["loss", latest.loss !== undefined && number(latest.loss)], ["held-out loss", judged.eval_loss !== undefined && number(judged.eval_loss)], ["learning rate", latest.learning_rate !== undefined && number(latest.learning_rate)], ["tokens/s", latest.tokens_per_second !== undefined && number(latest.tokens_per_second)]].filter(([, value]) => value)));
    if (changed) fill(charts, CURVES.map(([title, names]) => chart(title, names.map((name, index) => ({ name: LABELS[name], colour: index + 1, dots: name.startsWith("eval_"), points: pointsOf(records, name) })), names[0] !== "learning_rate")));
    const stays = said.scrollTop + said.clientHeight < said.scrollHeight - 30;
    if (said.textContent !== run.output_tail) fill(said, run.output_tail);
    if (!stays) said.scrollTop = said.scrollHeight;
    outputs.hidden = !run.output_tail;
    const written = JSON.stringify(run.samples);
    if (written !== samplesShown) fill(samples, samplesOf(run.samples));
    samplesShown = written;
    return ended;
  }

  return { element, draw, refuse: (text) => fill(problem, h("p", { class: "note bad" }, text)) };
}

const pointsOf = (records, name) => records.filter((record) => typeof record[name] === "number").map((record) => [record.step, record[name]]);

/** Return the buttons that tell a run something; its answers stand in its output. */
function controlsOf(output) {
  const rate = h("input", { id: "rate", placeholder: "1e-4", inputmode: "decimal", autocomplete: "off", size: "8", "aria-label": "New learning rate" });
  const line = h("input", { id: "command", placeholder: "save@3000", autocomplete: "off", spellcheck: "false", "aria-label": "Command" });
  const send = async (command) => {
    try {
      tell((await post("run/command", { output, command })).told);
    } catch (error) {
      tell(error.message);
    }
  };
  const form = (field, text, command) => h("form", { class: "row grow", onsubmit: (event) => {
    event.preventDefault();
    send(command(field.value.trim()));
  } }, h("div", { class: "grow" }, field), h("button", {}, text));
  return h("div", { class: "row", role: "group", "aria-label": "Tell the run" },
    h("button", { type: "button", onclick: () => send("save") }, "Save"),
    h("button", { type: "button", onclick: () => send("eval") }, "Evaluate"),
    h("button", { type: "button", class: "bad", onclick: () => send("quit") }, "Quit (saves)"),
    form(rate, "Set learning rate", (value) => `lr ${value || "schedule"}`),
    form(line, "Send", (value) => value || "status"));
}

function samplesOf(samples) {
  if (!samples.length) return null;
  const said = (sample) => sample.messages?.at?.(-1)?.content ?? sample.prompt ?? sample.text ?? "";
  const words = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const pair = (title, value) => (value === undefined || value === "" ? null : [h("dt", {}, title), h("dd", {}, words(value))]);
  return h("details", { open: true }, h("summary", {}, `Samples of the last evaluation: ${samples.length}`), samples.slice(0, 10).map((sample) => h("div", { class: "sample" }, h("dl", {}, [pair("asked", said(sample)), pair("expected", sample.expected), pair("answer", sample.answer ?? sample.heard)].flat()))));
}

/** Return curves of several runs over each other, and the parameters in which they differ. */
async function comparison(outputs) {
  const states = await Promise.all(outputs.map((output) => get("run", { output })));
  const parameters = await Promise.all(outputs.map((output) => get("run/parameters", { output })));
  const names = ["loss", "eval_loss", "learning_rate", "tokens_per_second", "grad_norm"];
  const titles = { loss: "Training loss", eval_loss: "Held-out loss", learning_rate: "Learning rate", tokens_per_second: "Tokens per second", grad_norm: "Gradient norm" };
  const charts = names.map((name) => chart(titles[name], states.map(({ output, records }, index) => ({ name: output, colour: index + 1, dots: name === "eval_loss", points: pointsOf(records, name) })), name !== "learning_rate"));
  const all = [...new Set(parameters.flatMap(Object.keys))].sort();
  const differing = all.filter((name) => new Set(parameters.map((values) => JSON.stringify(values[name] ?? null))).size > 1);
  const last = (records, name) => pointsOf(records, name).at(-1)?.[1];
  const best = (records, name) => pointsOf(records, name).reduce((least, [, value]) => Math.min(least, value), Infinity);
  const results = [["last loss", ...states.map(({ records }) => number(last(records, "loss")))], ["least held-out loss", ...states.map(({ records }) => (best(records, "eval_loss") < Infinity ? number(best(records, "eval_loss")) : "–"))], ["tokens/s", ...states.map(({ records }) => number(last(records, "tokens_per_second")))]];
  const cell = (value) => (value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
  return [h("h2", {}, `${outputs.length} runs side by side`), h("div", { class: "charts" }, charts.filter(Boolean)), h("h3", {}, "Results"), table(["", ...outputs], results), h("h3", {}, `Parameters that differ: ${differing.length}`), table(["parameter", ...outputs], differing.map((name) => [h("code", {}, name), ...parameters.map((values) => cell(values[name]))]))];
}
