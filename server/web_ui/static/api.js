// The service, by addresses relative to the page: a proxy may have put a path before both.

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
  throw new ApiError(body?.error?.message ?? `the service answered ${response.status}`, response.status);
}

/** The counters of the service. Raises ApiError. */
export async function stats() {
  return (await checked(await fetch("ui/stats", { headers: headers() }))).json();
}

/** The chunks of a streamed answer, as they come, those that came together together. Raises ApiError. */
export async function* stream(path, body, signal) {
  const asked = { method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await checked(await fetch(path, asked));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("the connection ended before the answer did", 0);
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
