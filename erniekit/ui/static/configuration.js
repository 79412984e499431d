// The configuration that is being written. Three pages show it: Configure, Data and Layout.

import { get, post } from "./api.js";
import { h } from "./dom.js";

const DRAFT = "erniekit-draft"; // survives a reload of the tab
const kept = JSON.parse(sessionStorage.getItem(DRAFT) ?? "{}");

export const current = { path: kept.path ?? "", text: kept.text ?? "", version: kept.version ?? "", saved: kept.saved ?? "", answer: null };
let asked = 0;
let described;

/** The declared parameters; asked for once. */
export async function schema() {
  described ??= await get("schema");
  return described;
}

export const isChanged = () => current.text !== current.saved;

function keep() {
  const { path, text, version, saved } = current;
  sessionStorage.setItem(DRAFT, JSON.stringify({ path, text, version, saved }));
}

/** Take a text and let the server check it. Return whether this is still the latest text. */
export async function check(text) {
  current.text = text;
  keep();
  return settle(post("check", { text, path: current.path || "config.yaml" }));
}

/** Change one parameter; null removes its line. Return whether this is still the latest change. */
export async function change(name, value) {
  return settle(post("change", { text: current.text, path: current.path || "config.yaml", name, value }));
}

async function settle(request) {
  asked += 1;
  const own = asked;
  const answer = await request;
  if (own !== asked) return false; // a later one is on its way
  current.answer = answer;
  current.text = answer.text;
  keep();
  return true;
}

/** Open a file; "" begins an empty one. */
export async function open(path) {
  const file = path ? await get("file", { path }) : { path: "", text: "", version: "" };
  Object.assign(current, file, { saved: file.text });
  await check(file.text);
}

/** Save the text under a name. */
export async function save(path) {
  const version = path === current.path ? current.version : "";
  const file = await post("file", { path, text: current.text, version });
  Object.assign(current, file, { saved: file.text });
  keep();
}

/** A choice of the folder's configurations, which opens the chosen one and then calls `opened`. */
export async function chooser(opened) {
  const names = await get("files");
  const options = [["", "new configuration"], ...names.map((name) => [name, name])];
  if (current.path && !names.includes(current.path)) options.push([current.path, current.path]);
  const select = h("select", { id: "file" }, options.map(([value, text]) => h("option", { value }, text)));
  select.value = current.path;
  select.addEventListener("change", async () => {
    if (isChanged() && !confirm("The text has changes that are not saved. Open another one?")) {
      select.value = current.path;
      return;
    }
    await open(select.value);
    opened();
  });
  return select;
}
