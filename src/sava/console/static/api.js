// Calls of the HTTP API. The token is in the session storage of this tab alone, and travels in a header.

const KEY = "sava.token";

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `the broker answered ${status}`);
    this.status = status;
    this.code = error?.code ?? "";
    this.outcome = error?.outcome ?? "";
  }
}

export const session = {
  get token() { return sessionStorage.getItem(KEY) ?? ""; },
  set token(text) { text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY); },
  onRefused: () => {},
};

function headers(more = {}) {
  return session.token ? { ...more, Authorization: `Bearer ${session.token}` } : more;
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const error = new ApiError(response.status, body.error);
  if (response.status === 401) session.onRefused(error);
  return error;
}

async function send(method, path, body, signal) {
  const options = { method, headers: headers(), signal };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "the broker cannot be reached" });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export const get = async (path, signal) => (await send("GET", path, undefined, signal)).json();
export const post = async (path, body = {}) => (await send("POST", path, body)).json();
export const patch = async (path, body = {}) => (await send("PATCH", path, body)).json();
export const remove = async (path) => (await send("DELETE", path)).json();

// An answer that comes line by line, such as the moves of a drain.
export async function lines(path, body, each) {
  const response = await send("POST", path, body);
  for await (const text of split(response.body, "\n")) {
    if (!text) continue;
    const value = JSON.parse(text);
    if (value.error?.message) throw new ApiError(200, value.error);
    each(value);
  }
}

// Server-sent events; by fetch, since an EventSource sends no header.
export async function follow(path, each, signal) {
  const response = await send("GET", path, undefined, signal);
  for await (const event of split(response.body, "\n\n")) {
    const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
    if (!data) continue;
    const value = JSON.parse(data);
    if (event.startsWith("event: error")) throw new ApiError(200, value.error);
    each(value);
  }
}

async function* split(stream, separator) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      held += value;
      const parts = held.split(separator);
      held = parts.pop();
      yield* parts;
    }
    if (held) yield held;
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function download(path, accept, name) {
  const response = await fetch(path, { headers: headers({ Accept: accept }) });
  if (!response.ok) throw await failure(response);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}
