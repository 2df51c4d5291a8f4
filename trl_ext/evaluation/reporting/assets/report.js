// Runs the report's browser of generations, sorts its tables, and hides runs. Text of models is only ever set as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const boxes = [...document.querySelectorAll("#toggles input")];
  const runOf = new Map(data.runs.map((run) => [run.label, run]));
  const isShown = (label) => runOf.get(label).shown;

  function element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  const figure = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5)
    ? String(Number(value.toPrecision(4))) : value.toExponential(2));

  // ---- tables ----

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentNode, body = head.closest("table").tBodies[0], index = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
      const text = (row) => row.cells[index].textContent;
      const key = (row) => (row.cells[index].className === "number" && text(row) !== "-" ? parseFloat(text(row)) : null);
      const rows = [...body.rows].sort((a, b) => {
        const [one, other] = [key(a), key(b)];
        if ((one === null) !== (other === null)) return one === null ? 1 : -1;
        const order = one === null ? text(a).localeCompare(text(b), undefined, { numeric: true }) : one - other;
        return sign * order;
      });
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...rows);
    });
  }

  // ---- generations ----

  const { texts, kinds, prompts, bases: baseOf, rows: rowsOf, left_out: leftOut } = data.generations;
  const responses = prompts.map(() => new Map());
  for (const [run, rows] of Object.entries(rowsOf)) {
    for (const [prompt, outcome, base, response] of rows) {
      responses[prompt].set(run, { outcome, response, base: base === null ? null : baseOf[base] });
    }
  }
  let matching = [], selected = null;

  const entriesOf = (prompt) => [...responses[prompt]].filter(([run]) => isShown(run) && runOf.get(run).task === $("task").value);

  function matches(prompt) {
    const entries = entriesOf(prompt), wanted = $("search").value.toLowerCase();
    const contains = (text) => texts[text].toLowerCase().includes(wanted);
    if (!entries.length) return false;
    if (wanted && !contains(prompts[prompt][1])) {
      const found = entries.some(([, row]) => contains(row.response[0]) || (row.base && contains(row.base[0])));
      if (!$("in-responses").checked || !found) return false;
    }
    if ($("kind").value !== "" && prompts[prompt][2] !== Number($("kind").value)) return false;
    const outcome = $("outcome").value, of = $("outcome-run").value;
    if (outcome) {
      const has = ([, row]) => row.outcome === outcome;
      if (of === "any" ? !entries.some(has) : of === "every" ? !entries.every(has)
        : !entries.some(([run, row]) => run === of.slice(4) && has([run, row]))) return false;
    }
    const differ = (value) => new Set(entries.map(([, row]) => value(row)).filter((v) => v !== null)).size > 1;
    if ($("agreement").value === "outcomes") return differ((row) => row.outcome);
    if ($("agreement").value === "responses") return differ((row) => row.response[0]);
    return true;
  }

  function filter() {
    matching = prompts.map((_, index) => index).filter(matches);
    $("prompts").replaceChildren(...matching.map((prompt) => {
      const item = element("li", { role: "option", id: `prompt-${prompt}`, dir: "auto" });
      item.textContent = texts[prompts[prompt][1]] || "(empty)";
      return item;
    }));
    const beyond = leftOut ? `; ${leftOut} more are not in this file` : "";
    $("matches").textContent = `${matching.length} of ${prompts.length} prompts${beyond}`;
    select(matching.includes(selected) ? selected : matching[0] ?? null);
  }

  function select(prompt, { scroll = false } = {}) {
    selected = prompt;
    for (const item of $("prompts").querySelectorAll("[aria-selected]")) item.removeAttribute("aria-selected");
    $("prompts").removeAttribute("aria-activedescendant");
    $("responses").replaceChildren();
    if (prompt === null) return;
    const item = $(`prompt-${prompt}`), list = $("prompts");
    item.setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", item.id);
    // Scroll only the list: scrollIntoView would also move the page.
    const inner = item.getBoundingClientRect(), outer = list.getBoundingClientRect();
    list.scrollTop += Math.min(0, inner.top - outer.top) + Math.max(0, inner.bottom - outer.bottom);
    const below = $("responses").getBoundingClientRect();
    if (scroll && (below.top < 0 || below.top > innerHeight - 100)) $("matches").scrollIntoView();
    show(prompt);
  }

  function show(prompt) {
    const [rowId, text, kind] = prompts[prompt], place = matching.indexOf(prompt) + 1;
    const words = element("p", { class: "words", dir: "auto" }, texts[text] || "(empty)");
    const about = [`${place} of ${matching.length}`, kind === null ? null : `kind: ${kinds[kind]}`, `row_id: ${rowId}`];
    const note = element("p", { class: "note" }, about.filter(Boolean).join(" \u00b7 "));
    const cards = element("div", { class: "cards" });
    const entries = entriesOf(prompt), bases = new Map();
    for (const [run, row] of entries) {
      if (row.base) bases.set(row.base[0], [...(bases.get(row.base[0]) || []), [run, row.base]]);
    }
    for (const of of bases.values()) {
      const name = bases.size > 1 ? `base of ${of.map(([run]) => run).join(", ")}` : "base";
      cards.append(card(name, of[0][1]));
    }
    for (const [run, row] of entries) {
      const box = card(run, row.response, row.outcome);
      box.classList.add(`c${runOf.get(run).color}`);
      cards.append(box);
    }
    $("responses").replaceChildren(element("div", { class: "prompt-text" }, note, words), cards);
  }

  const OUTCOMES = { win: "wins", loss: "loses to the base", tie: "tie" };

  function card(name, [text, tokens, score, cut, rewards], outcome) {
    const heading = element("h4", {}, element("bdi", {}, name));
    if (outcome) heading.append(element("span", { class: outcome }, OUTCOMES[outcome]));
    const empty = texts[text].trim() === "";
    const words = element("p", { class: empty ? "words empty" : "words", dir: "auto" }, empty ? "(empty)" : texts[text]);
    const about = rewards.map(([reward, value]) => `${reward} ${figure(value)}`);
    if (score !== null) about.unshift(`true score ${figure(score)}`);
    if (cut) about.unshift("truncated");
    if (tokens !== null) about.unshift(`${tokens} tokens`);
    return element("div", { class: "card" }, heading, words, element("p", { class: "note" }, about.join(" \u00b7 ")));
  }

  function move(by) {
    if (!matching.length) return;
    const place = Math.max(0, Math.min(matching.length - 1, matching.indexOf(selected) + by));
    select(matching[place], { scroll: true });
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const inField = event.target.matches("input:not([type=checkbox], [type=radio]), select, textarea");
    const inList = event.target === $("prompts"), all = matching.length;
    const moves = { j: 1, k: -1 };
    const listMoves = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -all, End: all };
    if (event.key === "Escape" && (event.target === $("search") || inList)) {
      $("search").value = "";
      filter();
      $("prompts").focus();
    } else if (inField) {
      return;
    } else if (event.key === "/") {
      $("search").focus();
    } else if (event.key in moves) {
      move(moves[event.key]);
    } else if (inList && event.key in listMoves) {
      move(listMoves[event.key]);
    } else {
      return;
    }
    event.preventDefault();
  }

  function startBrowser() {
    const tasks = Object.keys(data.tasks).filter((task) => Object.keys(rowsOf).some((run) => runOf.get(run).task === task));
    tasks.forEach((task) => $("task").append(element("option", { value: task }, data.tasks[task])));
    $("task").parentNode.hidden = tasks.length < 2;
    kinds.forEach((kind, index) => $("kind").append(element("option", { value: index }, kind)));
    Object.keys(rowsOf).forEach((run) => $("outcome-run").append(element("option", { value: `run:${run}` }, run)));
    $("filters").addEventListener("input", filter);
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("filters").addEventListener("reset", () => setTimeout(filter));
    $("prompts").addEventListener("click", (event) => {
      const item = event.target.closest("li");
      if (item) select(Number(item.id.slice("prompt-".length)));
    });
    document.addEventListener("keydown", onKey);
  }

  // ---- which runs are shown ----

  function update() {
    for (const box of boxes) data.runs[box.value].shown = box.checked;
    for (const node of document.querySelectorAll("[data-run]")) {
      node.toggleAttribute("hidden", !data.runs[node.dataset.run].shown);
    }
    for (const chart of document.querySelectorAll(".charts figure")) chart.hidden = !chart.querySelector("[data-run]:not([hidden])");
    $("shown-count").textContent = `${boxes.filter((box) => box.checked).length} of ${boxes.length}`;
    if ($("prompts")) filter();
  }

  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      const wanted = { all: () => true, none: () => false, first: (box) => "first" in box.dataset }[button.dataset.show];
      for (const box of boxes) box.checked = wanted(box);
      update();
    });
  }
  $("toggles").addEventListener("change", update);
  $("runs").hidden = boxes.length < 2 || !document.querySelector("#prompts, .charts");
  if ($("prompts")) startBrowser();
  update();
})();
