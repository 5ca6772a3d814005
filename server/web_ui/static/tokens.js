// A stream of tokens: the accepted tokens of a draft form a group in the colour of its source.

import { element, nameOf } from "./sources.js";

const MOST_NODES = 4000; // beyond it the oldest lose their colours, so that a long answer stays smooth

export class TokenStream {
  #place;
  #inspect;
  #waiting = [];
  #frame = 0;
  #numNodes = 0;
  #current = null;

  /** Tokens are added to `place`. `inspect` receives a sentence about the selected draft. */
  constructor(place, inspect) {
    this.#place = place;
    this.#inspect = inspect;
    place.addEventListener("pointerover", (event) => this.#choose(event.target.closest(".draft")));
    place.addEventListener("click", (event) => this.#choose(event.target.closest(".draft")));
    place.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Add the tokens of passes; they are drawn with the next frame. */
  push(drafts) {
    this.#waiting.push(...drafts);
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.flush());
  }

  /** Draw all waiting tokens now. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const place = this.#place;
    const follows = place.scrollHeight - place.scrollTop - place.clientHeight < 48;
    const drawn = document.createDocumentFragment();
    for (const draft of this.#waiting) this.#draw(draft, drawn.lastChild ?? place.lastChild, drawn);
    this.#waiting = [];
    place.append(drawn);
    this.#fade();
    if (follows) place.scrollTop = place.scrollHeight;
  }

  #draw(draft, last, drawn) {
    const accepted = draft.texts.slice(0, draft.num_accepted);
    if (accepted.length) {
      const group = element("span", "draft", ...accepted.map((text) => element("span", "t", text)));
      group.dataset.source = draft.source;
      group.dataset.about =
        `Pass ${draft.pass}: ${draft.num_accepted} of ${draft.num_drafted} draft tokens accepted, ` +
        `source: ${nameOf(draft.source)}`;
      drawn.append(group);
      last = group;
      this.#numNodes += 1 + accepted.length;
    }
    const own = draft.texts.slice(draft.num_accepted).join("");
    if (!own) return;
    if (last?.className === "own") last.firstChild.appendData(own);
    else {
      drawn.append(element("span", "own", own));
      this.#numNodes += 1;
    }
  }

  #fade() {
    if (this.#numNodes <= MOST_NODES) return;
    const faded = element("span", "own", "");
    let text = "";
    while (this.#numNodes > MOST_NODES / 2) {
      const oldest = this.#place.firstChild;
      text += oldest.textContent;
      this.#numNodes -= oldest.className === "draft" ? 1 + oldest.childElementCount : 1;
      oldest.remove();
    }
    faded.append(text);
    this.#place.prepend(faded);
    this.#numNodes += 1;
  }

  #choose(draft) {
    if (!draft) return;
    this.#current?.classList.remove("current");
    this.#current = draft;
    draft.classList.add("current");
    this.#inspect(draft.dataset.about);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const drafts = [...this.#place.querySelectorAll(".draft")];
    if (!step || !drafts.length) return;
    event.preventDefault();
    const at = drafts.indexOf(this.#current) + step;
    const draft = drafts[Math.max(0, Math.min(drafts.length - 1, at))];
    this.#choose(draft);
    draft.scrollIntoView({ block: "nearest" });
  }
}
