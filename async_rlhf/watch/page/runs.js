"use strict";
// Several runs: a line each, and the curves of those that are chosen beside one another.

const MAX_COMPARED = 6;

class ListView {
  constructor() {
    this.chosen = null;
    this.known = new Map();
    this.charts = DATA.panels.map((panel) => ({
      metric: Object.values(panel.metrics)[0],
      chart: Charts.plot(`${panel.title}: ${Object.keys(panel.metrics)[0]}`, { ...panel, noisy: true, bare: true }),
    }));
    this.evaluated = Charts.plot("Held-out reward", {});
    this.table = el("div", { class: "scroll" });
    const grid = el(
      "div",
      { class: "grid", id: "compared" },
      this.evaluated.element,
      ...this.charts.map(({ chart }) => chart.element),
    );
    this.words = el("p", { class: "pale" });
    const runs = card("Runs", this.words, this.table);
    runs.id = "runs";
    this.element = el("div", { class: "grid" }, runs, grid);
    runs.classList.add("wide");
    grid.classList.add("wide");
  }

  async refresh(found) {
    this.chosen ??= new Set(found.runs.slice(0, 4).map(({ name }) => name));
    this.words.textContent = `choose up to ${MAX_COMPARED} to compare, or open one${found.more ? `; ${found.more} older ones are not listed` : ""}`;
    const heads = ["", "run", "state", "step", "reward", "held-out", "tokens/s", "staleness", "idle: learner", "idle: actors"];
    const colours = [...this.chosen];
    const rows = found.runs.map(({ name, state, alive, step, max_steps: steps, last, evaluation, ended }) => {
      const box = el("input", {
        type: "checkbox",
        "aria-label": `compare ${name}`,
        onchange: () => {
          this.chosen[box.checked ? "add" : "delete"](name);
          void poll();
        },
      });
      box.checked = this.chosen.has(name);
      box.disabled = !box.checked && this.chosen.size >= MAX_COMPARED;
      const mark = el("i"),
        at = colours.indexOf(name);
      if (at >= 0) mark.style.background = `var(--c${at % 7})`;
      return [
        el("span", { class: "mark" }, box, mark),
        el("a", { href: `#${encodeURIComponent(name)}` }, name),
        badge(state, alive, ended),
        el("span", {}, short(step), steps ? el("span", { class: "of" }, ` / ${short(steps)}`) : ""),
        short(last.reward),
        evaluation ? short(evaluation.mean_reward) : "–",
        short(last.tokens_per_second),
        short(last["staleness/mean"]),
        percent(last["idle/learner"]),
        percent(last["idle/actor"]),
      ];
    });
    this.table.replaceChildren(table(heads, rows, (column) => column > 2));
    await this.compare(found);
  }

  async compare(found) {
    const names = [...this.chosen].filter((name) => found.runs.some((run) => run.name === name)),
      evaluations = {};
    await Promise.all(
      names.map(async (name) => {
        if (!this.known.has(name)) this.known.set(name, new Curves());
        const curves = this.known.get(name);
        const state = await ask(`api/runs/${encodeURIComponent(name)}?step=${curves.last}&layout=${curves.layout}`);
        curves.take(state.history);
        evaluations[name] = evaluationCurve(state.summary.evaluations);
      }),
    );
    const index = (name) => [...this.chosen].indexOf(name);
    for (const { metric, chart } of this.charts)
      chart.update(names.map((name) => ({ label: name, index: index(name), curve: this.known.get(name).curves[metric] })));
    this.evaluated.update(names.map((name) => ({ label: name, index: index(name), dots: true, curve: evaluations[name] })));
  }
}
