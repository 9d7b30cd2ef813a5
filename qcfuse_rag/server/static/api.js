/** Requests to the API of the server that this page is from, with the token that the user typed. */

const TOKEN_KEY = "qcfuse-token";

/** A refusal of the server, in its words. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let askForToken = async () => null;

/** Set the function that asks the user for a token; it gets an error to show, and returns a token or null. */
export function onTokenNeeded(ask) {
  let asking = null;
  askForToken = (error) => (asking ??= ask(error).finally(() => (asking = null)));
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN_KEY) !== null;
}

export function forgetToken() {
  sessionStorage.removeItem(TOKEN_KEY);
}

/** Send a request and return the response; ask for a token for as long as the server refuses the one that is there. */
export async function send(method, path, body, signal) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN_KEY);
    const headers = new Headers();
    if (body !== undefined) headers.set("Content-Type", "application/json");
    if (token !== null) headers.set("Authorization", `Bearer ${token}`);
    const options = { method, headers, signal, cache: "no-store", credentials: "omit" };
    if (body !== undefined) options.body = JSON.stringify(body);
    const response = await fetch(path, options);
    if (response.ok) return response;
    const error = new ApiError(response.status, await messageOf(response));
    if (response.status !== 401) throw error;
    if (sessionStorage.getItem(TOKEN_KEY) !== token) continue; // another request has asked meanwhile
    const typed = await askForToken(token === null ? null : error.message);
    if (typed === null) throw error;
    sessionStorage.setItem(TOKEN_KEY, typed);
  }
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

/** Yield the server-sent events of a response as objects; throw the error that the server sends among them. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "the connection ended too early");
      const parts = (unread + value).split("\n\n");
      unread = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue; // a comment, sent while an event is awaited
        const data = part.slice("data: ".length);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(response.status, event.error.message);
        yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
