"use strict";
// The comparison that is shown, the strategies that are shown, the base of column "vs", and two cases side by side; the
// address holds all.
(() => {
  const { cases, pairs, bases } = charts.data;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const filters = document.getElementById("filters");
  const of = document.getElementById("of");
  const slots = { top: document.getElementById("view-top"), body: document.getElementById("view") };
  const kept = new Map(); // by id, a comparison's parts as they came: [top, body]
  let shown = "v0";
  let picked = []; // at most two cases, by number
  let base = null; // the strategy that the reader chose, null for the comparison's own

  // --- state in the address
  const read = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const write = (section) => {
    const state = new URLSearchParams();
    if (shown !== "v0") state.set("of", shown);
    for (const box of filters ? all("input", filters) : []) if (!box.checked) state.append("without", box.value);
    if (base) state.set("base", base);
    if (picked.length) state.set("pair", picked.join("."));
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
    for (const row of all("#headline tbody tr", slots.body)) {
      const box = document.createElement("input");
      box.type = "checkbox";
      box.className = "pick";
      box.value = row.dataset.case;
      box.setAttribute("aria-label", `Compare ${tables.said(row.cells[0])}`);
      box.addEventListener("change", () => {
        const others = picked.filter((one) => one !== Number(box.value));
        picked = box.checked ? [...others, Number(box.value)].slice(-2) : others;
        pair();
        write();
      });
      row.cells[0].prepend(box);
    }
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

  // --- two cases side by side: each figure that a table has of both
  const figuresOf = (both) => {
    const found = new Map();
    for (const table of all(".first table, #why table, #memory table, #power table", slots.body)) {
      const [mine, other] = both.map((one) => table.querySelector(`tbody tr[data-case="${one}"]`));
      const fold = table.closest("details")?.querySelector("summary");
      [...(mine && other ? table.tHead.rows[0].cells : [])].slice(1).forEach((head, n) => {
        const texts = [mine, other].map((row) => tables.said(row.cells[n + 1]));
        const name = tables.said(head);
        if (name.startsWith("vs ") || found.get(name)?.every((text, place) => text === texts[place])) return;
        found.set(found.has(name) ? `${name} (${tables.said(fold ?? table.caption)})` : name, texts);
      });
    }
    return found;
  };
  const pair = () => {
    document.getElementById("pair")?.remove();
    const rows = all("#headline tbody tr", slots.body);
    picked = picked.filter((one) => rows.some((row) => Number(row.dataset.case) === one));
    for (const box of all(".pick", slots.body)) box.checked = picked.includes(Number(box.value));
    if (picked.length < 2) return;
    const [a, b] = picked;
    const names = picked.map((one) => tables.said(rows.find((row) => Number(row.dataset.case) === one).cells[0]));
    const box = document.createElement("div");
    box.id = "pair";
    box.className = "scroll";
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", `${names[0]} and ${names[1]} side by side`);
    const table = box.appendChild(document.createElement("table"));
    const title = document.createElement("span");
    title.textContent = box.getAttribute("aria-label");
    table.createCaption().append(title);
    const cell = (row, tag, text, scope) => {
      const made = row.appendChild(document.createElement(tag));
      made.textContent = text;
      if (scope) made.scope = scope;
    };
    const head = table.createTHead().insertRow();
    for (const name of ["figure", ...names, `${names[1]} / ${names[0]}`]) cell(head, "th", name, "col");
    const body = table.createTBody();
    for (const [name, texts] of figuresOf(picked)) {
      const row = body.insertRow();
      cell(row, "th", name, "row");
      for (const text of texts) cell(row, "td", text);
      const [x, y] = texts.map(tables.value);
      const quotient = x && y ? number(y / x) : "-";
      cell(row, "td", name.startsWith("step time") && ratio(b, a) !== "-" ? ratio(b, a) : quotient);
    }
    for (const row of table.rows) row.cells[0].className = "text";
    document.getElementById("headline").closest(".first").after(box);
    tables.add(box, `${shown}-pair`);
  };

  // --- begin
  const restore = () => {
    const state = read();
    const id = kept.has(state.get("of")) || document.getElementById(state.get("of") ?? "") ? state.get("of") : "v0";
    if (id !== shown) show(id);
    const without = new Set(state.getAll("without"));
    for (const box of filters ? all("input", filters) : []) box.checked = !without.has(box.value);
    base = state.get("base");
    picked = (state.get("pair") ?? "").split(".").filter(Boolean).map(Number).slice(0, 2);
    tables.restore(state.get("sort") ?? "");
    apply();
    pair();
    document.getElementById(state.get("at") ?? "")?.scrollIntoView();
  };
  if (slots.body.firstElementChild) {
    kept.set("v0", [slots.top, slots.body].map((slot) => slot.firstElementChild.cloneNode(true)));
    dress();
  }
  for (const section of all("#verdict, #against, #dry-runs, #record")) tables.add(section, `${section.id}-`);
  of?.addEventListener("change", () => { show(of.value); tables.restore(""); apply(); pair(); write(); });
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
