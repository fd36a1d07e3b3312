"use strict";
// Charts are drawn as they come near the screen; plotly is inflated for the first of them, or once the browser idles.
const charts = (() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const drawn = new Set();
  let keeps = null; // whether a case, by number, is shown; null while all are
  let loading = null;

  const load = () => (loading ??= (async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(inflated).text();
    document.head.append(script);
  })());

  // --- filtering
  // Bars: rows that go take their bars along, and a heading goes with the last row under it.
  const keptRows = (rows) => rows.filter((row, place) => {
    if (row.case !== null) return keeps(row.case);
    const next = rows.findIndex((other, at) => at > place && other.case === null);
    return rows.slice(place + 1, next < 0 ? undefined : next).some((under) => keeps(under.case));
  });

  const takeBars = ({ data: traces, layout }) => {
    const rows = layout.meta.rows;
    const kept = keptRows(rows);
    const places = new Map(rows.map((row, place) => [place, kept.indexOf(row)]));
    const count = Math.max(kept.length, 1);
    const height = layout.height + (count - rows.length) * ((layout.height - 70) / Math.max(rows.length, 3));
    const yaxis = {
      ...layout.yaxis, tickvals: kept.map((_, place) => place), ticktext: kept.map((row) => row.text),
      range: [count - 0.5, -0.5],
    };
    const taken = traces.map((trace) => pick(trace, trace.y.map((place) => places.get(place) >= 0),
      { y: (place) => places.get(place) }));
    return { data: taken, layout: { ...layout, yaxis, height: Math.max(height, 130) } };
  };

  // Curves: one of a case that goes is not drawn, one of several cases loses their points.
  const takeCurves = ({ data: traces, layout }) => {
    const taken = traces.filter((trace) => {
      const { case: only, any } = trace.meta ?? {};
      return (only === undefined || keeps(only)) && (any === undefined || any.some(keeps));
    }).map((trace) => (trace.meta?.cases ? pick(trace, trace.meta.cases.map(keeps)) : trace));
    const front = taken.findIndex((trace) => trace.meta?.front);
    if (front >= 0) taken[front] = { ...taken[front], ...frontOf(taken.find((trace) => trace.meta?.labels)) };
    return { data: taken, layout };
  };

  // The points that no other beats in both coordinates, from left to right.
  const frontOf = ({ x, y }) => {
    const order = x.map((_, place) => place).sort((a, b) => x[a] - x[b] || y[a] - y[b]);
    const kept = order.filter((place, at) => order.slice(0, at).every((before) => y[before] > y[place]));
    return { x: kept.map((place) => x[place]), y: kept.map((place) => y[place]) };
  };

  // A trace with the points for which ``kept`` is true.
  const pick = (trace, kept, change = {}) => {
    const some = (list, each = (value) => value) => list.filter((_, place) => kept[place]).map(each);
    const lists = (object, keys) => Object.fromEntries(
      keys.filter((key) => Array.isArray(object?.[key])).map((key) => [key, some(object[key])]));
    const taken = { ...trace, ...lists(trace, ["text", "customdata"]), x: some(trace.x), y: some(trace.y, change.y) };
    if (trace.marker) taken.marker = { ...trace.marker, ...lists(trace.marker, ["color", "symbol"]) };
    if (trace.error_y) taken.error_y = { ...trace.error_y, ...lists(trace.error_y, ["array", "arrayminus"]) };
    return taken;
  };

  // A timeline holds each text once; a block has two points.
  const spelled = (figure) => {
    const { texts } = figure.layout.meta ?? {};
    for (const trace of texts ? figure.data : []) {
      if (trace.meta?.codes) trace.text = trace.meta.codes.flatMap((code) => [texts[code], texts[code]]);
    }
    return figure;
  };

  const figures = new Map();
  const figureOf = (element) => {
    if (!figures.has(element)) figures.set(element, spelled(JSON.parse(element.querySelector("script").textContent)));
    return figures.get(element);
  };

  const shown = (element) => {
    const figure = figureOf(element);
    if (!keeps) return figure;
    return figure.layout.meta?.rows ? takeBars(figure) : takeCurves(figure);
  };

  // --- labels of points: each where nothing else is, one for points that lie on each other; one without room goes,
  // since pointing tells it too
  const AROUND = [
    ["middle right", 1, 0], ["middle left", -1, 0], ["top center", 0, -1], ["bottom center", 0, 1],
    ["top right", 1, -1], ["bottom right", 1, 1], ["top left", -1, -1], ["bottom left", -1, 1],
  ];
  // Further away from a point that must have a label, which then has an arrow.
  const FURTHER = [40, 60, 80, 110, 140, 180].flatMap((far) => Array.from({ length: 16 }, (_, n) => n * Math.PI / 8)
    .map((angle) => [far * Math.cos(angle), far * Math.sin(angle)]));
  const HIGH = 17; // of a label's line, px
  const FAR = 9; // from a point's middle to its label, px
  const SAME = 10; // points that are nearer lie on each other, px
  const WIDE = 260; // names of points that lie on each other share a line of at most this, px
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = "13px system-ui, sans-serif";
  const plain = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
  const wide = (text) => pen.measureText(plain(text)).width + 4;

  const boxAt = ([x, y], width, height, [, right, down]) => ({
    left: x + (right > 0 ? FAR : right < 0 ? -FAR - width : -width / 2), width, height,
    top: y + (down > 0 ? FAR : down < 0 ? -FAR - height : -height / 2),
  });
  const meet = (a, b) => a.left < b.left + b.width && b.left < a.left + a.width
    && a.top < b.top + b.height && b.top < a.top + a.height;

  // A line as many small boxes.
  const dots = (ends) => ends.slice(1).flatMap(([x, y], at) => {
    const [fromX, fromY] = ends[at];
    const count = Math.ceil(Math.hypot(x - fromX, y - fromY) / 4);
    return Array.from({ length: count }, (_, n) => n / count).map((part) => ({
      left: fromX + part * (x - fromX), top: fromY + part * (y - fromY), width: 1, height: 1,
    }));
  });

  // Of each point with a label, its text and side.
  const placed = (box, trace, front) => {
    const { xaxis, yaxis, shapes, _size: size } = box._fullLayout;
    const points = trace.x.map((x, place) => [xaxis.d2p(x), yaxis.d2p(trace.y[place])]);
    const taken = points.map(([x, y]) => ({ left: x - 7, top: y - 7, width: 14, height: 14 }));
    for (const shape of shapes.filter((one) => one.name === "limit")) {
      taken.push({ left: xaxis.d2p(shape.x0) - 3, top: 0, width: 6, height: size.h });
    }
    const { array = [], arrayminus = [], visible } = trace.error_y ?? {};
    const errors = (visible ? [...points.entries()] : []).map(([place, [x]]) => {
      const top = yaxis.d2p(trace.y[place] + array[place]);
      return { left: x - 3, top, width: 6, height: yaxis.d2p(trace.y[place] - arrayminus[place]) - top };
    });
    const line = dots(front.x.map((x, at) => [xaxis.d2p(x), yaxis.d2p(front.y[at])]));
    // Those to use, then those on the front, then lower points: they are the better ones.
    const rank = points.map((_, at) => (trace.meta.chosen?.includes(trace.text[at]) ? 2
      : front.x.some((x, n) => x === trace.x[at] && front.y[n] === trace.y[at]) ? 1 : 0));
    const order = points.map((_, at) => at).sort((a, b) => rank[b] - rank[a] || points[b][1] - points[a][1]);
    const together = [];
    for (const at of order) {
      const near = together.find(([first]) =>
        Math.hypot(points[at][0] - points[first][0], points[at][1] - points[first][1]) < SAME);
      if (near) near.push(at);
      else together.push([at]);
    }
    const labels = [];
    for (const members of together) {
      const names = members.map((at) => trace.text[at]);
      const forms = names.length > 1 && wide(names.join(", ")) <= WIDE ? [[names.join(", ")], names] : [names];
      const isFree = ({ at }) => at.left >= 0 && at.top >= 0 && at.left + at.width <= size.w
        && at.top + at.height <= size.h && !taken.some((other) => meet(at, other));
      const places = (sides, boxOf) => forms.flatMap((lines) => {
        const [width, height] = [Math.max(...lines.map(wide)), HIGH * lines.length];
        return sides.map((side) => ({ text: lines.join("<br>"), side, at: boxOf(points[members[0]], width, height, side) }));
      }).filter(isFree);
      const clear = (free, obstacles) => free.find(({ at }) => !obstacles.some((other) => meet(at, other)));
      const free = places(AROUND, boxAt);
      let label = clear(free, [...errors, ...line]) ?? clear(free, errors);
      if (!label && rank[members[0]]) {
        const [x, y] = points[members[0]];
        const others = taken.slice(0, points.length).filter((_, at) => !members.includes(at));
        const far = places(FURTHER, (_, width, height, [right, down]) =>
          ({ left: x + right - width / 2, top: y + down - height / 2, width, height })).filter(({ side: [right, down] }) =>
          !dots([[x, y], [x + right, y + down]]).some((dot) => others.some((other) => meet(dot, other))));
        label = clear(far, [...errors, ...line]) ?? clear(far, errors) ?? free[0] ?? far[0];
      }
      if (!label) continue;
      taken.push(label.at);
      labels[members[0]] = label;
    }
    return labels;
  };

  const label = (box, traces, fixed) => {
    const at = traces.findIndex((trace) => trace.meta?.labels);
    if (at < 0) return undefined;
    box.labelledAt = box.clientWidth;
    const trace = traces[at];
    const labels = placed(box, trace, traces.find((one) => one.meta?.front));
    const isFar = (one) => typeof one?.side[0] === "number";
    const arrows = labels.flatMap((one, place) => (isFar(one) ? [{
      x: box._fullLayout.xaxis.type === "log" ? Math.log10(trace.x[place]) : trace.x[place], y: trace.y[place],
      text: one.text, ax: one.side[0], ay: one.side[1], arrowcolor: "#777777", arrowwidth: 1, arrowhead: 0, standoff: 7,
      borderpad: 0, font: { size: 13 },
    }] : []));
    return Plotly.update(box, {
      text: [trace.text.map((_, place) => (isFar(labels[place]) ? "" : labels[place]?.text ?? ""))],
      textposition: [trace.text.map((_, place) => (isFar(labels[place]) ? "middle right" : labels[place]?.side[0] ?? "middle right"))],
    }, { annotations: [...fixed, ...arrows] }, [at]);
  };

  // --- drawing
  // Lines of a legend; a figure's height has room for two over it, or one under it. Plotly gives each name the width of the widest.
  const linesOf = (names, width) =>
    Math.ceil(names.length / Math.max(1, Math.floor(width / (Math.max(...names.map(wide)) + 45))));
  const draw = async (element, width = element.clientWidth) => {
    const { data: traces, layout } = shown(element);
    // On a narrow screen the legend takes a line for each name, which would leave the figure no room; plotly gives it
    // at most half of the height.
    const named = layout.showlegend === false ? []
      : traces.filter((trace) => trace.showlegend !== false && trace.name).map(({ name }) => name);
    const lines = width < 600 || !named.length ? named.length : linesOf(named, width);
    const more = width < 600 ? 22 * lines : 20 * Math.max(0, lines - (layout.meta?.texts ? 1 : 2));
    const height = Math.max(layout.height + more, 44 * lines);
    let box = element.querySelector(".plot");
    if (!box) box = element.appendChild(document.createElement("div"));
    box.className = "plot";
    element.style.minHeight = "";
    drawn.add(element);
    // Plotly changes what it gets, so labels get a copy.
    await Plotly.react(box, traces.map((trace) => ({ ...trace })), { ...layout, height, template: data.theme }, {
      displayModeBar: Boolean(layout.meta?.texts), displaylogo: false, responsive: true,
      modeBarButtons: [["zoomIn2d", "zoomOut2d", "zoom2d", "pan2d", "resetScale2d"]],
    });
    await label(box, traces, layout.annotations ?? []);
    if (!box.watched) {
      box.watched = true;
      box.on("plotly_afterplot", () => {
        if (box.labelledAt && box.labelledAt !== box.clientWidth) label(box, shown(element).data, layout.annotations ?? []);
      });
      box.on("plotly_click", ({ points: [point] }) => jumpOf(element, point.data.name, point.y)?.click());
    }
  };

  // --- from a part of a bar to where it is longest in a timeline
  const jumpOf = (element, part, row = 0) => [...element.closest("figure")?.querySelectorAll("a.jump") ?? []]
    .find((link) => Number(link.dataset.row) === row && link.dataset.part.startsWith(plain(part)));
  const zoom = (element, range, shapes = []) =>
    Plotly.relayout(element.querySelector(".plot"), { "xaxis.range": range, shapes });
  const reveal = (element, parent = element) => {
    for (let at = parent; at; at = at.parentElement) if (at instanceof HTMLDetailsElement) at.open = true;
    element.scrollIntoView({ block: "center" });
  };
  const goTo = async (link) => {
    const element = document.getElementById(link.hash.slice(1));
    const figure = element.closest("figure");
    reveal(element);
    near.unobserve(element);
    await load();
    await draw(element);
    const [from, to] = figureOf(element).layout.xaxis.range;
    const [begin, end] = [link.dataset.begin, link.dataset.end].map((share) => from + Number(share) * (to - from));
    const around = Math.max(1.5 * (end - begin), (to - from) / 5000);
    const mark = { type: "rect", x0: begin, x1: end, yref: "paper", y0: 0, y1: 1, line: { width: 2, color: "#e4002b" } };
    await zoom(element, [Math.max(from, begin - around), Math.min(to, end + around)], [mark]);
    figure.querySelector(".place")?.remove();
    const place = document.createElement("p");
    place.className = "place";
    place.tabIndex = -1;
    const button = (text, does) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = text;
      made.addEventListener("click", does);
      return made;
    };
    const whole = button("Show all", () => { zoom(element, [from, to]); place.remove(); });
    const back = button("Back to the bar", () => { reveal(link); link.focus(); });
    place.append(`Framed: the longest of ${link.dataset.part}, ${link.dataset.note}. `, whole, " ", back);
    element.before(place);
    reveal(place, element);
    place.focus({ preventScroll: true });
  };
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a.jump, a.part");
    const jump = link?.matches(".part") ? jumpOf(document.getElementById(link.hash.slice(1)), link.dataset.part, Number(link.dataset.row)) : link;
    if (!jump || !("DecompressionStream" in window)) return;
    event.preventDefault();
    goTo(jump);
  });

  for (const link of document.querySelectorAll("a.part")) {
    const bar = document.getElementById(link.hash.slice(1));
    if (!bar || !jumpOf(bar, link.dataset.part, Number(link.dataset.row))) link.replaceWith(...link.childNodes);
  }

  // --- saving; offered before anything is drawn, since buttons may take a line, and a page must not move later
  const offer = (element) => {
    if (element.dataset.saves) return;
    element.dataset.saves = "yes";
    const caption = element.closest("figure")?.querySelector("figcaption");
    for (const format of ["svg", "png"]) {
      const tool = document.createElement("button");
      tool.type = "button";
      tool.className = "tool";
      tool.textContent = format.toUpperCase();
      tool.setAttribute("aria-label", `Save as ${format.toUpperCase()}: ${element.dataset.title}`);
      tool.addEventListener("click", () => save(element, format));
      caption?.append(" ", tool);
    }
  };
  const save = async (element, format) => {
    await load();
    if (!drawn.has(element)) await draw(element);
    const box = element.querySelector(".plot");
    const layout = {
      ...box.layout, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff", font: { ...data.theme.layout.font, color: "#1c2024" },
    };
    const size = { width: Math.max(box.clientWidth, 700), height: box.clientHeight };
    const link = document.createElement("a");
    link.href = await Plotly.toImage({ data: box.data, layout }, { format, scale: format === "png" ? 2 : 1, ...size });
    link.download = `${element.dataset.title.replace(/[^\w]+/g, "-")}.${format}`;
    link.click();
  };

  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      near.unobserve(target);
      load().then(() => draw(target));
    }
  }, { rootMargin: "300px" });

  const filter = (keep) => {
    keeps = keep;
    for (const element of drawn) if (element.offsetParent) draw(element); // what is hidden can only come back by a filter
  };

  // Charts that have come onto the page, and those that have gone.
  const add = (within) => {
    if (!("DecompressionStream" in window)) return;
    for (const element of within.querySelectorAll(".chart")) {
      offer(element);
      near.observe(element);
    }
  };
  const forget = (within) => {
    for (const element of within.querySelectorAll(".chart")) {
      near.unobserve(element);
      drawn.delete(element);
      figures.delete(element);
      if (element.querySelector(".plot")) Plotly.purge(element.querySelector(".plot"));
    }
  };
  add(document);
  if ("DecompressionStream" in window) (window.requestIdleCallback ?? setTimeout)(load); // print does not wait for it

  const PAPER = 680; // width of a chart on paper, px
  window.addEventListener("beforeprint", () => {
    if (!window.Plotly) return;
    for (const element of document.querySelectorAll(".chart")) {
      if (!element.offsetParent) continue;
      draw(element, PAPER);
      Plotly.relayout(element.querySelector(".plot"), { width: PAPER });
    }
  });
  window.addEventListener("afterprint", () => drawn.forEach((element) => draw(element)));
  return { data, filter, add, forget };
})();
