// Where drafts come from: names of the API, what people call them, and what they are.

export const SOURCES = {
  own: ["own text", "the prompt and the answer so far"],
  tail: ["ring", "learned lately, not yet sorted"],
  segment: ["segments", "the sorted cache"],
  warm: ["warm-up", "corpora, and what tenants share"],
  prediction: ["prediction", "what the request expected"],
  model: ["draft model", "a smaller model"],
  head: ["draft head", "layers that read the model's hidden states"],
  recycled: ["recycled", "what the model held likely here before"],
  guess: ["guess", "what the model said behind a wrong token"],
  coupled: ["shared noise", "what the same noise chose before, after the same tokens"],
};

export const nameOf = (source) => (source === "target" ? "the model" : (SOURCES[source] ?? [source])[0]);

/** An element with a class, text and children; text is never markup. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const GROUPED = new Intl.NumberFormat("en");
export const count = (number) => GROUPED.format(number);

/** 1,234,567 as 1.23M, for places that are narrow. */
export function short(number) {
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (number >= unit) return (number / (name === "k" ? 1e3 : unit)).toPrecision(3) + name;
  }
  return count(Math.round(number));
}
