"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const draw = (id) => {
    const { data, layout } = figures[id];
    // On a narrow screen the legend takes a line for each name, which would leave the bars no room.
    const narrow = document.getElementById(id).clientWidth < 600 && layout.showlegend;
    if (narrow) layout.height += 22 * data.length;
    Plotly.newPlot(id, data, layout, { displayModeBar: false, responsive: true });
  };
  const waiting = new Map();
  for (const id of Object.keys(figures)) {
    // What a closed part of the page hides has no width yet; it is drawn once it opens.
    const closed = document.getElementById(id).closest("details:not([open])");
    if (closed) waiting.set(closed, [...(waiting.get(closed) ?? []), id]);
    else draw(id);
  }
  for (const [details, ids] of waiting) {
    details.addEventListener("toggle", () => ids.forEach(draw), { once: true });
  }
})();
