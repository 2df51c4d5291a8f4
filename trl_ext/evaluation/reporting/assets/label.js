// Collects blind preferences. Text of models is only ever set as text.
"use strict";
(() => {
  const { session, weighted, rows } = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const key = `labels-${session}`;
  // Pairs of a row's number and its outcome, null for a skipped row, in the order of labelling.
  let chosen = JSON.parse(localStorage.getItem(key) ?? "[]");

  const current = () => rows.findIndex((_, number) => !chosen.some(([done]) => done === number));

  function element(name, style, ...children) {
    const node = document.createElement(name);
    node.className = style;
    node.append(...children);
    return node;
  }

  function show() {
    const number = current(), done = chosen.filter(([, outcome]) => outcome).length;
    $("count").textContent = `${done} labelled, ${rows.length - chosen.length} left`;
    if (number < 0) return $("pair").replaceChildren(element("p", "note", "Every pair is done: download the labels."));
    const [, prompt, texts] = rows[number];
    const cards = texts.map((text, place) => {
      const words = element("div", "words", text.trim() ? text : "(empty)");
      words.dir = "auto";
      return element("section", "card", element("h4", "", String(place + 1)), words);
    });
    const asked = element("div", "words", prompt);
    asked.dir = "auto";
    $("pair").replaceChildren(element("div", "prompt-text", asked), element("div", "cards", ...cards));
    scrollTo(0, 0);
  }

  function choose(choice) {
    const number = current();
    if (choice === "u") chosen.pop();
    else if (number < 0 || !"12ts".includes(choice)) return;
    else chosen.push([number, { t: "tie", s: null }[choice] ?? rows[number][3][choice - 1] ?? null]);
    localStorage.setItem(key, JSON.stringify(chosen));
    show();
  }

  function lines() {
    const labels = chosen.filter(([, outcome]) => outcome);
    // The weights of priority sampling: 1 / min(1, size / the priority of the next row).
    const last = Math.max(-1, ...labels.map(([number]) => number));
    const threshold = rows.find((_, number) => number > last && !chosen.some(([done]) => done === number))?.[4] ?? 0;
    return labels.map(([number, outcome]) => JSON.stringify({
      row_id: rows[number][0], outcome,
      ...(weighted ? { weight: Math.max(1, threshold / rows[number][5]) } : {}), session,
    }) + "\n").join("");
  }

  document.addEventListener("keydown", (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.altKey && !event.repeat && event.key.length === 1) choose(event.key);
  });
  for (const button of document.querySelectorAll("[data-choice]")) {
    button.addEventListener("click", () => choose(button.dataset.choice));
  }
  $("download").addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines()], { type: "application/jsonl" }));
    link.download = "labels.jsonl";
    link.click();
    URL.revokeObjectURL(link.href);
  });
  show();
})();
