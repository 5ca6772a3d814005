// The playground: sends a request, shows it with and without drafts, and compares the results.

import { recordedSession, replay, setKey, stats, stream } from "./api.js";
import { EXAMPLES } from "./examples.js";
import { Lane } from "./lane.js";
import { watch } from "./panels.js";
import { count, element } from "./sources.js";
import { offerThemes } from "./theme.js";

const MOST_ASKS = 12;
const PASS_MS = 25; // of a recorded session
const WITH = ["With drafts", "Point at a draft, or use the arrow keys, to see its source."];
const WITHOUT = ["Without drafts", "Every token takes one forward pass. Both run in the same batch, so compare passes, not seconds."];
const RECORDED = ["Without drafts", "Every token takes one forward pass. In this recording, each pass takes the same time."];

const find = (id) => document.getElementById(id);
const prompt = find("prompt"), verdict = find("verdict"), error = find("error");
let messages = []; // the conversation so far
let asked = null; // the last request, without the fields in which the lanes differ
let drawn = null; // the random seed of both lanes; null if the request has a seed or is greedy
let extra = {}; // further fields of an example's request
let asks = []; // the results of the last request, each time it was sent
let stop = null;

const mode = () => document.querySelector("input[name=mode]:checked").value;

function request() {
  const chat = mode() === "chat";
  const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  const body = {
    ...extra,
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
    return_token_ids: true,
    stream_options: { include_drafts: true },
  };
  if (find("prediction").value) body.prediction = { type: "content", content: find("prediction").value };
  if (chat) body.messages = [...messages, { role: "user", content: prompt.value }];
  else body.prompt = prompt.value;
  return { chat, path: chat ? "v1/chat/completions" : "v1/completions", body };
}

/** Send a request. `seed` repeats the random seed of an earlier run. */
async function run(next, seed = null) {
  if (stop || !next) return;
  const isAgain = JSON.stringify(next) === JSON.stringify(asked);
  // Two sampled lanes need the same seed; a single lane is sampled as any request without a seed.
  const draws = next.body.seed === undefined && next.body.temperature !== 0;
  drawn = !draws || !find("race").checked ? null : seed ?? Math.floor(Math.random() * 2 ** 31);
  const kind = draws ? (seed === null ? "new seed" : "same seed") : next.body.temperature === 0 ? "greedy" : "your seed";
  asked = next;
  if (drawn !== null) next = { ...next, body: { ...next.body, seed: drawn } };
  if (!isAgain) asks = [];
  if (next.chat) showMessages(next.body.messages);
  if (next.chat && !isAgain) prompt.value = "";
  const bodies = find("race").checked ? [next.body, { ...next.body, num_speculative_tokens: 0 }] : [next.body];
  const answers = await show((signal) => bodies.map((body) => stream(next.path, body, signal)));
  find("same").hidden = drawn === null;
  if (answers) conclude(kind, ...answers);
  if (next.chat && !asks.length) takeBack(next.body.messages);
}

/** Show one answer, or two next to each other. Returns them, or null after an error or a stop. */
async function show(start, without = WITHOUT) {
  error.hidden = find("empty").hidden = true;
  find("outcome").hidden = false;
  showAsks();
  say("Running", "soft");
  stop = new AbortController();
  const chunks = start(stop.signal);
  const lanes = chunks.map((_, i) => new Lane(...(i ? without : WITH)));
  find("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  find("run").disabled = find("again").disabled = find("same").disabled = true;
  find("stop").hidden = false;
  const ended = await Promise.allSettled(lanes.map((lane, i) => lane.run(chunks[i])));
  const stopped = stop.signal.aborted;
  stop = null;
  find("run").disabled = find("again").disabled = find("same").disabled = false;
  find("stop").hidden = true;
  const failed = ended.find((end) => end.status === "rejected");
  if (stopped) say("Stopped.");
  else if (failed) complain(failed.reason);
  return stopped || failed ? null : ended.map((end) => end.value);
}

/** Replay the recorded session: real text, drafted by the cache as it grows, with the same time for every pass. */
async function playSession() {
  if (stop) return;
  forget();
  const { requests } = await recordedSession();
  for (const { prompt: question, passes } of requests) {
    const plain = passes.flatMap(({ texts }) => texts).map((text, i) => (
      { pass: i + 1, source: null, num_drafted: 0, num_accepted: 0, texts: [text] }));
    showMessages([{ role: "user", content: question }]);
    const answers = await show((signal) => [passes, plain].map((each) => replay(each, PASS_MS, signal)), RECORDED);
    if (!answers) return;
    conclude("recorded", ...answers);
    find("again").disabled = true;
    await new Promise((resolve) => setTimeout(resolve, 40 * PASS_MS));
  }
}

function say(text, kind = "") {
  verdict.textContent = text;
  verdict.className = `verdict ${kind}`;
}

function complain(reason) {
  find("outcome").hidden = true;
  error.textContent = reason.message;
  error.hidden = false;
  if (reason.status === 401) find("key-form").hidden = false;
}

const HINTS = {
  greedy: ["Greedy decoding. The answer is in the cache now: run it again.", "The answer was in the cache: the best case."],
  "new seed": ["Sampled, as for most clients. Another run samples another answer.", "Another seed gives another answer, as clients get."],
  "same seed": ["", "The same seed gives the same answer. Only clients that send their seed see this."],
  "your seed": ["Sampled with your seed. The answer is in the cache now: run it again.", "The same seed gives the same answer, which was in the cache."],
  recorded: ["A recorded session of an SQL agent; no model runs. Each request is drafted from itself and the requests before it.",
    "Later requests are drafted from the earlier ones, which are in the cache."],
};

function conclude(kind, drafted, plain) {
  const tokens = `${count(drafted.tokens.length)} token${drafted.tokens.length === 1 ? "" : "s"}`;
  if (!plain) {
    const perPass = (drafted.tokens.length / Math.max(1, drafted.passes)).toFixed(1);
    say(`${tokens} in ${count(drafted.passes)} passes: ${perPass} a pass.`);
  } else {
    const differs = drafted.tokens.findIndex((token, i) => token !== plain.tokens[i]);
    const isSame = differs < 0 && drafted.tokens.length === plain.tokens.length;
    const ratio = plain.passes / Math.max(1, drafted.passes);
    const times = ratio < 10 ? ratio.toFixed(ratio < 1.05 ? 2 : 1) : Math.round(ratio);
    const firstOther = (differs < 0 ? Math.min(drafted.tokens.length, plain.tokens.length) : differs) + 1;
    if (!isSame) say(`The outputs differ from token ${count(firstOther)} on. Please report this.`, "bad");
    else say(`${ratio > 1.005 ? `${times}× fewer` : "Equally many"} passes, the same ${tokens}.`);
  }
  const isEarly = find("state").textContent.includes("compiling");
  find("hint").textContent = isEarly ? "There were no drafts yet, because their kernels are being compiled."
    : HINTS[kind][asks.length ? 1 : 0];
  asks = [...asks, { ...drafted, kind, number: (asks.at(-1)?.number ?? 0) + 1 }].slice(-MOST_ASKS);
  showAsks();
  useMode();
}

function showAsks() {
  const most = Math.max(...asks.map((answer) => answer.passes));
  find("asks").replaceChildren(...(asks.length < 2 ? [] : asks).map((answer) => {
    const bar = element("i");
    bar.style.setProperty("--share", answer.passes / most);
    const text = `${count(answer.passes)} ${answer.passes === 1 ? "pass" : "passes"}, ${answer.seconds.toFixed(2)} s`;
    return element("li", "", element("span", "soft", answer.kind === "recorded" ? `request ${answer.number}` : `run ${answer.number}, ${answer.kind}`), element("span", "bar", bar),
      element("span", "number", text));
  }));
}

/** Put a message without an answer back into the prompt. */
function takeBack(sent) {
  if (!prompt.value) prompt.value = sent.at(-1).content;
  asked = null;
  find("again").disabled = find("same").disabled = true;
  showMessages(messages);
}

/** Add the last message and its answer to the conversation. */
function goOn() {
  if (!asked?.chat || !asks.length) return;
  messages = [...asked.body.messages, { role: "assistant", content: asks.at(-1).text }];
}

function showMessages(messages) {
  find("transcript").replaceChildren(...messages.map(({ role, content }) => element("li", role, content)));
}

function useMode() {
  const chat = mode() === "chat";
  find("prompt-label").textContent = chat ? "Message" : "Prompt";
  prompt.rows = chat ? 2 : 5;
  prompt.placeholder = chat ? "Message to the model" : "Text that the model continues";
  find("transcript").hidden = !chat;
  find("new-chat").hidden = !chat || !asked?.chat;
}

function forget() {
  messages = [];
  asks = [];
  asked = null;
  showMessages(messages);
  find("lanes").replaceChildren();
  find("outcome").hidden = true;
  useMode();
  prompt.focus();
}

function choose(example) {
  document.querySelector(`input[name=mode][value=${example.mode}]`).checked = true;
  useMode();
  prompt.value = example.prompt;
  extra = example.extra ?? {};
}

function offerExamples() {
  const session = element("button", "example", element("b", "", "Watch a recorded session"),
    element("span", "soft", "An SQL agent with real text: four requests, each faster than the one before."));
  session.type = "button";
  session.addEventListener("click", playSession);
  find("examples").append(element("li", "", session), ...EXAMPLES.map((example) => {
    const button = element("button", "example", element("b", "", example.title), element("span", "soft", example.about));
    button.type = "button";
    button.addEventListener("click", () => {
      choose(example);
      run(request());
    });
    return element("li", "", button);
  }));
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stop) return;
  if (mode() === "chat") goOn();
  run(request());
});
find("ask").addEventListener("change", () => {
  if (mode() !== "chat" && prompt.value === EXAMPLES[0].prompt) prompt.value = "", extra = {};
  if (mode() !== "chat") goOn();
  useMode();
});
prompt.addEventListener("input", () => extra = {});
find("again").addEventListener("click", () => run(asked));
find("same").addEventListener("click", () => run(asked, drawn));
find("new-chat").addEventListener("click", forget);
find("stop").addEventListener("click", () => stop?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("ask").requestSubmit();
});
offerThemes(find("theme"));
offerExamples();
useMode();
const look = watch({
  onRefused: () => find("key-form").hidden = false,
  onReady: ({ has_chat, model }) => {
    find("toy").hidden = model !== "ssd-bundled";
    if (!has_chat || prompt.value || asked) return; // the user has begun already
    choose(EXAMPLES[0]);
  },
});
find("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(find("key").value);
  const refused = await stats().then(() => null, (reason) => [401, undefined].includes(reason.status) ? reason : null);
  if (refused) setKey(""); // the browser refuses keys that no header can contain, without a status
  find("key-error").textContent = refused?.status === 401 ? "This key is unknown." : refused?.message ?? "";
  if (refused) return;
  find("key-form").hidden = error.hidden = true;
  find("key").value = "";
  look();
});
