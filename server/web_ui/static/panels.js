// The panels next to the playground: load, sources of drafts, and cache sizes.

import { stats } from "./api.js";
import { Chart } from "./charts.js";
import { SOURCES, count, element, percent, short, span } from "./sources.js";

const MOST_NAMESPACES = 8;
const PARTS = { recent: "recent", cache: "indexed", retained: "retained", prebuilt: "prebuilt" };
const ALWAYS = ["context", "recent", "cache"];

const find = (id) => document.getElementById(id);

/** Poll once a second while the page is visible. Calls `onRefused` if a key is needed, and `onReady` once with the counters. */
export function watch({ onRefused, onReady }) {
  const place = find("charts");
  const rate = new Chart(place, "tokens/s", { least: 10, format: (value) => count(Math.round(value)) });
  const perPass = new Chart(place, "tokens per pass", { least: 2, format: (value) => value.toFixed(2) });
  const cache = new Chart(place, "tokens in the cache", { least: 100, format: short });
  let before = null, isKnown = false;

  async function look() {
    if (document.hidden) return;
    let now;
    try {
      now = await stats();
    } catch (error) {
      show(error.status === 401 ? "key needed" : "unreachable", "bad");
      if (error.status === 401) onRefused();
      return;
    }
    const isCompiling = now.state === "ready" && !now.is_drafting;
    show(isCompiling ? "ready; compiling kernels for drafts" : now.state, now.state === "ready" ? "good" : "loading");
    find("model").textContent = now.model;
    if (now.tokens === undefined) return;
    if (!isKnown) onReady(now);
    isKnown = true;
    showSaved(now);
    const held = Object.values(now.namespaces).reduce((sum, n) => sum + n.recent + n.cache + n.retained + n.prebuilt, 0);
    if (before) {
      const passes = now.passes - before.passes;
      rate.push((now.tokens - before.tokens) / (now.time_s - before.time_s));
      perPass.push(passes > 0 ? (now.tokens - before.tokens) / passes : null);
      cache.push(held);
    }
    before = now;
    find("load").textContent = `${count(now.running)} running, ${count(now.waiting)} waiting`;
    showSources(now);
    showNamespaces(now.namespaces);
  }

  look();
  setInterval(look, 1000);
  document.addEventListener("visibilitychange", () => before = null);
  return look;
}

function show(text, kind) {
  const state = find("state");
  if (state.textContent !== text) state.textContent = text;
  state.dataset.state = kind;
}

/** Show the passes and the time that drafts have saved since the start. */
function showSaved({ tokens, passes, since_s, pass_s }) {
  const saved = tokens - passes;
  find("saved").hidden = saved <= 0 || !pass_s;
  const share = Math.floor(100 * saved / Math.max(1, tokens));
  find("saved").replaceChildren(element("b", "", `${share}% of ${count(tokens)} passes saved`),
    element("span", "", ` and ${span(saved * pass_s)} of waiting time, since the start ${span(since_s)} ago.`),
    element("span", "soft", ` Without drafts, each token takes a pass. A pass takes ${(1000 * pass_s).toFixed(pass_s < 0.01 ? 1 : 0)} ms on average.`));
}

function bar(parts) {
  const made = element("span", "bar");
  for (const [source, share] of parts) {
    const part = element("i");
    part.dataset.source = source;
    part.style.setProperty("--share", share);
    made.append(part);
  }
  return made;
}

function showSources(now) {
  const all = now.tokens || 1;
  const names = Object.keys(SOURCES).filter((name) => ALWAYS.includes(name) || now.sources[name]);
  const rows = names.map((name) => {
    const { accepted = 0 } = now.sources[name] ?? {};
    const [label, about] = SOURCES[name];
    const row = element("li", "", element("span", "swatch"), element("b", "", label), element("span", "soft about", about),
      element("span", "number", count(accepted)), bar([[name, accepted / all]]),
      element("span", "soft rate", percent(accepted / all)));
    row.dataset.source = name;
    return row;
  });
  const own = now.tokens - now.accepted;
  rows.push(element("li", "target", element("span", "swatch"), element("b", "", "the model"),
    element("span", "soft about", "every pass yields one token of the model"), element("span", "number", count(own)),
    bar([["target", own / all]]), element("span", "soft rate", percent(own / all))));
  find("sources").replaceChildren(...rows);
}

function showNamespaces(namespaces) {
  const total = (name) => Object.values(namespaces[name]).reduce((sum, part) => sum + part, 0);
  const names = Object.keys(namespaces).sort((one, other) => total(other) - total(one));
  const rows = names.slice(0, MOST_NAMESPACES).map((name) => {
    const parts = Object.entries(PARTS).filter(([part]) => namespaces[name][part]);
    const about = parts.map(([part, label]) => `${label} ${short(namespaces[name][part])}`).join(", ") || "empty";
    const shares = parts.map(([part]) => [part, namespaces[name][part] / total(name)]);
    return element("li", "", element("b", "mono", name), element("span", "number", short(total(name))), bar(shares),
      element("span", "soft rate", about));
  });
  if (names.length > rows.length) rows.push(element("li", "soft", `and ${count(names.length - rows.length)} more`));
  if (!names.length) rows.push(element("li", "soft", "no cache, because speculation is off"));
  find("namespaces").replaceChildren(...rows);
}
