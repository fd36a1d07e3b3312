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
  const takeCurves = ({ data: traces, layout }) => ({
    data: traces.filter((trace) => {
      const { case: only, any } = trace.meta ?? {};
      return (only === undefined || keeps(only)) && (any === undefined || any.some(keeps));
    }).map((trace) => (trace.meta?.cases ? pick(trace, trace.meta.cases.map(keeps)) : trace)),
    layout,
  });

  // A trace with the points for which ``kept`` is true.
  const pick = (trace, kept, change = {}) => {
    const some = (list, each = (value) => value) => list.filter((_, place) => kept[place]).map(each);
    const taken = { ...trace, x: some(trace.x), y: some(trace.y, change.y) };
    for (const key of ["text", "customdata"]) if (Array.isArray(trace[key])) taken[key] = some(trace[key]);
    if (trace.error_x?.array) {
      taken.error_x = { ...trace.error_x, array: some(trace.error_x.array), arrayminus: some(trace.error_x.arrayminus) };
    }
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

  const draw = (element) => {
    const { data: traces, layout } = shown(element);
    // On a narrow screen the legend takes a line for each name, which would leave the figure no room.
    const named = traces.filter((trace) => trace.showlegend !== false).length;
    const height = layout.height + (element.clientWidth < 600 && layout.showlegend !== false ? 22 * named : 0);
    const box = element.querySelector(".plot") ?? element.appendChild(document.createElement("div"));
    box.className = "plot";
    element.style.minHeight = "";
    drawn.add(element);
    return Plotly.react(box, traces, { ...layout, height, template: data.theme }, {
      displayModeBar: Boolean(layout.meta?.texts), displaylogo: false, responsive: true,
      modeBarButtons: [["zoomIn2d", "zoomOut2d", "zoom2d", "pan2d", "resetScale2d"]],
    });
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

  // Charts that have come onto the page.
  const add = (within) => {
    if ("DecompressionStream" in window) for (const element of within.querySelectorAll(".chart")) near.observe(element);
  };
  add(document);
  if ("DecompressionStream" in window) (window.requestIdleCallback ?? setTimeout)(load); // print does not wait for it

  window.addEventListener("beforeprint", () => {
    if (!window.Plotly) return;
    for (const element of document.querySelectorAll(".chart")) {
      draw(element);
      Plotly.relayout(element.querySelector(".plot"), { width: 680 });
    }
  });
  window.addEventListener("afterprint", () => drawn.forEach(draw));
  return { data, filter, add };
})();
