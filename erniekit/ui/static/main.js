// The pages and the way between them: one address, the part behind # names the page.

import { get, keepToken, takeToken } from "./api.js";
import { fill, h } from "./dom.js";
import * as chat from "./chat.js";
import * as configure from "./configure.js";
import * as data from "./data.js";
import * as layout from "./layout.js";
import * as parameters from "./parameters.js";
import * as runs from "./runs.js";

const PAGES = { configure, data, layout, runs, chat, parameters };
const TITLES = { configure: "Configure", data: "Data", layout: "Layout", runs: "Runs", chat: "Chat", parameters: "Parameters" };
const main = document.getElementById("main");
let left = new AbortController(); // ends what the last page still does

/** The page that the address names, and the words behind it: #/runs/output/sft -> ["runs", "output/sft"]. */
function place() {
  const [, name = "configure", ...rest] = location.hash.split("/");
  return [name in PAGES ? name : "configure", decodeURIComponent(rest.join("/"))];
}

async function show() {
  left.abort();
  left = new AbortController();
  const { signal } = left;
  const [name, rest] = place();
  document.title = `${TITLES[name]} · ERNIEKit`;
  fill(document.getElementById("nav"), Object.keys(PAGES).map((each) => h("a", { href: `#/${each}`, "aria-current": each === name ? "page" : null }, TITLES[each])));
  fill(main);
  try {
    await PAGES[name].show(main, signal, rest);
  } catch (error) {
    if (!signal.aborted) fill(main, error.status === 401 ? askForToken() : h("p", { class: "note bad", role: "alert" }, error.message));
  }
}

function askForToken() {
  const field = h("input", { id: "token", autocomplete: "off", spellcheck: "false" });
  const form = h("form", { class: "card" }, h("h1", {}, "Which token?"), h("p", { class: "soft" }, "Open the address that `erniekit ui` has printed, or paste it here. Each start of the server has a new one."), h("label", { for: "token" }, "Address or token"), field, h("div", {}, h("button", { class: "main" }, "Open")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keepToken(field.value);
    start();
  });
  return form;
}

async function start() {
  show();
  try {
    const { folder, version } = await get("session");
    fill(document.getElementById("folder"), `${folder} · ${version}`);
  } catch {
    // the page itself says why
  }
}

takeToken();
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) {
    takeToken();
    start();
    return;
  }
  show().then(() => main.focus({ preventScroll: true }));
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
start();
