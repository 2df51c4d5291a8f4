// Draws the report's charts and runs its browser of generations. Text of models is only ever set as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const runOf = new Map(data.runs.map((run) => [run.label, run]));
  const isShown = (label) => runOf.get(label).shown;

  function element(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function shape(name, attributes = {}, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }

  const figure = (value) => (value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5)
    ? String(Number(value.toPrecision(4))) : value.toExponential(2));

  // Without its middle: runs often differ in their first words and their last.
  const shortened = (name, letters) => (name.length <= letters ? name
    : `${name.slice(0, letters / 2)}\u2026${name.slice(1 - letters / 2)}`);

  // ---- charts ----

  function ticks(low, high, most, least = 0) {
    const rough = Math.max((high - low) / most, least), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const marks = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) marks.push(i * step);
    return marks;
  }

  function logTicks(low, high) {
    const powers = Array.from({ length: high - low + 2 }, (_, index) => 10 ** (Math.floor(low) + index));
    const marks = powers.flatMap((power) => (high - low < 3 ? [1, 2, 5] : [1]).map((factor) => factor * power));
    return marks.filter((mark) => mark >= 10 ** low && mark <= 10 ** high);
  }

  // The range of the values with a margin on both sides; a single value gets room around it.
  function range(values, fixed) {
    if (fixed) return fixed;
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (low === 0 && high === 0) return [-0.05, 1];
    const margin = (high - low) * 0.05 || Math.abs(high) * 0.1;
    return [low - margin, high + margin];
  }

  function frame(host, title, height) {
    const width = Math.max(240, Math.floor(host.clientWidth));
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
    const reading = element("output", { class: "reading" });
    host.replaceChildren(element("figcaption", {}, title), svg, reading);
    return { svg, reading, width, height };
  }

  // Lines and marks in a plane. A mark is {run, x, y, name} with optional low, high, xlow, xhigh, radius and class.
  function plane(host, { title, xLabel, marks, lines = [], extra = [], xRange, yRange, reference, named, log, whole }) {
    const all = marks.concat(lines.flatMap((line) => line.points));
    host.hidden = !all.length;
    if (host.hidden) return;
    const { svg, reading, width, height } = frame(host, title, 230);
    const known = (keys) => all.concat(extra.flat()).flatMap((p) => keys.map((key) => p[key]))
      .filter((value) => Number.isFinite(value));
    const [x0, x1] = range(known(["x", "xlow", "xhigh"]), xRange), scale = log ? Math.log10 : Number;
    const [y0, y1] = range(known(["y", "low", "high"]).map(scale), yRange);
    const box = { left: 46, right: width - 10, top: 8, bottom: height - 34 };
    const X = (x) => box.left + ((x - x0) / (x1 - x0)) * (box.right - box.left);
    const Y = (y) => box.bottom - ((scale(y) - y0) / (y1 - y0)) * (box.bottom - box.top);
    for (const y of log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
      svg.append(shape("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(y), y2: Y(y) }));
      svg.append(shape("text", { x: box.left - 5, y: Y(y) + 4, "text-anchor": "end" }, figure(y)));
    }
    for (const x of ticks(x0, x1, Math.max(3, width / 60), whole ? 1 : 0)) {
      svg.append(shape("line", { class: "grid", x1: X(x), x2: X(x), y1: box.bottom, y2: box.bottom + 4 }));
      svg.append(shape("text", { x: X(x), y: box.bottom + 16, "text-anchor": "middle" }, figure(x)));
    }
    svg.append(shape("text", { x: box.right, y: height - 4, "text-anchor": "end" }, xLabel));
    const path = (points) => points.map((p) => `${X(p.x).toFixed(1)},${Y(p.y).toFixed(1)}`).join(" ");
    if (reference) svg.append(shape("polyline", { class: "reference", points: path(reference) }));
    for (const points of extra) svg.append(shape("polyline", { class: "front", points: path(points) }));
    const group = (run) => svg.appendChild(shape("g", { class: `c${runOf.get(run).color} d${runOf.get(run).dash}` }));
    for (const line of lines) {
      const g = group(line.run);
      g.append(shape("title", {}, line.run), shape("polyline", { class: line.class || "curve", points: path(line.points) }));
      if (line.points.length === 1 && !line.class) marks = marks.concat(line.points);
    }
    for (const mark of marks) {
      const g = group(mark.run), x = X(mark.x), y = Y(mark.y);
      const whisker = (from, to) => g.append(shape("line", { class: "whisker", ...from, ...to }));
      if (Number.isFinite(mark.low)) whisker({ x1: x, y1: Y(mark.low) }, { x2: x, y2: Y(mark.high) });
      if (Number.isFinite(mark.xlow)) whisker({ x1: X(mark.xlow), y1: y }, { x2: X(mark.xhigh), y2: y });
      g.append(shape("circle", { class: mark.class || "dot", cx: x, cy: y, r: mark.radius || 4 }));
    }
    if (named) {
      const at = (p) => [X(p.x), Y(p.y)], crossed = extra.flatMap((points) => pairs(points.map(at)));
      for (const { x, y, low, high, xlow, xhigh } of marks) {
        if (Number.isFinite(low)) crossed.push([at({ x, y: low }), at({ x, y: high })]);
        if (Number.isFinite(xlow)) crossed.push([at({ x: xlow, y }), at({ x: xhigh, y })]);
      }
      nameMarks(svg, marks.map((mark) => ({ ...mark, x: X(mark.x), y: Y(mark.y) })), crossed, box);
    }
    readable(svg, reading, all, X, Y);
  }

  const pairs = (points) => points.slice(1).map((point, index) => [points[index], point]);

  // Writes near each mark the name of its run where that covers no line, mark or name, and leads from one to the other.
  function nameMarks(svg, marks, lines, box) {
    const taken = marks.map(({ x, y }) => ({ left: x - 5, right: x + 5, top: y - 5, bottom: y + 5 }));
    for (const [[x0, y0], [x1, y1]] of lines) {
      const steps = Math.ceil(Math.hypot(x1 - x0, y1 - y0) / 4) || 1;
      for (let step = 0; step <= steps; step += 1) {
        const x = x0 + ((x1 - x0) * step) / steps, y = y0 + ((y1 - y0) * step) / steps;
        taken.push({ left: x - 1, right: x + 1, top: y - 1, bottom: y + 1 });
      }
    }
    const free = (a) => a.left >= box.left && a.right <= box.right && a.top >= box.top && a.bottom <= box.bottom
      && taken.every((b) => a.right < b.left || b.right < a.left || a.bottom < b.top || b.bottom < a.top);
    for (const { run, x, y } of marks) {
      const name = shortened(run, 18), width = name.length * 6.2 + 4;
      const places = [7, 14, 24, 36, 50].flatMap((away) => [[1, -1], [1, 1], [-1, -1], [-1, 1]].map(([right, down]) => {
        const left = right > 0 ? x + away : x - away - width, top = y + down * away - 6;
        return { left, right: left + width, top, bottom: top + 12, near: away < 20 };
      }));
      const area = places.find(free);
      if (!area) continue;
      taken.push(area);
      if (!area.near) {
        const [x2, y2] = [area.left > x ? area.left : area.right, (area.top + area.bottom) / 2];
        svg.append(shape("line", { class: "leader", x1: x, y1: y, x2, y2 }));
      }
      svg.append(shape("text", { class: "name", x: area.left + 2, y: area.bottom - 2 }, name));
    }
  }

  // Says below the chart what the pointer is nearest to.
  function readable(svg, reading, points, X, Y) {
    const here = svg.appendChild(shape("circle", { class: "here", r: 7, visibility: "hidden" }));
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
      const px = (event.clientX - box.left) * scale, py = (event.clientY - box.top) * scale;
      const far = (p) => (X(p.x) - px) ** 2 + (Y(p.y) - py) ** 2;
      const nearest = points.reduce((best, p) => (far(p) < far(best) ? p : best));
      here.setAttribute("cx", X(nearest.x));
      here.setAttribute("cy", Y(nearest.y));
      here.setAttribute("visibility", "visible");
      reading.textContent = nearest.name;
    });
    svg.addEventListener("pointerleave", () => {
      here.setAttribute("visibility", "hidden");
      reading.textContent = "";
    });
  }

  // One row per run: a dot with its interval, and a hollow dot for the base.
  function dots(host, { title, rows, reference }) {
    host.hidden = !rows.length;
    if (host.hidden) return;
    const step = 20, { svg, reading, width, height } = frame(host, title, rows.length * step + 26);
    const left = Math.min(150, Math.round(width * 0.36)), right = width - 12;
    const values = rows.flatMap((row) => [row.value, row.low, row.high, row.base]).concat(reference);
    const [x0, x1] = range(values.filter((value) => Number.isFinite(value)));
    const X = (x) => left + 8 + ((x - x0) / (x1 - x0)) * (right - left - 8);
    // No tick so close to the reference that their labels would meet.
    const marks = ticks(x0, x1, Math.max(3, (right - left) / 45))
      .filter((x) => reference === null || x === reference || Math.abs(X(x) - X(reference)) > 28);
    for (const x of marks) {
      svg.append(shape("line", { class: "grid", x1: X(x), x2: X(x), y1: 0, y2: height - 22 }));
      svg.append(shape("text", { x: X(x), y: height - 8, "text-anchor": "middle" }, figure(x)));
    }
    if (reference !== null) {
      svg.append(shape("line", { class: "reference", x1: X(reference), x2: X(reference), y1: 0, y2: height - 22 }));
      if (!marks.includes(reference)) {
        svg.append(shape("text", { x: X(reference), y: height - 8, "text-anchor": "middle" }, figure(reference)));
      }
    }
    const letters = Math.floor(left / 6.2);
    const points = rows.map((row, index) => {
      const y = index * step + step / 2, g = svg.appendChild(shape("g", { class: `c${runOf.get(row.run).color}` }));
      g.append(shape("text", { class: "name", x: left, y: y + 4, "text-anchor": "end" }, shortened(row.run, letters)));
      if (Number.isFinite(row.low) && Number.isFinite(row.high)) {
        g.append(shape("line", { class: "whisker", x1: X(row.low), x2: X(row.high), y1: y, y2: y }));
      }
      if (Number.isFinite(row.base)) g.append(shape("circle", { class: "hollow", cx: X(row.base), cy: y, r: 4 }));
      g.append(shape("circle", { class: "dot", cx: X(row.value), cy: y, r: 5 }));
      return { x: row.value, y, name: `${row.run}: ${withInterval(row)}${Number.isFinite(row.base) ? `, base ${figure(row.base)}` : ""}` };
    });
    readable(svg, reading, points, X, (y) => y);
  }

  const withInterval = (row) => figure(row.value)
    + (Number.isFinite(row.low) && Number.isFinite(row.high) ? ` [${figure(row.low)}, ${figure(row.high)}]` : "");

  const units = [[7200, 3600, "hours"], [180, 60, "minutes"], [0, 1, "seconds"]];

  const isTimed = (section) => section.querySelector(".axis input:checked").value === "seconds";

  function drawPanel(host, panel) {
    const place = isTimed(host.closest("section")) ? 1 : 0;
    const known = (found, held) => Object.entries(found).filter(([run]) => isShown(run))
      .map(([run, points]) => [run, points.filter((p) => p[place] !== null), held]).filter(([, points]) => points.length);
    const curves = [...known(panel.curves, ""), ...known(panel.held_out, ", held out")];
    const last = Math.max(0, ...curves.flatMap(([, points]) => points.map((p) => p[place])));
    const [, scale, unit] = place === 0 ? [0, 1, "optimizer steps"] : units.find(([from]) => last >= from);
    const lines = curves.map(([run, points, held]) => ({
      run,
      class: held && "beside",
      points: points.map((p) => ({
        run, x: p[place] / scale, y: p[2], class: held && "circle", radius: held ? 3 : 4,
        name: `${run}${held}, ${figure(p[place] / scale)} ${unit}: ${figure(p[2])}`,
      })),
    }));
    const marks = lines.filter((line) => line.class).flatMap((line) => line.points);
    plane(host, { title: panel.title, xLabel: unit, marks, lines, log: panel.log, whole: place === 0 });
  }

  function drawTradeOff(host, chart) {
    const points = chart.points.map((p) => ({
      run: p.run, setting: p.setting.join("\n"), best: p.best, class: p.front ? "dot" : "dominated",
      x: p.kl.value, xlow: p.kl.low, xhigh: p.kl.high, y: p.reward.value, low: p.reward.low, high: p.reward.high,
      name: `${p.run}: ${withInterval(p.reward)} at KL ${withInterval(p.kl)}${p.front ? ", may be on the front" : ", not on the front"}`,
    }));
    const fronts = [...new Set(points.map((p) => p.setting))]
      .map((setting) => points.filter((p) => p.best && p.setting === setting).sort((a, b) => a.x - b.x));
    const marks = points.filter((p) => isShown(p.run));
    plane(host, { title: chart.title, xLabel: "KL to the base (nats per response)", marks, extra: fronts, named: true });
  }

  function drawReliability(host, chart) {
    const pairs = chart.bins.reduce((sum, bin) => sum + bin[2], 0);
    const marks = chart.bins.filter(() => isShown(chart.run)).map(([x, y, n, low, high]) => ({
      run: chart.run, x, y, low, high, class: "bubble", radius: 3 + 24 * Math.sqrt(n / pairs),
      name: `${n} pairs: confidence ${figure(x)}, accuracy ${withInterval({ value: y, low, high })}`,
    }));
    const diagonal = [{ x: 0.5, y: 0.5 }, { x: 1, y: 1 }];
    const error = chart.ece === null ? "" : `, ECE ${chart.ece.toFixed(3)}`;
    const title = `Reliability of ${chart.run}${error}`;
    plane(host, { title, xLabel: "confidence", marks, xRange: [0.48, 1.02], yRange: [0, 1.05], reference: diagonal });
  }

  const charts = [];
  const add = (place, draw) => charts.push([place.appendChild(element("figure")), draw]);
  const groups = new Map();
  for (const panel of data.panels) {
    const group = panel.task + panel.group;
    if (!groups.has(group)) {
      const grid = element("div", { class: "charts" });
      $(`panels${panel.task}`).append(element(panel.task ? "h4" : "h3", {}, panel.group), grid);
      groups.set(group, grid);
    }
    add(groups.get(group), (host) => drawPanel(host, panel));
  }
  for (const chart of data.dots) {
    add($(chart.place + chart.task), (host) => dots(host, { ...chart, rows: chart.rows.filter((row) => isShown(row.run)) }));
  }
  for (const chart of data.trade_offs) add($(`trade-offs${chart.task}`), (host) => drawTradeOff(host, chart));
  for (const chart of data.reliability) add($(`reliability${chart.task}`), (host) => drawReliability(host, chart));

  function draw() {
    for (const [host, drawOne] of charts) drawOne(host);
    for (const task of Object.keys(data.tasks)) {
      const note = $(`untimed${task}`);
      if (!note) continue;
      const without = data.runs.filter((run) => run.task === task && run.shown && !run.timed).map((run) => run.label);
      note.hidden = !(isTimed(note.closest("section")) && without.length);
      note.textContent = `Logged without the time, so not drawn: ${without.join(", ")}.`;
    }
    const count = data.runs.filter((run) => run.shown).length;
    $("shown-count").textContent = `${count} of ${data.runs.length}`;
  }

  // ---- tables ----

  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => {
      const head = button.parentNode, body = head.closest("table").tBodies[0], index = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending", sign = down ? -1 : 1;
      const key = (row) => row.cells[index].dataset.value ?? null;
      const text = (row) => row.cells[index].textContent;
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

  const { texts, kinds, prompts, rows: rowsOf, left_out: leftOut } = data.generations;
  const responses = prompts.map(() => new Map());
  for (const [run, rows] of Object.entries(rowsOf)) {
    for (const [prompt, response, base, figures] of rows) responses[prompt].set(run, { response, base, figures });
  }
  let matching = [], selected = null;

  const entriesOf = (prompt) => [...responses[prompt]].filter(([run]) => isShown(run) && runOf.get(run).task === $("task").value);

  function matches(prompt) {
    const entries = entriesOf(prompt), wanted = $("search").value.toLowerCase();
    const contains = (text) => text !== null && texts[text].toLowerCase().includes(wanted);
    if (!entries.length) return false;
    if (wanted && !contains(prompts[prompt][1])) {
      const found = entries.some(([, row]) => contains(row.response) || contains(row.base));
      if (!$("in-responses").checked || !found) return false;
    }
    if ($("kind").value !== "" && prompts[prompt][2] !== Number($("kind").value)) return false;
    const outcome = $("outcome").value, of = $("outcome-run").value;
    if (outcome) {
      const has = ([, row]) => row.figures.outcome === outcome;
      if (of === "any" ? !entries.some(has) : of === "every" ? !entries.every(has)
        : !entries.some(([run, row]) => run === of.slice(4) && has([run, row]))) return false;
    }
    const differ = (value) => new Set(entries.map(([, row]) => value(row)).filter((v) => v !== undefined)).size > 1;
    if ($("agreement").value === "outcomes") return differ((row) => row.figures.outcome);
    if ($("agreement").value === "responses") return differ((row) => row.response);
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
    // Within the list alone: scrollIntoView would move the page as well.
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
      if (row.base !== null) bases.set(row.base, [...(bases.get(row.base) || []), [run, row]]);
    }
    for (const [base, of] of bases) {
      const name = bases.size > 1 ? `base of ${of.map(([run]) => run).join(", ")}` : "base";
      cards.append(card(name, base, describe(of[0][1].figures, "base_", 1)));
    }
    for (const [run, row] of entries) {
      const box = card(run, row.response, describe(row.figures, "", 0), row.figures.outcome);
      box.classList.add(`c${runOf.get(run).color}`);
      cards.append(box);
    }
    $("responses").replaceChildren(element("div", { class: "prompt-text" }, note, words), cards);
  }

  const OUTCOMES = { win: "wins", loss: "loses to the base", tie: "tie" };

  function card(name, text, about, outcome) {
    const heading = element("h4", {}, element("bdi", {}, name));
    if (outcome) heading.append(element("span", { class: outcome }, OUTCOMES[outcome]));
    const empty = texts[text].trim() === "";
    const words = element("p", { class: empty ? "words empty" : "words", dir: "auto" }, empty ? "(empty)" : texts[text]);
    return element("div", { class: "card" }, heading, words, element("p", { class: "note" }, about));
  }

  function describe(figures, prefix, side) {
    const parts = [];
    if (`${prefix}tokens` in figures) parts.push(`${figures[`${prefix}tokens`]} tokens`);
    if (figures[`${prefix}cut`]) parts.push("cut at the limit");
    if (`${prefix}score` in figures) parts.push(`true score ${figure(figures[`${prefix}score`])}`);
    for (const [name, values] of Object.entries(figures.rewards || {})) {
      if (values[side] !== null) parts.push(`${name} ${figure(values[side])}`);
    }
    return parts.join(" \u00b7 ");
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
    filter();
  }

  // ---- which runs are shown ----

  const boxes = [...document.querySelectorAll("#toggles input")];

  function update() {
    for (const box of boxes) data.runs[box.value].shown = box.checked;
    draw();
    if ($("prompts")) filter();
  }

  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => {
      const wanted = { all: () => true, none: () => false, first: (run) => run.first }[button.dataset.show];
      for (const box of boxes) box.checked = wanted(data.runs[box.value]);
      update();
    });
  }
  $("toggles").addEventListener("change", update);
  document.querySelectorAll(".axis input").forEach((input) => input.addEventListener("change", draw));
  $("runs").hidden = data.runs.length < 2 || !(charts.length || $("prompts"));
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) {
      width = document.body.clientWidth;
      draw();
    }
  }).observe(document.body);
  if ($("prompts")) startBrowser();
  update();
})();
