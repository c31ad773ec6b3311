// Sparklines: the last two minutes of a number, in SVG.

import { element } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LENGTH = 240; // samples, two a second
const WIDTH = 240, HEIGHT = 40;

export class Sparkline {
  constructor(parent, title, unit, show) {
    this.title = title;
    this.unit = unit;
    this.show = show;
    this.samples = [];
    this.number = element("strong", { text: "–" });
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("aria-hidden", "true");
    this.area = this.#path("area");
    this.stroke = this.#path("stroke");
    const figures = element("div", {}, this.number, element("span", { text: unit }));
    parent.append(element("div", { className: "chart" }, element("p", { text: title }), figures, this.svg));
  }

  // `value` is null where there was nothing to measure.
  add(value) {
    this.samples.push(value);
    if (this.samples.length > LENGTH) this.samples.shift();
    if (value !== null) this.number.textContent = this.show(value); // else the last one stays, and looks it
    this.number.className = value === null ? "old" : "";
    const most = Math.max(1e-9, ...this.samples.filter((each) => each !== null)) * 1.08;
    const x = (index) => WIDTH - (this.samples.length - 1 - index) * (WIDTH / (LENGTH - 1));
    let line = "", area = "", first = null;
    this.samples.forEach((each, index) => {
      if (each === null) return;
      const y = HEIGHT - (each / most) * HEIGHT;
      const joins = index > 0 && this.samples[index - 1] !== null;
      if (!joins) first = index;
      line += `${joins ? "L" : "M"}${x(index).toFixed(1)} ${y.toFixed(1)}`;
      area += `${joins ? "L" : `M${x(index).toFixed(1)} ${HEIGHT}L`}${x(index).toFixed(1)} ${y.toFixed(1)}`;
      const next = this.samples[index + 1];
      if (next === null || next === undefined) {
        if (first === index) line += "h0.8";
        area += `L${x(index).toFixed(1)} ${HEIGHT}Z`;
      }
    });
    this.stroke.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }

  #path(name) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    this.svg.append(path);
    return path;
  }
}
