// The sources of drafts: their names in the API, their titles and their descriptions.

export const SOURCES = {
  context: ["this request", "its prompt and the answer so far"],
  recent: ["recent answers", "cached text that is not in a segment yet"],
  cache: ["cache", "segments of text from earlier requests"],
  prebuilt: ["prebuilt cache", "built by ssd-cache, or shared between tenants"],
  prediction: ["predicted output", "the request's field prediction"],
  model: ["draft model", "a smaller model"],
  head: ["draft head", "layers that read the model's hidden states"],
  recycling: ["token recycling", "the model's earlier candidates after the same tokens"],
  lookahead: ["lookahead", "the model's tokens after a rejected draft token"],
  coupled: ["coupled sampling", "tokens sampled earlier with the same noise"],
};

export const nameOf = (source) => (source === "target" ? "the model" : (SOURCES[source] ?? [source])[0]);

/** Create an element with a class and children. Text is never parsed as markup. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const GROUPED = new Intl.NumberFormat("en");
export const count = (number) => GROUPED.format(number);

/** Format a number shortly: 1,234,567 as 1.23M. */
export function short(number) {
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (number >= unit) return (number / (name === "k" ? 1e3 : unit)).toPrecision(3) + name;
  }
  return count(Math.round(number));
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.095 ? 1 : 0)}%`;

/** Format seconds in a suitable unit. */
export function span(seconds) {
  for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * unit) return `${Math.round(seconds / unit)} ${name}`;
  }
  return `${Math.round(seconds)} s`;
}
