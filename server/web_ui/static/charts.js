// Lines of the last two minutes, a point a second.

import { element } from "./sources.js";

const POINTS = 120, WIDTH = 240, HEIGHT = 48;

function drawing(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export class Chart {
  #label;
  #format;
  #points = [];
  #value = element("b", "", "–");
  #svg = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  #area = drawing("path", { class: "area" });
  #line = drawing("path", { class: "line" });

  /** `least` : what the scale reaches at least. `format` : of the newest value. */
  constructor(place, label, { least = 1, format }) {
    this.#label = label;
    this.#format = format;
    this.least = least;
    this.#svg.append(this.#area, this.#line);
    this.#svg.setAttribute("aria-label", label);
    place.append(element("div", "chart", element("p", "", element("span", "soft", label), this.#value), this.#svg));
  }

  /** The next second; null leaves a gap. */
  push(value) {
    this.#points.push(value);
    if (this.#points.length > POINTS) this.#points.shift();
    const shown = value === null ? "–" : this.#format(value);
    this.#value.textContent = shown;
    const most = Math.max(this.least, ...this.#points);
    this.#svg.setAttribute("aria-label", `${this.#label}, the last two minutes: now ${shown}`);
    const x = (at) => WIDTH * (1 - (this.#points.length - 1 - at) / (POINTS - 1));
    const y = (point) => HEIGHT - 2 - (HEIGHT - 6) * (point / most);
    let line = "", area = "", begun = false;
    this.#points.forEach((point, at) => {
      if (point === null) {
        if (begun) area += `L${x(at - 1)} ${HEIGHT}Z`;
        begun = false;
        return;
      }
      area += begun ? "" : `M${x(at)} ${HEIGHT}L${x(at)} ${y(point)}`;
      line += begun ? `L${x(at)} ${y(point)}` : `M${x(at)} ${y(point)}h0`;
      area += `L${x(at)} ${y(point)}`;
      begun = true;
    });
    if (begun) area += `L${WIDTH} ${HEIGHT}Z`;
    this.#line.setAttribute("d", line);
    this.#area.setAttribute("d", area);
  }
}
