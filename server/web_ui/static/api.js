// The server's API, by relative addresses, because a proxy may add a path in front of both.

const KEY = "ssd-api-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function checked(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `the server answered ${response.status}`, response.status);
}

/** Return the counters of the server. Throws ApiError. */
export async function stats() {
  return (await checked(await fetch("ui/stats", { headers: headers() }))).json();
}

/** Yield arrays of chunks of a streamed answer as they arrive. Throws ApiError. */
export async function* stream(path, body, signal) {
  const asked = { method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await checked(await fetch(path, asked));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("the connection ended before the answer was complete", 0);
    const events = (text + value).split("\n\n");
    text = events.pop();
    const chunks = [];
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
      if (event === "data: [DONE]") {
        yield chunks;
        return;
      }
      const chunk = JSON.parse(event.slice("data: ".length));
      if (chunk.error) throw new ApiError(chunk.error.message, response.status);
      chunks.push(chunk);
    }
    yield chunks;
  }
}

/** Yield the passes of a recorded answer in the format of `stream`, one every `pass_ms` milliseconds. */
export async function* replay(passes, pass_ms, signal) {
  for (const draft of passes) {
    await new Promise((resolve) => setTimeout(resolve, pass_ms));
    signal.throwIfAborted();
    yield [{ choices: [{ draft, token_ids: draft.texts, text: draft.texts.join("") }] }];
  }
}

/** Return the recorded session that the package contains. */
export async function recordedSession() {
  return (await checked(await fetch("ui/session.json"))).json();
}
