// The playground: what is asked, in which lanes it runs, and what came of it.

import { setKey, stats } from "./api.js";
import { EXAMPLES } from "./examples.js";
import { Lane } from "./lane.js";
import { watch } from "./panels.js";
import { count, element } from "./sources.js";
import { offerThemes } from "./theme.js";

const MOST_ASKS = 12;

const find = (id) => document.getElementById(id);
const prompt = find("prompt"), verdict = find("verdict"), error = find("error");
let messages = []; // of the conversation so far
let asked = null; // the request that ran last, without what tells the lanes apart
let drawn = null; // the seed that was drawn for it; null where it has its own, or needs none
let extra = {}; // what an example asks for beside its prompt
let asks = []; // what came of it, each time
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

/** `seed` : one that was drawn before, to draw the same again. */
async function run(next, seed = null) {
  if (stop || !next) return;
  const isAgain = JSON.stringify(next) === JSON.stringify(asked);
  // Two lanes that draw need one seed between them; one lane alone is drawn as any request without a seed is.
  const draws = next.body.seed === undefined && next.body.temperature !== 0;
  drawn = !draws || !find("race").checked ? null : seed ?? Math.floor(Math.random() * 2 ** 31);
  const kind = draws ? (seed === null ? "new seed" : "same seed") : next.body.temperature === 0 ? "greedy" : "your seed";
  asked = next;
  if (drawn !== null) next = { ...next, body: { ...next.body, seed: drawn } };
  if (!isAgain) asks = [];
  error.hidden = find("empty").hidden = true;
  find("outcome").hidden = false;
  showAsks();
  say("Running", "soft");
  if (next.chat) showMessages(next.body.messages);
  if (next.chat && !isAgain) prompt.value = "";
  const lanes = [new Lane("With drafts", "Point at a draft, or use the arrow keys, to see where it came from.")];
  const bodies = [next.body];
  if (find("race").checked) {
    lanes.push(new Lane("Without", "Every token is a pass of its own. Both run at once, in one batch: compare passes, not seconds."));
    bodies.push({ ...next.body, num_speculative_tokens: 0 });
  }
  find("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  stop = new AbortController();
  find("run").disabled = find("again").disabled = find("same").disabled = true;
  find("stop").hidden = false;
  const ended = await Promise.allSettled(lanes.map((lane, i) => lane.run(next.path, bodies[i], stop.signal)));
  const stopped = stop.signal.aborted;
  stop = null;
  find("run").disabled = find("again").disabled = find("same").disabled = false;
  find("same").hidden = drawn === null;
  find("stop").hidden = true;
  const failed = ended.find((end) => end.status === "rejected");
  if (stopped) say("Stopped.");
  else if (failed) complain(failed.reason);
  else conclude(kind, ...ended.map((end) => end.value));
  if (next.chat && !asks.length) takeBack(next.body.messages);
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
  greedy: ["Greedy: the likeliest token each time. It is learned now, so ask again.", "Greedy and asked before: the best case."],
  "new seed": ["Sampled, as most clients ask. Again draws another answer.", "Another seed, another answer: what clients get."],
  "same seed": ["", "The same seed gives the same answer: only clients that send their seeds see this."],
  "your seed": ["Sampled with your seed. It is learned now, so ask again.", "Your seed again: the same answer, asked before."],
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
    if (!isSame) say(`The outputs differ from token ${count(firstOther)} on.`, "bad");
    else say(`${ratio > 1.005 ? `${times}× fewer` : "As many"} passes, the same ${tokens}.`);
  }
  const isEarly = find("state").textContent.includes("drafts join");
  find("hint").textContent = isEarly ? "Drafts had not joined yet: their kernels are being compiled."
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
    return element("li", "", element("span", "soft", `ask ${answer.number}, ${answer.kind}`), element("span", "bar", bar),
      element("span", "number", text));
  }));
}

/** A message that got no answer goes back to where it was written. */
function takeBack(sent) {
  if (!prompt.value) prompt.value = sent.at(-1).content;
  asked = null;
  find("again").disabled = find("same").disabled = true;
  showMessages(messages);
}

/** The last question and its answer become part of the conversation. */
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
  prompt.placeholder = chat ? "Message to the model" : "Text that the model goes on with";
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

function offerExamples() {
  find("examples").append(...EXAMPLES.map((example) => {
    const button = element("button", "example", element("b", "", example.title), element("span", "soft", example.about));
    button.type = "button";
    button.addEventListener("click", () => {
      document.querySelector(`input[name=mode][value=${example.mode}]`).checked = true;
      useMode();
      prompt.value = example.prompt;
      extra = example.extra ?? {};
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
    if (!has_chat || prompt.value || asked) return; // chat first, where nobody has begun
    document.querySelector("input[name=mode][value=chat]").checked = true;
    useMode();
  },
});
find("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setKey(find("key").value);
  const refused = await stats().then(() => null, (reason) => [401, undefined].includes(reason.status) ? reason : null);
  if (refused) setKey(""); // a key that no header can hold is refused by the browser, without a status
  find("key-error").textContent = refused?.status === 401 ? "That key is not known here." : refused?.message ?? "";
  if (refused) return;
  find("key-form").hidden = error.hidden = true;
  find("key").value = "";
  look();
});
