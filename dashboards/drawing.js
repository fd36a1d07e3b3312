"use strict";
// Draws one step of a trace. The page holds it at several levels of detail (refshard/report/pyramid.py): a frame takes
// the coarsest level that still resolves a pixel, finds what is in view by binary search, and draws only that.
const STYLES = JSON.parse(document.getElementById("styles").textContent);
const OVERVIEW = 5, AXIS = 26, LABEL = 15, PAD = 7;
const HEIGHTS = { units: 20, spans: 20, strip: 10 };
const NESTED = 16;
const FONT = "11px system-ui, sans-serif";
const CHAR = 6.1; // pixels that a letter takes on average in that font
const CLOSEST_NS = 40; // what the whole width shows at the highest zoom
const FAINT = 0.3; // the least opacity, so that a lone short span stays visible

// Little-endian, as every browser's typed arrays are.
const unpack = (text) => {
  const colon = text.indexOf(":");
  const binary = atob(text.slice(colon + 1));
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new { 1: Uint8Array, 2: Uint16Array, 4: Uint32Array }[text.slice(0, colon)](bytes.buffer);
};
const unpackLevel = (level) =>
  Object.fromEntries(
    Object.entries(level).map(([key, value]) => [key, typeof value === "string" ? unpack(value) : value]),
  );

const time = (ns) => {
  const size = Math.abs(ns);
  const [unit, scale] = size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6] : size >= 1e3 ? ["us", 1e3] : ["ns", 1];
  const value = ns / scale;
  const digits = Math.abs(value) >= 100 || scale === 1 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${unit}`;
};
// On the axis and in details: as many digits as neighbours need to differ.
const exact = (ns, step) => {
  const [unit, scale] = step >= 1e8 ? ["s", 1e9] : step >= 1e2 ? ["ms", 1e6] : ["us", 1e3];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9));
  return `${(ns / scale).toFixed(digits)} ${unit}`;
};
const shortened = (name) => (name.length > 24 ? name.replace(/^void /, "").split(/[<(]/)[0] || name : name);

const hatch = (context, kind) => {
  if (!kind) return null;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = pen.fillStyle = "rgba(255,255,255,0.45)";
  pen.lineWidth = 1.5;
  const line = (...points) => {
    pen.beginPath();
    points.forEach(([x, y], i) => (i ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    pen.stroke();
  };
  if (kind === "/" || kind === "x") [-8, 0, 8].forEach((d) => line([d, 8], [d + 8, 0]));
  if (kind === "\\" || kind === "x") [-8, 0, 8].forEach((d) => line([d, 0], [d + 8, 8]));
  if (kind === "|") line([4, 0], [4, 8]);
  if (kind === "-") line([0, 4], [8, 4]);
  if (kind === ".") pen.fillRect(2, 2, 2.5, 2.5), pen.fillRect(6, 6, 2.5, 2.5);
  return context.createPattern(tile, "repeat");
};

class Drawing {
  constructor(box, data) {
    this.box = box;
    this.canvas = box.querySelector("canvas");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.patterns = Object.fromEntries(
      Object.entries(STYLES).map(([name, style]) => [name, hatch(this.context, style.pattern)]),
    );
    this.show(data);
  }

  // Draws another step, all of it.
  show(data) {
    Object.assign(this, { data, view: { from: 0, to: data.length }, hovered: null, chosen: null });
    this.levels = data.levels.map(unpackLevel);
    [this.names, this.units, this.queued, this.notes] = [data.names, data.units, data.queued, data.notes].map(unpack);
    this.stats = { drawn: 0, visited: 0, level: 0 };
    this.layOut();
    this.resize();
  }

  layOut() {
    let y = OVERVIEW + AXIS;
    this.bands = this.data.lanes.map(({ label, role, rows }) => {
      const labelled = role === "units" ? 0 : LABEL;
      const row = rows > 1 ? NESTED : HEIGHTS[role];
      const band = { label, role, top: y, rowTop: y + labelled, row };
      y = band.rowTop + rows * row + PAD;
      return { ...band, bottom: y };
    });
    this.height = y;
  }

  resize() {
    const ratio = window.devicePixelRatio || 1;
    this.width = Math.max(1, Math.floor(this.canvas.parentElement.clientWidth));
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.readColours();
    this.draw();
  }

  readColours(printing = false) {
    const style = getComputedStyle(this.box);
    const of = (name) => style.getPropertyValue(name).trim();
    this.colours = printing
      ? { text: "#000", muted: "#444", line: "#bbb", page: "#fff", raised: "#f5f7f9", accent: "#0072b2" }
      : Object.fromEntries(
          ["text", "muted", "line", "page", "raised", "accent"].map((name) => [name, of(`--${name}`)]),
        );
  }

  // ---- what is drawn

  schedule() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  scale() {
    return (this.view.to - this.view.from) / this.width; // ticks per pixel
  }

  levelAt(scale) {
    let level = 0;
    while (level + 1 < this.levels.length && this.levels[level + 1].resolution <= scale) level++;
    return level;
  }

  draw() {
    const { context: pen, colours, width, height } = this;
    this.stats = { drawn: 0, visited: 0, level: this.levelAt(this.scale()) };
    pen.globalAlpha = 1;
    pen.fillStyle = colours.page;
    pen.fillRect(0, 0, width, height);
    pen.font = FONT;
    pen.textBaseline = "middle";
    this.drawBackground();
    this.drawAxis();
    const level = this.levels[this.stats.level];
    this.data.groups.forEach((group, g) => this.drawGroup(level, g, group));
    this.drawLabels();
    this.drawMarks();
    this.drawOverview();
    this.box.querySelector(".view").textContent =
      `${this.since(this.view.from)} to ${this.since(this.view.to)}, ${time(this.scale() * this.data.tick)} a pixel`;
  }

  since(tick) {
    const step = 10 ** Math.floor(Math.log10(Math.max(1, this.scale() * this.data.tick * 20)));
    return exact((tick - this.data.begin) * this.data.tick, step);
  }

  drawBackground() {
    const { context: pen, colours, data, view } = this;
    const k = 1 / this.scale();
    const [begin, close] = [(data.begin - view.from) * k, (data.close - view.from) * k];
    for (const { role, rowTop, bottom } of this.bands) {
      if (role === "units") continue;
      pen.fillStyle = colours.raised;
      pen.fillRect(Math.max(0, begin), rowTop, Math.min(this.width, close) - Math.max(0, begin), bottom - PAD - rowTop);
    }
  }

  drawAxis() {
    const { context: pen, colours, data, view, width } = this;
    const least = this.scale() * data.tick * 110;
    const power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 5, 10].find((n) => n * power >= least);
    const first = Math.ceil(((view.from - data.begin) * data.tick) / step);
    pen.textAlign = "left";
    for (let n = first; ; n++) {
      const x = ((n * step) / data.tick + data.begin - view.from) / this.scale();
      if (x > width) break;
      pen.fillStyle = colours.line;
      pen.fillRect(Math.round(x), OVERVIEW + 4, 1, this.height);
      pen.fillStyle = colours.muted;
      pen.fillText(exact(n * step, step), x + 4, OVERVIEW + 12);
    }
  }

  place([lane, row, style]) {
    const band = this.bands[lane];
    const top = band.rowTop + row * band.row;
    const height = band.row - (band.role === "strip" ? 0 : 1);
    return style.startsWith("gap") ? { top: top + height / 2 - 2, height: 4 } : { top, height };
  }

  // First block of [low, high) that ends after `tick`; blocks of a group are disjoint and sorted.
  search(level, low, high, tick) {
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (level.starts[middle] + level.extents[middle] < tick) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  drawGroup(level, g, group) {
    const { context: pen, view, stats } = this;
    const { top, height } = this.place(group);
    const style = STYLES[group[2]], pattern = this.patterns[group[2]];
    const k = 1 / this.scale(), high = level.offsets[g + 1];
    const labels = [];
    let column = -1, covered = 0;
    const flush = () => {
      if (column < 0) return;
      pen.globalAlpha = Math.min(1, FAINT + (1 - FAINT) * covered);
      pen.fillRect(column, top, 1, height);
      stats.drawn++;
    };
    pen.fillStyle = style.colour;
    for (let i = this.search(level, level.offsets[g], high, view.from); i < high; i++) {
      const start = level.starts[i];
      if (start >= view.to) break;
      stats.visited++;
      const extent = level.extents[i], x = (start - view.from) * k, wide = extent * k;
      if (wide < 1) {
        // Under a pixel: the pixel's column is as opaque as the spans in it cover it.
        const pixel = Math.max(0, Math.floor(x));
        if (pixel !== column) flush(), (column = pixel), (covered = 0);
        covered += (level.busy ? level.busy[i] : extent) * k;
        continue;
      }
      const left = Math.max(x, -4), right = Math.min(x + wide, this.width + 4);
      pen.globalAlpha = level.busy ? Math.max(FAINT, level.busy[i] / extent) : 1;
      pen.fillRect(left, top, right - left - (wide > 3 ? 0.7 : 0), height);
      stats.drawn++;
      if (right - left > 8 && height > 4) labels.push(i, left, right);
    }
    flush();
    pen.globalAlpha = 1;
    this.drawWide(level, labels, style, pattern, top, height, this.bands[group[0]].role);
  }

  // Pattern and name of what is wide enough: at most one in eight pixels.
  drawWide(level, wide, style, pattern, top, height, role) {
    const { context: pen } = this;
    if (pattern) {
      pen.fillStyle = pattern;
      for (let n = 0; n < wide.length; n += 3) pen.fillRect(wide[n + 1], top, wide[n + 2] - wide[n + 1] - 0.7, height);
    }
    if (height < 12) return;
    pen.textAlign = "left";
    for (let n = 0; n < wide.length; n += 3) {
      const left = Math.max(0, wide[n + 1]) + 4;
      const room = Math.floor((Math.min(this.width, wide[n + 2]) - left - 4) / CHAR);
      const text = this.label(level, wide[n], room, role);
      if (!text) continue;
      if (pattern) {
        pen.fillStyle = style.colour;
        pen.fillRect(left - 2, top + 2, text.length * CHAR + 3, height - 4);
      }
      pen.fillStyle = style.ink;
      pen.fillText(text, left, top + height / 2 + 0.5, room * CHAR + 4);
    }
  }

  label(level, i, room, role) {
    const { name, unit, count, title } = this.about(level, i);
    if (count > 1) return room < 4 ? "" : `${count} spans`.slice(0, room);
    if (role === "units") {
      // "model.layers.12 backward", "layers.12 backward", "12 backward", "12": the longest that fits.
      const [path, phase] = [unit, name.slice(unit.length)];
      const ends = path.split(".").map((_, from, parts) => parts.slice(from).join(".") + phase);
      return [...ends, path.split(".").at(-1)].find((text) => text.length <= room) ?? "";
    }
    if (title) {
      // "all_gather layers.3", or the operation alone.
      const fitting = [title, title.split(" ")[0]].find((text) => text.length <= room);
      return fitting ?? (room < 3 ? "" : `${title.slice(0, room - 1)}…`);
    }
    const whole = unit && !name.includes(unit) ? `${shortened(name)} · ${unit}` : shortened(name);
    return whole.length <= room ? whole : room < 3 ? "" : `${whole.slice(0, room - 1)}…`;
  }

  about(level, i) {
    const first = level.firsts ? level.firsts[i] : i;
    const { tick, begin, nameTable, unitTable, noteTable } = this.data;
    const [title, more] = this.notes[first] ? noteTable[this.notes[first] - 1] : ["", ""];
    return {
      title, // the operation and the unit of a collective
      more,
      name: nameTable[this.names[first]] ?? "",
      unit: this.units[first] ? unitTable[this.units[first] - 1] : "",
      queued: this.queued[first] ? this.queued[first] - 1 : null,
      count: level.counts ? level.counts[i] : 1,
      start: (level.starts[i] - begin) * tick,
      extent: level.extents[i] * tick,
      busy: (level.busy ? level.busy[i] : level.extents[i]) * tick,
    };
  }

  drawLabels() {
    const { context: pen, colours } = this;
    pen.textAlign = "left";
    for (const { label, role, top } of this.bands) {
      if (role === "units") continue;
      const wide = pen.measureText(label).width;
      pen.fillStyle = colours.page;
      pen.fillRect(0, top, wide + 8, LABEL - 1);
      pen.fillStyle = colours.text;
      pen.fillText(label, 2, top + 8);
    }
  }

  drawMarks() {
    for (const [mark, thick] of [[this.chosen, 2.5], [this.hovered, 1.5]]) {
      if (!mark) continue;
      const { top, height } = this.place(this.data.groups[mark.group]);
      const k = 1 / this.scale();
      const left = (mark.start - this.view.from) * k, wide = Math.max(2, mark.extent * k);
      if (left > this.width || left + wide < 0) continue;
      const x = Math.max(-9, left);
      this.context.strokeStyle = this.colours.text;
      this.context.lineWidth = thick;
      this.context.strokeRect(x, top - 1, Math.min(this.width + 9, left + wide) - x, height + 2);
    }
  }

  drawOverview() {
    const { context: pen, colours, data, view, width } = this;
    pen.fillStyle = colours.line;
    pen.fillRect(0, 0, width, OVERVIEW);
    pen.fillStyle = colours.accent;
    const wide = Math.max(3, ((view.to - view.from) / data.length) * width);
    pen.fillRect((view.from / data.length) * width, 0, wide, OVERVIEW);
  }

  // ---- where the reader looks

  zoomTo(from, to) {
    const { length, tick } = this.data;
    const span = Math.min(length, Math.max(to - from, Math.min(length, CLOSEST_NS / tick)));
    const middle = (from + to) / 2;
    const start = Math.max(0, Math.min(length - span, middle - span / 2));
    this.view = { from: start, to: start + span };
    this.schedule();
  }

  zoom(factor, x = this.width / 2) {
    const { from, to } = this.view;
    const at = from + x * this.scale();
    const { length, tick } = this.data;
    const span = Math.min(length, Math.max((to - from) * factor, Math.min(length, CLOSEST_NS / tick)));
    const start = Math.max(0, Math.min(length - span, at - (x / this.width) * span));
    this.view = { from: start, to: start + span };
    this.schedule();
  }

  pan(pixels) {
    const move = pixels * this.scale();
    this.zoomTo(this.view.from + move, this.view.to + move);
  }

  reset() {
    this.zoomTo(0, this.data.length);
  }

  // The block under a point, or beside it by two pixels at most.
  find(x, y) {
    const level = this.levels[this.stats.level];
    const scale = this.scale(), tick = this.view.from + x * scale;
    let best = null;
    this.data.groups.forEach((group, g) => {
      const { top, height } = this.place(group);
      if (y < top - 1 || y > top + height + 1) return;
      const low = level.offsets[g], high = level.offsets[g + 1];
      const at = this.search(level, low, high, tick);
      for (const i of [at - 1, at]) {
        if (i < low || i >= high) continue;
        const start = level.starts[i], end = start + level.extents[i];
        const away = Math.max(0, start - tick, tick - end) / scale;
        if (away <= 2 && (!best || away <= best.away)) best = { ...this.mark(level, g, i), away };
      }
    });
    return best;
  }

  mark(level, group, i) {
    return { group, index: i, level, start: level.starts[i], extent: level.extents[i] };
  }
}
