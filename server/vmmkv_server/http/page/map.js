// The address space: slots across, pages up. A run is [group, page, pages, state, sharers, prefix].

import { bytes, count, element, plural } from "./format.js";

const NUM_COLOURS = 8;
const LEAST_COLUMN = 6, WISHED_COLUMN = 22, MOST_COLUMN = 34;
const FONT = "11px system-ui, sans-serif";
const MARGIN = 6;
const LEAST_PAGES = 8;
const PAGE_BYTES = 2 ** 21;

export class AddressMap {
  constructor(root, elements) {
    this.root = root;
    this.canvas = root.querySelector("canvas");
    this.elements = elements;
    const pen = this.canvas.getContext("2d");
    pen.font = FONT;
    // Room for the longest labels: sizes on the left, and half of the number under the last column.
    this.before = Math.ceil(pen.measureText("0000 MiB").width) + 8;
    this.behind = Math.ceil(pen.measureText("0000").width / 2);
    this.map = null;
    this.slots = new Map();
    this.least = 16; // columns that are needed; they only become more, so that slots keep their places
    this.shown = 16; // and those that are drawn: as many as there is room for
    this.pages = LEAST_PAGES; // rows
    this.chosen = null;
    this.due = false;
    new ResizeObserver(() => this.#draw()).observe(root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    root.addEventListener("pointermove", (event) => this.#point(event));
    root.addEventListener("pointerdown", (event) => this.#point(event));
    root.addEventListener("keydown", (event) => this.#key(event));
    root.addEventListener("focus", () => { if (this.chosen === null) this.#choose(this.#taken()[0] ?? 1); });
    elements.table.closest("details").addEventListener("toggle", () => this.#fillTable());
  }

  show(map) {
    this.map = map;
    this.slots = new Map(map.slots.map((slot) => [slot.slot, slot]));
    const last = Math.max(0, ...this.slots.keys());
    this.least = Math.max(this.least, Math.ceil(last / 16) * 16);
    this.#place();
    const wanted = drawnRows(map.slots.map(rowsOf));
    if (wanted > this.pages || wanted * 4 <= this.pages) this.pages = wanted; // else columns keep their scale
    const free = map.num_slots - map.slots.length;
    this.elements.text.textContent =
      `${plural(map.slots.length, "slot")} with memory, ${count(free)} free` +
      (this.shown < map.num_slots ? `; the first ${count(this.shown)} are drawn` : "");
    this.#fillTable();
    this.#tell();
    this.#draw();
  }

  #taken() { return [...this.slots.keys()]; }

  // Drawing

  #draw() {
    if (this.due || !this.map) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.#paint(); });
  }

  #place() {
    const width = this.root.clientWidth - this.before - this.behind;
    this.shown = Math.min(this.map.num_slots, Math.max(this.least, Math.floor(width / WISHED_COLUMN)));
    const column = Math.max(LEAST_COLUMN, Math.min(MOST_COLUMN, Math.floor(width / this.shown)));
    const across = Math.max(1, Math.floor(width / column));
    const bands = Math.ceil(this.shown / across);
    const height = bands === 1 ? 220 : bands === 2 ? 140 : bands <= 6 ? 92 : 56;
    return { column, across, bands, height, step: height + 22 };
  }

  #paint() {
    const place = this.#place();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const ratio = devicePixelRatio || 1;
    const width = this.root.clientWidth, height = place.bands * place.step + MARGIN;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = FONT;
    const look = { colour, stripes: stripes(pen, colour("pending"), ratio) };
    const groups = this.map.slot_pages.length || 1;
    for (let band = 0; band < place.bands; band++) {
      const top = MARGIN + band * place.step, bottom = top + place.height;
      const first = band * place.across + 1, end = Math.min(this.shown, first + place.across - 1) + 1;
      this.#scale(pen, place, look, top, first, end);
      for (let slot = first; slot < end; slot++) {
        const left = this.before + (slot - first) * place.column;
        if (slot === this.chosen) {
          pen.fillStyle = colour("well");
          pen.fillRect(left - 1, top - 3, place.column + 1, place.height + 3);
        }
        const own = this.slots.get(slot);
        const inner = place.column - (place.column > 8 ? 3 : 1);
        for (const run of own?.runs ?? []) {
          const wide = inner / groups;
          this.#run(pen, run, left + 0.5 + run[0] * wide, wide - (groups > 1 ? 1 : 0), bottom, place, look);
        }
        if (own && rowsOf(own) > this.pages) this.#gap(pen, left, inner, top, look);
        if (slot === this.chosen) {
          pen.strokeStyle = colour("focus");
          pen.lineWidth = 1.5;
          pen.strokeRect(left - 0.75, top - 3, place.column, place.height + 3.5);
        }
      }
    }
  }

  #scale(pen, place, look, top, first, end) {
    const bottom = top + place.height, right = this.before + (end - first) * place.column;
    pen.fillStyle = look.colour("soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.strokeStyle = look.colour("line");
    pen.lineWidth = 1;
    const parts = place.height > 120 ? 4 : 2;
    for (let part = 0; part <= parts; part++) {
      const y = Math.round(bottom - (place.height * part) / parts) + 0.5;
      pen.beginPath();
      pen.moveTo(this.before, y);
      pen.lineTo(right, y);
      pen.stroke();
      const size = bytes((this.pages * PAGE_BYTES * part) / parts);
      if (part) pen.fillText(size, this.before - 6, y + (part === parts ? 3 : 0));
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    const every = [1, 2, 4, 8, 16, 32, 64].find((each) => each * place.column >= 34) ?? 64;
    for (let slot = first; slot < end; slot += every) {
      pen.fillText(String(slot), this.before + (slot - first + 0.5) * place.column - 0.5, bottom + 5);
    }
  }

  #run(pen, [, page, all, state, , prefix], left, wide, bottom, place, look) {
    const unit = place.height / this.pages;
    const pages = Math.min(all, this.pages - page); // those that are drawn
    if (pages <= 0) return;
    const high = pages * unit, top = bottom - (page + pages) * unit;
    const base = look.colour(prefix === null ? "own" : `p${prefix % NUM_COLOURS}`);
    if (state === "ahead") {
      pen.strokeStyle = base;
      pen.lineWidth = 1.2;
      pen.strokeRect(left + 0.6, top + 1, wide - 1.2, Math.max(1, high - 2));
    } else if (state === "pending") {
      pen.fillStyle = look.stripes;
      pen.fillRect(left, top + 0.5, wide, high - 1);
    } else {
      const quiet = state === "parked";
      pen.fillStyle = quiet && prefix === null ? look.colour("parked") : base;
      pen.globalAlpha = quiet && prefix !== null ? 0.5 : 1;
      pen.fillRect(left, top + 0.5, wide, high - (unit >= 4 ? 1 : 0));
      pen.globalAlpha = 1;
    }
    if (unit >= 5 && state !== "pending") {
      pen.fillStyle = look.colour("surface");
      for (let each = 1; each < pages; each++) pen.fillRect(left, bottom - (page + each) * unit - 0.5, wide, 1);
    }
  }

  #gap(pen, left, wide, top, look) {
    pen.beginPath();
    for (const [x, y] of [[left, 11], [left + wide + 1, 5], [left + wide + 1, 10], [left, 16]]) pen.lineTo(x, top + y);
    pen.closePath();
    pen.fillStyle = look.colour("surface");
    pen.fill();
    pen.strokeStyle = look.colour("soft");
    pen.lineWidth = 1;
    for (const y of [0, 5]) {
      pen.beginPath();
      pen.moveTo(left, top + 11 + y);
      pen.lineTo(left + wide + 1, top + 5 + y);
      pen.stroke();
    }
  }

  // Choosing a slot

  #point(event) {
    if (!this.map) return;
    const place = this.#place(), box = this.root.getBoundingClientRect();
    const across = Math.floor((event.clientX - box.left - this.before) / place.column);
    const band = Math.floor((event.clientY - box.top - MARGIN) / place.step);
    const slot = band * place.across + across + 1;
    const hit = across >= 0 && across < place.across && band >= 0 && slot <= this.shown;
    if (hit) this.#choose(slot);
  }

  #key(event) {
    if (!this.map) return;
    const taken = this.#taken(), now = this.chosen ?? 0;
    const moves = {
      ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1,
      PageDown: taken.find((slot) => slot > now) ?? now, PageUp: taken.findLast((slot) => slot < now) ?? now,
      Home: 1, End: this.shown,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#choose(Math.max(1, Math.min(this.shown, moves[event.key])));
  }

  #choose(slot) {
    if (slot === this.chosen) return;
    this.chosen = slot;
    this.#tell();
    this.#draw();
  }

  #tell() {
    if (!this.map) return;
    const text = this.chosen === null ? "" : this.#describe(this.chosen);
    this.elements.slot.textContent = text;
    this.root.setAttribute("aria-valuemax", String(this.shown));
    this.root.setAttribute("aria-valuenow", String(this.chosen ?? 1));
    this.root.setAttribute("aria-valuetext", text || "no slot is chosen");
  }

  #describe(number) {
    const slot = this.slots.get(number);
    if (!slot) return `Slot ${number}: free`;
    const sums = new Map();
    for (const [, , pages, state, sharers, prefix] of slot.runs) {
      const mine = prefix === null ? "its own" : `of prefix ${prefix + 1}, in ${sharers} slots`;
      const kind = state === "live" || state === "parked" ? mine : state;
      sums.set(kind, (sums.get(kind) ?? 0) + pages);
    }
    const parts = [...sums].map(([kind, pages]) => `${plural(pages, "page")} ${kind}`);
    const who = slot.request ? `, ${slot.request.slice(0, 17)}` : "";
    return `Slot ${number}: ${slot.state}${who}, ${plural(slot.tokens, "token")} · ${parts.join(" · ")}`;
  }

  #fillTable() {
    const body = this.elements.table;
    if (!body.closest("details").open || !this.map) return;
    const rows = this.map.slots.map((slot) => {
      const sums = { own: 0, shared: 0, ahead: 0, pending: 0 };
      for (const [, , pages, state, , prefix] of slot.runs) {
        sums[state in sums ? state : prefix === null ? "own" : "shared"] += pages;
      }
      const numbers = [slot.tokens, sums.own, sums.shared, sums.ahead, sums.pending];
      const cells = numbers.map((number) => element("td", { className: "number", text: count(number) }));
      return element("tr", {}, element("td", { text: slot.slot }), element("td", { text: slot.state }), ...cells);
    });
    body.replaceChildren(...rows);
  }
}

const rowsOf = (slot) => Math.max(0, ...slot.runs.map((run) => run[1] + run[2]));

// How many rows are drawn for columns that have so many: all, unless a few columns would make slivers of the others.
function drawnRows(all) {
  const sorted = all.toSorted((one, other) => one - other);
  const usual = sorted[Math.floor((sorted.length - 1) * 0.75)] ?? 0;
  return Math.ceil(Math.max(LEAST_PAGES, Math.min(sorted.at(-1) ?? 0, 4 * usual)) / 4) * 4;
}

function stripes(pen, colour, ratio) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(6 * ratio);
  const own = tile.getContext("2d");
  own.strokeStyle = colour;
  own.lineWidth = 2 * ratio;
  const side = tile.width;
  for (const shift of [-side, 0, side]) {
    own.beginPath();
    own.moveTo(shift, side);
    own.lineTo(shift + side, 0);
    own.stroke();
  }
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
