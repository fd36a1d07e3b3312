"use strict";
// Tables: sort by a column, filter rows by words, save as CSV. Commands: copy.
const tables = (() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const sorted = new Map(); // a table's place on the page: [column, direction]
  const came = new Map(); // a table: its rows as they came
  // Not innerText, which is empty wherever the browser has not drawn yet.
  const said = (element) => element.textContent.trim().replace(/\s+/g, " ");
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
  const title = (table) => said(table.caption.querySelector("span").firstChild);
  const save = (table) => {
    const rows = all("tr", table).filter((row) => !row.hidden && !row.classList.contains("out"));
    const lines = rows.map((row) => [...row.cells].filter((c) => !c.hidden).map((c) => quote(said(c))).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }));
    link.download = `${title(table).replace(/[^\w]+/g, "-").slice(0, 60)}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const MANY = 12; // rows, from which on they can be filtered
  const filter = (table) => {
    const field = document.createElement("input");
    field.type = "search";
    field.className = "tool";
    field.placeholder = "filter rows";
    field.setAttribute("aria-label", `Show only rows with these words: ${title(table)}`);
    const count = document.createElement("span");
    count.setAttribute("role", "status");
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = came.get(table);
      const texts = rows.map((row) => said(row).toLowerCase());
      rows.forEach((row, place) => row.classList.toggle("out", !words.every((word) => texts[place].includes(word))));
      const left = rows.filter((row) => !row.classList.contains("out")).length;
      count.textContent = words.length ? `${left} of ${rows.length} rows` : "";
    });
    return [" ", field, " ", count];
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
        document.dispatchEvent(new Event("sorted"));
      });
      head.append(button);
    });
    const tool = document.createElement("button");
    tool.type = "button";
    tool.className = "tool";
    tool.textContent = "CSV";
    tool.setAttribute("aria-label", `Save as CSV: ${title(table)}`);
    tool.addEventListener("click", () => save(table));
    const more = came.get(table).length >= MANY ? filter(table) : [];
    table.caption.querySelector("span").append(" ", tool, ...more);
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

  // What has come onto the page. Keys are places among the tables of the same part, so that an address can name them.
  const add = (within, prefix) => {
    all("table", within).forEach((table, place) => {
      table.dataset.key = `${prefix}${place}`;
      dress(table);
    });
    all(".copied", within).forEach(offer);
  };
  const restore = (text) => {
    sorted.clear();
    for (const one of text.split("|").filter(Boolean)) {
      const [key, column, way] = one.split(".");
      if (Number(column) >= 0) sorted.set(key, [Number(column), Number(way) < 0 ? -1 : 1]);
    }
    for (const table of all("main table")) arrange(table);
  };
  const state = () => [...sorted].map(([key, [column, way]]) => `${key}.${column}.${way}`).join("|");
  return { add, arrange, restore, said, state, value };
})();

// A link to what is folded unfolds it; the button on top copies the address.
(() => {
  const unfold = (element) => {
    for (let at = element; at; at = at.parentElement) if (at instanceof HTMLDetailsElement) at.open = true;
  };
  const go = () => {
    const target = location.hash.length > 1 && !location.hash.includes("=")
      && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    unfold(target);
    target.scrollIntoView();
  };
  window.addEventListener("hashchange", go);
  go();
  const link = document.getElementById("link");
  link.addEventListener("click", () => {
    const done = (text) => { link.textContent = text; setTimeout(() => { link.textContent = "Copy link"; }, 1500); };
    navigator.clipboard?.writeText(location.href).then(() => done("Copied"), () => done("Copy it from the address bar"));
  });
  for (const element of document.querySelectorAll(".scripted")) element.hidden = false;
  if (!document.getElementById("view")) tables.add(document, "");
})();
