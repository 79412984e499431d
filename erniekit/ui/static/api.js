// Requests to the server of this page. The token comes with the address that `erniekit ui` prints, behind the #, which
// browsers send to nobody; it is kept for this origin and sent in a header.

const STORED = "erniekit-token";

/** Take the token out of the address, so that it stays in no history. */
export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(STORED, found[1]);
  history.replaceState(null, "", "#/configure");
}

/** Keep a token that somebody has typed. */
export const keepToken = (token) => localStorage.setItem(STORED, token.trim().replace(/^.*#token=/, ""));

export class RequestError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Return the response of an endpoint; throw a RequestError with its words if it refuses. */
export async function request(path, options = {}) {
  const headers = { Authorization: `Bearer ${localStorage.getItem(STORED) ?? ""}`, ...options.headers };
  let response;
  try {
    response = await fetch(`api/${path}`, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new RequestError("the server of this page does not answer; is `erniekit ui` still running?", 0);
  }
  if (!response.ok) throw new RequestError(await problemOf(response), response.status);
  return response;
}

async function problemOf(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    return typeof error === "string" ? error : error?.message ?? detail ?? text;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

/** GET JSON. */
export async function get(path, values = {}) {
  const query = new URLSearchParams(values).toString();
  return (await request(query ? `${path}?${query}` : path)).json();
}

/** POST JSON, and return JSON. */
export async function post(path, values, options = {}) {
  const headers = { "Content-Type": "application/json" };
  return (await request(path, { method: "POST", body: JSON.stringify(values), headers, ...options })).json();
}
