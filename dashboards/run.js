"use strict";
// The comparison that is shown, the strategies that are shown, and the base of column "vs"; the address holds all.
(() => {
  const { cases, pairs, bases } = charts.data;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const filters = document.getElementById("filters");
  const of = document.getElementById("of");
  const slots = { top: document.getElementById("view-top"), body: document.getElementById("view") };
  const kept = new Map(); // by id, a comparison's parts as they came: [top, body]
  let shown = "v0";
  let base = null; // the strategy that the reader chose, null for the comparison's own

  // --- state in the address
  const read = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const write = (section) => {
    const state = new URLSearchParams();
    if (shown !== "v0") state.set("of", shown);
    for (const box of filters ? all("input", filters) : []) if (!box.checked) state.append("without", box.value);
    if (base) state.set("base", base);
    if (tables.state()) state.set("sort", tables.state());
    if (section) state.set("at", section);
    const text = state.toString();
    history.replaceState(null, "", text || location.hash ? `#${text}` : " ");
  };

  // --- one comparison at a time
  const partsOf = (id) => {
    if (!kept.has(id)) kept.set(id, [...document.getElementById(id).content.children]);
    return kept.get(id).map((part) => part.cloneNode(true));
  };
  const show = (id) => {
    charts.forget(slots.body);
    const [top, body] = partsOf(id);
    slots.top.replaceChildren(top);
    slots.body.replaceChildren(body);
    shown = id;
    if (of) of.value = id;
    dress();
    charts.add(slots.body);
    perfetto.add(slots.body);
  };
  const dress = () => {
    tables.add(slots.body, `${shown}-`);
    for (const element of all(".scripted", slots.body)) element.hidden = false;
    const select = document.getElementById("base");
    select?.addEventListener("change", () => {
      base = cases[select.value];
      compare();
      write();
    });
    for (const link of all(".bar nav a")) link.hidden = !document.getElementById(link.hash.slice(1));
  };

  // --- filter by strategy
  const apply = () => {
    const wanted = new Set(filters ? all("input:checked", filters).map((box) => box.value) : cases);
    const keep = cases.map((strategy) => wanted.has(strategy));
    const isWhole = keep.every(Boolean);
    for (const element of all("[data-case]")) element.hidden = !keep[element.dataset.case];
    for (const element of all("[data-any]")) {
      element.hidden = !isWhole && !element.dataset.any.split(" ").some((number) => keep[number]);
    }
    if (filters) {
      const count = all("input", filters).length;
      document.getElementById("shown").textContent = isWhole ? "" : `${wanted.size} of ${count} strategies`;
    }
    charts.filter(isWhole ? null : (number) => keep[number]);
    compare();
  };

  // --- column "vs": each case's step time over that of the base
  const number = (value) => value.toFixed(2);
  const ratio = (mine, other) => {
    const same = pairs.find(([a, b]) => a === other && b === mine);
    const swapped = pairs.find(([a, b]) => a === mine && b === other);
    if (!same && !swapped) return "-";
    const [, , value, low, high] = same ?? [0, 0, ...swapped.slice(2).map((x) => x && 1 / x)];
    if (!value) return "-";
    const [from, to] = same ? [low, high] : [high, low];
    return from && to ? `${number(value)} (${number(from)} to ${number(to)})` : number(value);
  };
  const compare = () => {
    const table = document.getElementById("headline");
    const select = document.getElementById("base");
    if (!table || !select) return;
    const rows = all("tbody tr", table);
    const chosen = base && rows.map((row) => Number(row.dataset.case)).find((one) => cases[one] === base
      && [...select.options].some((option) => Number(option.value) === one));
    const other = chosen ?? bases[shown];
    select.value = other;
    const column = [...table.tHead.rows[0].cells].findIndex((head) => head.textContent.trim().startsWith("vs"));
    const head = table.tHead.rows[0].cells[column];
    (head.querySelector("button") ?? head).textContent = `vs ${cases[other] ?? ""}`;
    if (chosen === null || chosen === undefined) return; // the page came with the comparison's own base
    for (const row of rows) {
      const mine = Number(row.dataset.case);
      row.cells[column].textContent = mine === other ? "1" : ratio(mine, other);
    }
  };

  // --- begin
  const restore = () => {
    const state = read();
    const id = kept.has(state.get("of")) || document.getElementById(state.get("of") ?? "") ? state.get("of") : "v0";
    if (id !== shown) show(id);
    const without = new Set(state.getAll("without"));
    for (const box of filters ? all("input", filters) : []) box.checked = !without.has(box.value);
    base = state.get("base");
    tables.restore(state.get("sort") ?? "");
    apply();
    document.getElementById(state.get("at") ?? "")?.scrollIntoView();
  };
  if (slots.body.firstElementChild) {
    kept.set("v0", [slots.top, slots.body].map((slot) => slot.firstElementChild.cloneNode(true)));
    dress();
  }
  for (const section of all("#verdict, #against, #dry-runs, #record")) tables.add(section, `${section.id}-`);
  of?.addEventListener("change", () => { show(of.value); tables.restore(""); apply(); write(); });
  filters?.addEventListener("change", () => { apply(); write(); });
  filters?.addEventListener("reset", () => setTimeout(() => { apply(); write(); }));
  filters?.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("sorted", () => write());
  document.addEventListener("keydown", ({ key }) => {
    const filter = document.getElementById("filter");
    if (key === "Escape" && filter?.open) { filter.open = false; filter.querySelector("summary").focus(); }
  });
  document.addEventListener("click", (event) => {
    const filter = document.getElementById("filter");
    if (filter?.open && !filter.contains(event.target)) filter.open = false;
    const link = event.target.closest('a[href^="#"]');
    const target = link && document.getElementById(link.getAttribute("href").slice(1));
    if (!target) return;
    event.preventDefault();
    target.scrollIntoView();
    target.setAttribute("tabindex", "-1");
    target.focus({ preventScroll: true });
    write(target.id);
  });
  window.addEventListener("hashchange", () => { if (read().size || !location.hash.slice(1)) restore(); });
  restore();
})();
