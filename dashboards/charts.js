"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  for (const [id, { data, layout }] of Object.entries(figures)) {
    Plotly.newPlot(id, data, layout, { displayModeBar: false, responsive: true });
  }
})();
