// The page Chat: talk with a model of this folder. Models that hear get a microphone, models that speak a player.

import { get, post, request } from "./api.js";
import { fill, h, heading } from "./dom.js";
import { base64, record, withLength } from "./sound.js";
import { pieces } from "./stream.js";

const EVERY = 1000; // milliseconds between two looks at a model that is loading
const turns = []; // {role, text, sound: a WAV blob, content: what the model gets}; kept while the page is open

export async function show(main, signal, asked) {
  const models = await get("models");
  const choice = h("select", { id: "model" }, models.length ? models.map(({ folder }) => h("option", { value: folder }, folder)) : h("option", { value: "" }, "there is no model in this folder yet"));
  const load = h("button", { class: "main", type: "button" }, "Load"), unload = h("button", { type: "button" }, "Unload");
  const state = h("span", { role: "status" }), said = h("div", {});
  const talk = h("div", { class: "talk", role: "log", "aria-label": "Dialogue" });
  const composer = h("div", { class: "card composer" });
  const settings = settingsOf();
  fill(main, heading("Chat", "Talk with a run's output, a checkpoint or adapters. The model runs in a process of its own, which ends with the server of this page."),
    h("div", { class: "card" }, h("label", { for: "model" }, "Model"), h("div", { class: "row" }, h("div", { class: "grow" }, choice), load, unload, state), said), talk, composer, settings.element);

  async function follow() {
    for (;;) {
      const now = await get("talk");
      if (signal.aborted) return;
      if (now.model) choice.value = now.model;
      unload.disabled = now.state === "none";
      fill(state, now.state === "none" ? null : h("span", { class: `badge ${now.state}` }, now.state));
      fill(said, now.said ? h("pre", { class: `note ${now.state === "failed" ? "bad" : ""}` }, now.said.trim()) : null);
      if (now.state === "ready") return draw(now);
      fill(composer, h("p", { class: "soft" }, now.state === "loading" ? "The model is loading …" : "Load a model first."));
      if (now.state !== "loading") return;
      await new Promise((resolve) => setTimeout(resolve, EVERY));
    }
  }

  const attempt = async (work) => {
    try {
      await work();
    } catch (error) {
      if (!signal.aborted) fill(said, h("p", { class: "note bad", role: "alert" }, error.message));
    }
  };
  load.addEventListener("click", () => attempt(async () => {
    fill(composer, h("p", { class: "soft" }, "The model is loading …"));
    fill(talk);
    await post("talk/start", { folder: choice.value });
    turns.length = 0;
    await follow();
  }));
  unload.addEventListener("click", () => attempt(async () => {
    await post("talk/stop", {});
    await follow();
  }));

  /** Draw what the model that answers can be given. */
  function draw({ hears, speaks }) {
    const text = h("textarea", { id: "message", "aria-label": speaks ? "Text to speak" : "Message", placeholder: speaks ? "A text to speak" : "A message. Enter sends it, Shift + Enter begins a line." });
    const send = h("button", { class: "main", type: "submit" }, speaks ? "Speak" : "Send");
    const stop = h("button", { type: "button", disabled: true }, "Stop");
    const heard = h("div", { class: "row" });
    let sound = null, answering = null;

    async function answer(work) {
      answering = new AbortController();
      send.disabled = true;
      stop.disabled = false;
      await attempt(() => work(answering.signal).catch((error) => {
        if (error.name !== "AbortError") throw error;
      }));
      answering = null;
      send.disabled = false;
      stop.disabled = true;
      text.focus();
    }
    stop.addEventListener("click", () => answering?.abort());
    signal.addEventListener("abort", () => answering?.abort());

    async function submit() {
      const words = text.value.trim();
      if (answering || !(words || sound)) return;
      text.value = "";
      const clip = sound;
      take(null);
      await answer((ending) => (speaks ? speak(words, ending) : clip && !words ? transcribe(clip, ending) : say(words, clip, ending)));
    }

    function take(blob) {
      sound = blob;
      fill(heard, blob ? [player(blob), h("button", { type: "button", onclick: () => take(null) }, "Remove the recording")] : null);
    }

    const form = h("form", { class: "talk" }, text, heard, h("div", { class: "row" }, send, stop, hears ? recorderOf(take, attempt) : null, h("button", { type: "button", onclick: () => {
      turns.length = 0;
      fill(talk);
    } }, "New dialogue")));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      submit();
    });
    fill(composer, form);
    fill(talk, turns.map((turn) => turnOf(turn).element));
  }

  function add(turn) {
    turns.push(turn);
    const shown = turnOf(turn);
    talk.append(shown.element);
    shown.element.scrollIntoView({ block: "nearest" });
    return shown;
  }

  async function say(words, clip, ending) {
    const parts = clip ? [{ type: "input_audio", input_audio: { data: await base64(clip), format: "wav" } }, { type: "text", text: words }] : words;
    add({ role: "user", text: words, sound: clip, content: parts });
    const { system, ...sampling } = settings.values();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns.map(({ role, content }) => ({ role, content }))];
    let response;
    try {
      response = await ask("chat/completions", { messages, stream: true, ...sampling }, ending);
    } catch (error) {
      turns.pop(); // nobody has answered, so the dialogue does not go on from here
      throw error;
    }
    const turn = { role: "assistant", text: "", content: "" }, shown = add(turn);
    for await (const piece of pieces(response)) {
      turn.text = turn.content += piece;
      shown.write(turn.text);
    }
  }

  async function transcribe(clip, ending) {
    add({ role: "user", text: "", sound: clip, content: "" });
    const body = new FormData();
    body.append("file", clip, "recording.wav");
    const response = await request("talk/v1/audio/transcriptions", { method: "POST", body, signal: ending });
    const { text } = await response.json();
    add({ role: "assistant", text, content: text });
    turns.splice(-2); // a transcript is no part of the dialogue
  }

  async function speak(words, ending) {
    add({ role: "user", text: words, content: words });
    const response = await ask("audio/speech", { input: words, response_format: "wav" }, ending);
    add({ role: "assistant", text: "", sound: await withLength(await response.blob()), content: "" });
  }

  const ask = (path, values, ending) => request(`talk/v1/${path}`, { method: "POST", body: JSON.stringify(values), headers: { "Content-Type": "application/json" }, signal: ending });

  if (asked && models.some(({ folder }) => folder === asked)) choice.value = asked;
  load.disabled = !models.length;
  await follow();
}

function turnOf({ role, text, sound }) {
  const words = h("div", {}, text);
  const element = h("div", { class: `turn ${role}` }, h("span", { class: "who" }, role === "user" ? "you" : "model"), words, sound ? player(sound) : null);
  return { element, write: (value) => (words.textContent = value) };
}

const player = (blob) => h("audio", { controls: true, src: URL.createObjectURL(blob) });

function recorderOf(take, attempt) {
  let ends = null;
  const button = h("button", { type: "button", "aria-pressed": "false" }, "Record");
  button.addEventListener("click", () => attempt(async () => {
    button.disabled = true;
    try {
      if (ends) {
        const finish = ends;
        ends = null;
        take(await finish());
      } else {
        ends = await record();
      }
    } finally {
      button.disabled = false;
      button.textContent = ends ? "Stop recording" : "Record";
      button.setAttribute("aria-pressed", String(Boolean(ends)));
      button.classList.toggle("recording", Boolean(ends));
    }
  }));
  return button;
}

function settingsOf() {
  const field = (id, value, more) => h("input", { id, value, inputmode: "decimal", autocomplete: "off", ...more });
  const temperature = field("temperature", "0.7"), tokens = field("max-tokens", "256");
  const system = h("input", { id: "system", autocomplete: "off" });
  const named = (text, control) => h("div", { class: "grow" }, h("label", { for: control.id }, text), control);
  const element = h("details", { class: "card" }, h("summary", {}, "Settings"), h("div", { class: "row" }, named("Temperature", temperature), named("Tokens at most", tokens), named("System prompt", system)));
  const values = () => ({ system: system.value.trim(), temperature: Number(temperature.value) || 0, max_tokens: Number.parseInt(tokens.value, 10) || 256 });
  return { element, values };
}
