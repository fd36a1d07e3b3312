"use strict";
// What a reader does with a drawing: zooms, pans, points at spans and steps through them, by mouse, touch or keyboard.
(() => {
  class Reader {
    constructor(box, drawing) {
      this.box = box;
      this.drawing = drawing;
      this.detail = box.querySelector(".detail");
      this.listen();
    }

    tell() {
      const mark = this.drawing.hovered ?? this.drawing.chosen;
      this.detail.textContent = mark ? this.words(mark) : "Point at a span, or press ] for the first one in view.";
    }

    words({ level, group, index }) {
      const { name, unit, queued, count, start, extent, busy, title, more } = this.drawing.about(level, index);
      const [lane, , style] = this.drawing.data.groups[group];
      const kind = STYLES[style].label;
      const where = `at ${Math.abs(start) >= 1e6 ? `${(start / 1e6).toFixed(6)} ms` : exact(start, 1)}`;
      if (count > 1) {
        return `${count.toLocaleString("en")} spans of ${kind}, busy ${time(busy)} of ${time(extent)}, ${where}; `
          + `zoom in to tell them apart. The first: ${title || name}`;
      }
      const said = more ? `; ${more}` : "";
      if (style.startsWith("gap") || this.drawing.data.lanes[lane].role === "strip") {
        return `${kind}: ${time(extent)} ${where}${said}`;
      }
      if (title) return `${title}: ${kind}, ${time(extent)} ${where}${said}; ${name}`;
      const launched = queued === null ? "" : `, launched ${time(queued)} before`;
      return `${name}${unit && !name.startsWith(unit) ? `, ${unit}` : ""}: ${kind}, ${time(extent)} ${where}${launched}`;
    }

    // Another step, by the button that names it.
    show(button) {
      this.drawing.show(dataOf(button.dataset.drawing));
      for (const other of this.box.querySelectorAll("button[data-drawing]")) {
        other.setAttribute("aria-pressed", other === button);
      }
      this.drawing.canvas.setAttribute("aria-label", `Timeline of ${button.dataset.label} of ${this.box.dataset.who}`);
      const heading = this.box.parentElement.querySelector(".timeline-of");
      heading.querySelector("span").textContent = button.dataset.label;
      this.tell();
    }

    choose(mark) {
      this.drawing.chosen = mark;
      this.tell();
      this.drawing.schedule();
    }

    // To the next or the previous block of the chosen one's row, or to the same time in the next or the previous row.
    step(blocks, rows) {
      const { chosen, view } = this.drawing;
      const every = this.rows();
      let at = chosen ? every.findIndex((groups) => groups.includes(chosen.group)) : -1;
      if (chosen && blocks) return this.reveal(this.near(every[at] ?? [], chosen.start, blocks));
      for (let tries = 0; tries < every.length; tries++) {
        at = (at + (rows || 1) + every.length) % every.length;
        const mark = this.near(every[at], chosen ? chosen.start : view.from, 0);
        if (mark) return this.reveal(mark);
      }
    }

    // Groups that stand in one row of one lane; gaps are no spans to stop at.
    rows() {
      const rows = new Map();
      this.drawing.data.groups.forEach(([lane, row, style], group) => {
        if (style.startsWith("gap")) return;
        const place = `${lane}/${row}`;
        rows.set(place, [...(rows.get(place) ?? []), group]);
      });
      return [...rows.values()];
    }

    // Of these groups the block that starts next after a tick (1), last before it (-1), or ends next from it on (0).
    near(groups, tick, direction) {
      const level = this.drawing.levels[this.drawing.stats.level];
      let best = null;
      for (const group of groups) {
        const low = level.offsets[group], high = level.offsets[group + 1];
        let i = this.drawing.search(level, low, high, tick);
        if (direction > 0) while (i < high && level.starts[i] <= tick) i++;
        if (direction < 0) while (i >= low && (i >= high || level.starts[i] >= tick)) i--;
        if (i < low || i >= high) continue;
        const mark = this.drawing.mark(level, group, i);
        if (!best || (mark.start - best.start) * (direction || 1) < 0) best = mark;
      }
      return best;
    }

    reveal(mark) {
      if (!mark) return;
      const { from, to } = this.drawing.view, span = to - from;
      this.drawing.hovered = null;
      if (mark.start < from || mark.start + mark.extent > to) {
        const middle = mark.start + Math.min(mark.extent, span) / 2;
        this.drawing.zoomTo(middle - span / 2, middle + span / 2);
      }
      this.choose(mark);
    }

    fit(mark) {
      if (mark) this.drawing.zoomTo(mark.start - mark.extent * 0.2, mark.start + mark.extent * 1.2);
    }

    // ---- what the reader does

    listen() {
      new ResizeObserver(() => {
        if (Math.floor(this.drawing.canvas.parentElement.clientWidth) !== this.drawing.width) this.drawing.resize();
      }).observe(this.drawing.canvas.parentElement);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawing.resize());
      window.addEventListener("beforeprint", () => (this.drawing.readColours(true), this.drawing.draw()));
      window.addEventListener("afterprint", () => this.drawing.resize());
      this.drawing.canvas.addEventListener("keydown", (event) => this.onKey(event));
      this.drawing.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
      this.drawing.canvas.addEventListener("dblclick", () => this.fit(this.drawing.hovered ?? this.drawing.chosen));
      this.listenToPointers();
      for (const button of this.box.querySelectorAll("button[data-key]")) {
        button.addEventListener("click", () => this.act(button.dataset.key));
      }
      for (const button of this.box.querySelectorAll("button[data-drawing]")) {
        button.addEventListener("click", () => this.show(button));
      }
      this.tell();
    }

    act(key) {
      const actions = {
        "+": () => this.drawing.zoom(0.5), "=": () => this.drawing.zoom(0.5), w: () => this.drawing.zoom(0.5),
        "-": () => this.drawing.zoom(2), s: () => this.drawing.zoom(2),
        a: () => this.drawing.pan(-this.drawing.width / 4), ArrowLeft: () => this.drawing.pan(-this.drawing.width / 4),
        d: () => this.drawing.pan(this.drawing.width / 4), ArrowRight: () => this.drawing.pan(this.drawing.width / 4),
        0: () => this.drawing.reset(), r: () => this.drawing.reset(), Home: () => this.drawing.reset(),
        "]": () => this.step(1, 0), "[": () => this.step(-1, 0),
        ArrowDown: () => this.step(0, 1), ArrowUp: () => this.step(0, -1),
        f: () => this.fit(this.drawing.chosen), Escape: () => this.choose(null),
      };
      if (!Object.hasOwn(actions, key)) return false;
      actions[key]();
      return true;
    }

    onKey(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
      if (this.act(key)) event.preventDefault();
    }

    onWheel(event) {
      // Without focus a plain wheel scrolls the page past the timeline, as the reader meant.
      const meant = event.ctrlKey || event.metaKey || document.activeElement === this.drawing.canvas;
      if (!meant) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return this.drawing.pan(event.deltaX);
      const lines = event.deltaMode === 1 ? 16 : 1;
      this.drawing.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY * lines)) * (event.ctrlKey ? 0.01 : 0.0025)), event.offsetX);
    }

    listenToPointers() {
      const held = new Map();
      let moved = 0;
      const { canvas } = this.drawing;
      const spread = () => {
        const [one, other] = [...held.values()];
        return { apart: Math.max(10, Math.abs(one - other)), middle: (one + other) / 2 };
      };
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        canvas.setPointerCapture(event.pointerId);
        held.set(event.pointerId, event.offsetX);
        moved = 0;
      });
      canvas.addEventListener("pointermove", (event) => {
        if (!held.has(event.pointerId)) return this.hover(event);
        const before = held.size === 2 ? spread() : null;
        const by = event.offsetX - held.get(event.pointerId);
        held.set(event.pointerId, event.offsetX);
        moved += Math.abs(by);
        if (before) {
          const after = spread();
          this.drawing.zoom(before.apart / after.apart, after.middle);
          this.drawing.pan(before.middle - after.middle);
        } else if (moved > 3) this.drawing.pan(-by);
      });
      canvas.addEventListener("pointerup", (event) => {
        if (held.size === 1 && moved <= 3) this.choose(this.drawing.find(event.offsetX, event.offsetY));
      });
      for (const end of ["pointerup", "pointercancel"]) {
        canvas.addEventListener(end, (event) => held.delete(event.pointerId));
      }
      canvas.addEventListener("pointerleave", () => {
        this.drawing.hovered = null;
        this.tell();
        this.drawing.schedule();
      });
    }

    hover({ offsetX, offsetY }) {
      this.drawing.hovered = this.drawing.find(offsetX, offsetY);
      this.tell();
      this.drawing.schedule();
    }
  }

  const dataOf = (id) => JSON.parse(document.getElementById(id).textContent);
  const start = (box) => {
    if (box.timeline) return;
    box.querySelector(".controls").hidden = false;
    box.timeline = new Drawing(box, dataOf(box.dataset.drawing));
    new Reader(box, box.timeline);
  };
  for (const box of document.querySelectorAll(".timeline")) {
    const closed = box.closest("details:not([open])");
    if (closed) closed.addEventListener("toggle", () => start(box), { once: true });
    else start(box);
  }
  // A link to a trace opens it.
  const openTarget = () => {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  window.addEventListener("hashchange", openTarget);
  openTarget();
})();
