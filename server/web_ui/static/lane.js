// One answer as it streams, with its clock and its counts.

import { count, element, nameOf } from "./sources.js";
import { TokenStream } from "./tokens.js";

export class Lane {
  #figures = {};
  #legend;
  #numShown = -1;
  #stream;
  #view;

  /** `title` is the heading; `about` is shown until a draft is selected. The caller adds `element` to the document. */
  constructor(title, about) {
    this.element = document.getElementById("lane").content.cloneNode(true).firstElementChild;
    this.element.querySelector("h2").textContent = title;
    for (const figure of this.element.querySelectorAll("dd")) this.#figures[figure.dataset.figure] = figure;
    this.#stream = this.element.querySelector(".stream");
    this.#stream.setAttribute("aria-label", `${title}: the answer; arrow keys go from draft to draft`);
    const inspect = this.element.querySelector(".inspect");
    inspect.textContent = about;
    this.#legend = this.element.querySelector(".legend");
    this.#view = new TokenStream(this.#stream, (about) => inspect.textContent = about);
  }

  /** Show the chunks as they come, and return the tokens, text, passes and seconds of the answer. Passes errors on. */
  async run(chunksOfPasses) {
    const answer = { tokens: [], text: "", passes: 0, bySource: {}, seconds: 0 };
    const started = performance.now();
    let first = 0;
    const clock = () => {
      answer.seconds = (performance.now() - started) / 1000;
      const decoding = first ? (performance.now() - first) / 1000 : 0;
      this.#show(answer, decoding > 0.05 ? answer.tokens.length / decoding : 0);
    };
    let frame = requestAnimationFrame(function tick() {
      clock();
      frame = requestAnimationFrame(tick);
    });
    this.#stream.setAttribute("aria-busy", "true");
    this.element.classList.add("running");
    try {
      for await (const chunks of chunksOfPasses) {
        const choices = chunks.flatMap((chunk) => chunk.choices).filter((choice) => choice.draft);
        if (choices.length && !first) first = performance.now();
        for (const { draft, token_ids, text, delta } of choices) {
          answer.tokens.push(...token_ids);
          answer.text += text ?? delta.content ?? "";
          answer.passes = draft.pass;
          const { bySource } = answer;
          if (draft.num_accepted) bySource[draft.source] = (bySource[draft.source] ?? 0) + draft.num_accepted;
        }
        this.#view.push(choices.map((choice) => choice.draft));
      }
      return answer;
    } finally {
      cancelAnimationFrame(frame);
      this.#view.flush();
      clock();
      this.#stream.removeAttribute("aria-busy");
      this.element.classList.remove("running");
    }
  }

  #show(answer, rate) {
    this.#figures.time.textContent = `${answer.seconds.toFixed(2)} s`;
    this.#figures.passes.textContent = count(answer.passes);
    this.#figures.tokens.textContent = count(answer.tokens.length);
    this.#figures.rate.textContent = count(Math.round(rate));
    this.#figures.rate.parentElement.hidden = answer.passes < 2; // one pass has no rate
    if (answer.tokens.length === this.#numShown) return;
    this.#numShown = answer.tokens.length;
    const sources = Object.entries(answer.bySource);
    const own = answer.tokens.length - sources.reduce((sum, [, number]) => sum + number, 0);
    this.#legend.replaceChildren(...[...sources, ["target", own]].map(([source, number]) => {
      const entry = element("li", "", element("span", "swatch"), nameOf(source), element("b", "", count(number)));
      entry.dataset.source = source;
      return entry;
    }));
  }
}
