"use strict";
// Filters, the choice of A and B, sorting, CSV, copying; what is chosen stands in the address, after "#".
(() => {
  const { cases, labels, pairs } = charts.data;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const filters = document.getElementById("filters");
  const choice = document.getElementById("choice");
  const swap = document.getElementById("swap");
  const facets = filters ? [...new Set(all("input", filters).map((box) => box.name))] : [];
  const tables = new Map(); // by key: its place, that of a folded part begins with the part's
  const sorted = new Map(); // a table's key: [column, direction]
  const came = new Map(); // a table: its rows as they came
  // Not innerText, which is empty wherever the browser has not drawn yet.
  const said = (element) => element.textContent.trim().replace(/\s+/g, " ");

  // --- state in the address
  const read = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  const write = (section) => {
    const state = new URLSearchParams();
    for (const name of facets) {
      const boxes = all(`input[name="${name}"]`, filters);
      if (boxes.every((box) => box.checked)) continue;
      for (const box of boxes) if (box.checked) state.append(name, box.value);
      if (!state.has(name)) state.set(name, "");
    }
    if (choice && choice.a.selectedIndex > 0) state.set("a", choice.a.value);
    if (choice && choice.b.value) state.set("b", choice.b.value);
    if (sorted.size) state.set("sort", [...sorted].map(([table, [column, way]]) => `${table}.${column}.${way}`).join("|"));
    if (section) state.set("at", section);
    const text = state.toString();
    history.replaceState(null, "", text || location.hash ? `#${text}` : " ");
  };

  // --- filters
  const chosen = (name) => new Set(all(`input[name="${name}"]:checked`, filters).map((box) => box.value));
  const apply = () => {
    const wanted = facets.map((name) => [name, chosen(name)]);
    const keep = cases.map((one) => wanted.every(([name, values]) => values.has(one[name])));
    const isWhole = keep.every(Boolean);
    for (const element of all("[data-case]")) element.hidden = !keep[element.dataset.case];
    for (const element of all("[data-any]")) {
      element.hidden = !isWhole && !element.dataset.any.split(" ").some((number) => keep[number]);
    }
    if (filters) document.getElementById("shown").textContent = `${keep.filter(Boolean).length} of ${cases.length} cases`;
    charts.filter(isWhole ? null : (number) => keep[number]);
    compare(keep);
    columns(keep);
  };
  // A table with a column for each case loses those of cases that are not shown.
  const columns = (keep) => {
    for (const element of all("[data-columns]")) {
      const numbers = element.dataset.columns.split(" ");
      for (const row of all("tr", element)) numbers.forEach((number, place) => { row.cells[place + 1].hidden = !keep[number]; });
    }
  };

  // --- B over A
  const other = (pair) => ({
    a: pair[1], b: pair[0], ratio: pair[2] && 1 / pair[2], low: pair[4] && 1 / pair[4], high: pair[3] && 1 / pair[3],
    memory: pair[5] && 1 / pair[5],
  });
  const same = ([a, b, ratio, low, high, memory]) => ({ a, b, ratio, low, high, memory });
  const word = ({ ratio, low, high }) => {
    if (!ratio) return "-";
    if (!low || !high) return "no interval";
    if (low > 1) return "B is slower";
    return high < 1 ? "B is faster" : "cannot be told apart";
  };
  const cell = (text, isText) => {
    const made = document.createElement("td");
    made.textContent = text;
    if (isText) made.className = "text";
    return made;
  };
  const number = (value) => (value === null || !Number.isFinite(value) ? "-" : value.toFixed(2));
  const compare = (keep) => {
    if (!choice) return;
    const [a, b] = [choice.a.value, choice.b.value];
    swap.disabled = !b;
    const found = pairs.flatMap((pair) => [same(pair), other(pair)]).filter((pair) =>
      cases[pair.a].strategy === a && (b ? cases[pair.b].strategy === b : true)
      && cases[pair.b].strategy !== "single" && keep[pair.a] && keep[pair.b]);
    const table = document.querySelector("#pairs table");
    const heads = ["B", "A", "step time B / A (95 % interval)", "", "peak memory B / A"];
    table.tHead.rows[0].replaceChildren(...heads.map((text, place) => {
      const head = document.createElement("th");
      head.scope = "col";
      head.textContent = text || "step time";
      if (place < 2 || !text) head.className = "text";
      return head;
    }));
    table.tBodies[0].replaceChildren(...found.map((pair) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.className = "text";
      head.textContent = labels[pair.b];
      const bounds = pair.low && pair.high ? ` (${number(pair.low)} to ${number(pair.high)})` : "";
      row.append(head, cell(cases[pair.a].strategy, true), cell(number(pair.ratio) + bounds), cell(word(pair), true),
        cell(number(pair.memory)));
      return row;
    }));
    if (!found.length) {
      const row = table.tBodies[0].insertRow();
      row.append(cell("No two cases that are shown may be compared so.", true));
      row.cells[0].colSpan = heads.length;
    }
    dress(table);
    arrange(table);
    const drawn = new Set([a, b]);
    for (const layer of all(".layered")) {
      layer.hidden = !keep[layer.dataset.case] || (b !== "" && !drawn.has(layer.dataset.strategy));
    }
  };

  // --- tables: sort by a column, save as CSV
  const units = { ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30 };
  const value = (text) => {
    const match = /^[±+]?(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*(ns|us|ms|s|B|KiB|MiB|GiB)?\b/.exec(text);
    return match ? Number(match[1].replaceAll(",", "")) * (units[match[2]] ?? 1) : null;
  };
  // Numbers before words, and what is missing last, either way.
  const inOrder = (rows, column, way) => {
    const key = (row) => {
      const text = row.cells[column] ? said(row.cells[column]) : "";
      const number = value(text);
      return { row, text, number, rank: number !== null ? 0 : text && text !== "-" ? 1 : 2 };
    };
    const before = (a, b) => a.rank - b.rank
      || way * (a.rank ? a.text.localeCompare(b.text, "en", { numeric: true }) : a.number - b.number);
    return rows.map(key).sort(before).map(({ row }) => row);
  };
  const arrange = (table) => {
    const [column, way] = sorted.get(table.dataset.key) ?? [];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[column]?.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
    table.tBodies[0].append(...(heads[column] ? inOrder(came.get(table), column, way) : came.get(table)));
  };
  const quote = (text) => {
    // No formula in whatever opens it: what begins like one is a number, or gets an apostrophe.
    const safe = /^[=+@-]./.test(text) && !/^[+-][\d.,]+(e[+-]?\d+)?( ?(%|[a-z]+))?$/i.test(text) ? `'${text}` : text;
    return /[",]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  const title = (table) => said(table.caption.querySelector("span"));
  const save = (table) => {
    const rows = all("tr", table).filter((row) => !row.hidden);
    const lines = rows.map((row) => [...row.cells].filter((c) => !c.hidden).map((c) => quote(said(c))).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
    link.download = `${title(table).replace(/[^\w]+/g, "-").slice(0, 60)}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const dress = (table) => {
    came.set(table, [...table.tBodies[0].rows]);
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      button.addEventListener("click", () => {
        sorted.set(table.dataset.key, [column, head.getAttribute("aria-sort") === "ascending" ? -1 : 1]);
        arrange(table);
        write();
      });
      head.append(button);
    });
    if (table.caption.querySelector(".tool")) return;
    const tool = document.createElement("button");
    tool.type = "button";
    tool.className = "tool";
    tool.textContent = "CSV";
    tool.setAttribute("aria-label", `Save as CSV: ${title(table)}`);
    tool.addEventListener("click", () => save(table));
    table.caption.append(" ", tool);
  };

  // --- copying
  const copy = (code, tool) => {
    const done = () => { tool.textContent = "copied"; setTimeout(() => { tool.textContent = "copy"; }, 1500); };
    const select = () => { getSelection().selectAllChildren(code); document.execCommand("copy"); done(); };
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(done, select);
    else select();
  };
  const offer = (code) => {
    const tool = document.createElement("button");
    tool.type = "button";
    tool.className = "tool";
    tool.textContent = "copy";
    tool.setAttribute("aria-label", `Copy: ${code.textContent.trim()}`);
    tool.addEventListener("click", () => copy(code, tool));
    code.after(" ", tool);
  };

  // --- parts that come onto the page: at first, and as a reader unfolds them
  const folded = all("details.folded");
  const add = (within, prefix) => {
    all("table", within).forEach((table, place) => {
      table.dataset.key = `${prefix}${place}`;
      tables.set(table.dataset.key, table);
      if (!table.closest("#pairs")) dress(table); // that one is made anew for each choice
    });
    all(".copied", within).forEach(offer);
  };
  const unfold = (part) => {
    const held = part && [...part.childNodes].find((node) => node.nodeType === Node.COMMENT_NODE);
    if (!held) return;
    const template = document.createElement("template");
    template.innerHTML = held.data;
    const box = document.createElement("div");
    box.append(template.content);
    held.replaceWith(box);
    part.open = true;
    add(box, `${folded.indexOf(part)}-`);
    charts.add(box);
  };
  document.addEventListener("toggle", ({ target }) => {
    if (!target.open || !folded.includes(target) || target.querySelector("div")) return;
    unfold(target);
    apply();
  }, true);

  // --- begin
  const restore = () => {
    const state = read();
    for (const name of facets) {
      const wanted = state.has(name) ? new Set(state.getAll(name)) : null;
      for (const box of all(`input[name="${name}"]`, filters)) box.checked = !wanted || wanted.has(box.value);
    }
    if (choice) {
      choice.a.value = state.get("a") ?? choice.a.options[0].value;
      choice.b.value = state.get("b") ?? "";
      if (choice.a.selectedIndex < 0) choice.a.selectedIndex = 0;
      if (choice.b.selectedIndex < 0) choice.b.selectedIndex = 0;
    }
    sorted.clear();
    for (const one of (state.get("sort") ?? "").split("|").filter(Boolean)) {
      const [key, column, way] = one.split(".");
      if (/^\d+-/.test(key)) unfold(folded[Number.parseInt(key, 10)]);
      if (tables.has(key) && Number(column) >= 0) sorted.set(key, [Number(column), Number(way) < 0 ? -1 : 1]);
    }
    for (const table of tables.values()) if (!table.closest("#pairs")) arrange(table);
    apply();
    document.getElementById(state.get("at") ?? "")?.scrollIntoView();
  };
  all(".scripted").forEach((element) => { element.hidden = false; });
  add(document, "");
  filters?.addEventListener("change", () => { apply(); write(); });
  filters?.addEventListener("reset", () => setTimeout(() => { apply(); write(); }));
  choice?.addEventListener("change", () => { apply(); write(); });
  choice?.addEventListener("submit", (event) => event.preventDefault());
  filters?.addEventListener("submit", (event) => event.preventDefault());
  swap?.addEventListener("click", () => {
    [choice.a.value, choice.b.value] = [choice.b.value, choice.a.value];
    apply();
    write();
  });
  document.addEventListener("click", (event) => {
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
  // What is closed cannot be read on paper.
  const opened = new Set();
  window.addEventListener("beforeprint", () => all("details.printed:not([open])").forEach((d) => { d.open = true; opened.add(d); }));
  window.addEventListener("afterprint", () => { opened.forEach((d) => { d.open = false; }); opened.clear(); });
  // What is scrolled to, or focused, comes to stand under the filters, which stay in view.
  const bar = document.getElementById("filter");
  const leaveRoom = () => { document.documentElement.style.scrollPaddingTop = `${bar.offsetHeight}px`; };
  if (bar) {
    leaveRoom();
    new ResizeObserver(leaveRoom).observe(bar);
  }
  restore();
})();
