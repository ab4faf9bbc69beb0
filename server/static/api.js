// The server as the page asks it: its key, its JSON, its streams, and what every failure means in words.

const KEY = "foretoken.key";
const SILENCE_MS = 60000; // a running stream pings every 15 s

/** What went wrong, for people: `message` says what happened, `advice` what to do. */
export class Failure extends Error {
  constructor(message, advice, { status = 0, needsKey = false } = {}) {
    super(message);
    this.advice = advice;
    this.status = status;
    this.needsKey = needsKey;
  }
}

let key = "";
try {
  key = sessionStorage.getItem(KEY) ?? "";
} catch {
  // A browser that keeps nothing: the key lasts as long as the page.
}

/** Whether a request can carry it: headers hold Latin letters only, and a key that was copied with a dash or a dot too many is none. */
export const canBeKey = (given) => /^[\x20-\x7e\xa0-\xff]+$/.test(given);

/** For every request from now on, until the tab is closed. */
export function setKey(given) {
  key = given;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // As above.
  }
}

function headers(more = {}) {
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The body of a GET as text. Throws Failure. */
export async function get(path, signal) {
  return (await ask(path, { headers: headers(), signal })).text();
}

/** The chunks of a streamed chat completion. Throws Failure; an abort by `signal` ends it without one. */
export async function* streamChat(body, signal) {
  const silence = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      headers: headers({ "Content-Type": "application/json" }),
      body: JSON.stringify({ ...body, stream: true }),
      signal: AbortSignal.any([signal, silence.signal]),
    });
    yield* events(response.body.getReader(), heard);
  } catch (error) {
    if (signal.aborted) return;
    if (silence.signal.aborted) throw cut("The server has said nothing for a minute.");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

async function* events(reader, heard) {
  const decoder = new TextDecoder();
  let buffer = "";
  let complete = false;
  try {
    for (;;) {
      heard();
      const { done, value } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : cut("The connection broke off before the answer was complete.");
      });
      if (done) break;
      buffer += decoder.decode(value, { stream: true });
      const lines = buffer.split("\n");
      buffer = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") {
          complete = true;
          continue;
        }
        const chunk = parsed(data);
        if (chunk === null) throw cut("The server sent something that is not JSON.");
        if (chunk.error) throw new Failure(`The server gave up: ${sentence(chunk.error.message)}`, "Try again asks once more.");
        yield chunk;
      }
    }
    if (!complete) throw cut("The connection broke off before the answer was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function cut(message) {
  return new Failure(message, "What came so far is kept. Check that the server still runs, then try again.");
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(
      "The server cannot be reached.",
      `Check that foretoken serve is running at ${location.origin}, then try again. Nothing you wrote is lost.`,
    );
  }
  if (!response.ok) throw refusal(response, await response.text().catch(() => ""));
  return response;
}

function refusal(response, text) {
  const status = response.status;
  const error = parsed(text)?.error ?? {};
  const said = sentence(typeof error.message === "string" ? error.message : `status ${status}`);
  const wait = Number(response.headers.get("retry-after")) || 0;
  const later = wait ? `Try again in ${wait} s.` : "Wait a moment, then try again.";
  const failure = (message, advice) => new Failure(message, advice, { status, needsKey: status === 401 });
  if (status === 401) return failure("This server asks for an API key.", "Enter the key it printed when it started, or the one it was given.");
  if (status === 404) return failure(`The server does not have this: ${said}`, "Reload the page; the server may have been started again with another model.");
  if (status === 413) return failure("The conversation is too long to send.", "Start a new chat, or shorten the messages.");
  if (status === 429) return failure(`The server takes no more requests from you for now: ${said}`, later);
  if (status === 503) return failure(`The server is busy or shutting down: ${said}`, later);
  if (status >= 500) return failure(`The server failed: ${said}`, "Try again. If it stays, the server's log says more.");
  const isTooLong = error.code === "context_length_exceeded";
  const change = isTooLong ? "Start a new chat, or shorten the messages." : "Change the message or the settings, then try again.";
  const where = error.param && !["messages", "prompt"].includes(error.param) ? ` Look at “${error.param}” in the settings.` : "";
  return failure(`The server refused the request: ${said}`, change + where);
}

/** The API's words end as they like; here more follows. */
const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
