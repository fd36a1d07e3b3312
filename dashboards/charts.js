"use strict";
// Charts are drawn as they come near the screen. Plotly is inflated for the first of them, and its drawing takes the
// place of the still one, which stays where a browser cannot inflate, and for print.
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

  const figures = new Map();
  const figureOf = (element) => {
    if (!figures.has(element)) figures.set(element, JSON.parse(element.querySelector("script").textContent));
    return figures.get(element);
  };

  const shown = (element) => {
    const figure = figureOf(element);
    if (!keeps) return figure;
    return figure.layout.meta?.rows ? takeBars(figure) : takeCurves(figure);
  };

  const draw = (element) => {
    const { data: traces, layout } = shown(element);
    // On a narrow screen the legend takes a line for each name, which would leave the bars no room.
    const narrow = element.clientWidth < 600 && layout.showlegend;
    const height = layout.height + (narrow ? 22 * traces.length : 0);
    const box = element.querySelector(".plot") ?? element.appendChild(document.createElement("div"));
    box.className = "plot";
    element.classList.add("drawn");
    element.style.minHeight = "";
    drawn.add(element);
    return Plotly.react(box, traces, { ...layout, height, template: data.theme }, { displayModeBar: false, responsive: true });
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
    if (keeps) load(); // print must not wait for it
    for (const element of drawn) if (element.offsetParent) draw(element); // what is hidden can only come back by a filter
  };

  const isStill = (element) => element.querySelector(".still") !== null;
  const every = () => [...document.querySelectorAll(".chart")];
  // Charts that have come onto the page.
  const add = (within) => {
    if (!("DecompressionStream" in window)) return;
    for (const element of within.querySelectorAll(".chart")) {
      if (!isStill(element)) element.style.minHeight = `${figureOf(element).layout.height}px`;
      near.observe(element);
    }
  };
  add(document);

  // On paper the still drawings stand where there are any, unless filters have left something out of them.
  window.addEventListener("beforeprint", () => {
    if (!window.Plotly) return;
    for (const element of every().filter((one) => keeps || !isStill(one))) {
      draw(element);
      Plotly.relayout(element.querySelector(".plot"), { width: 680 });
    }
  });
  window.addEventListener("afterprint", () => drawn.forEach(draw));
  return { data, filter, add };
})();
