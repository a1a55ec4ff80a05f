"use strict";
// The page: what is shown of the runs, asked for every two seconds or taken from the data that it was saved with.
// Names, completions and messages come from a run and may be anything: they are set as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const ROOT = location.origin + location.pathname.replace(/[^/]*$/, "");
const PERIOD_MS = 2000;
const MAX_COMPARED = 6;
const $ = (id) => document.getElementById(id);
const { short } = Charts;
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.095 ? 1 : 0)} %`);

function el(tag, about = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about)) {
    if (name === "class") made.className = value;
    else if (name === "onclick" || name === "onchange") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const card = (title, ...children) => el("section", { class: "card" }, el("h2", {}, title), ...children);

async function ask(path) {
  if (DATA.saved) return null;
  const answer = await fetch(ROOT + path, { signal: AbortSignal.timeout(15000) });
  if (!answer.ok) throw new Error(answer.status === 404 ? "this run is no longer there" : `the server answers ${answer.status}`);
  return answer.json();
}

const listing = async () => (DATA.saved ? DATA.saved.runs : ask("api/runs"));

// ---- one run

class Curves {
  // What is known of the curves of a run; the server tells what has changed.
  constructor() { this.layout = ""; this.last = 0; this.width = 1; this.curves = {}; this.ages = { step: [], tokens: [] }; }

  take({ layout, width, from, last, curves, ages }) {
    if (layout !== this.layout) { this.curves = {}; this.ages = { step: [], tokens: [] }; }
    for (const [name, curve] of Object.entries(curves)) this.curves[name] = joined(this.curves[name], curve, from);
    this.ages = joined(this.ages, ages, from);
    [this.layout, this.width, this.last] = [layout, width, Math.max(last, 0)];
  }
}

function joined(known, added, from) {
  if (!known) return added;
  const keep = known.step.findIndex((step) => step >= from), end = keep < 0 ? known.step.length : keep;
  return Object.fromEntries(Object.entries(added).map(([key, values]) => [key, [...known[key].slice(0, end), ...values]]));
}

function evaluationCurve(evaluations) {
  const good = evaluations.filter((e) => Number.isInteger(e.step) && Number.isFinite(e.mean_reward));
  const latest = new Map(good.map((e) => [e.step, e.mean_reward]));
  const steps = [...latest.keys()].sort((a, b) => a - b);
  return { step: steps, mean: steps.map((step) => latest.get(step)) };
}

class RunView {
  constructor(name) {
    this.name = name;
    this.known = new Curves();
    this.seen = -1;
    this.panels = DATA.panels.map((panel) => ({ panel, chart: Charts.plot(panel.title, panel) }));
    this.heat = Charts.heat("Staleness of the tokens");
    this.heat.element.id = "ages";
    this.other = Charts.plot("Any other metric", { noisy: true });
    this.choice = el("select", { "aria-label": "metric", onchange: () => this.drawOther() });
    this.parts = Object.fromEntries(["problems", "tiles", "idle", "ledger", "actors", "timeline", "completions", "events"].map((id) => [id, el("div", { id })]));
    const { problems, tiles, idle, ledger, actors, timeline, completions, events } = this.parts;
    const [reward, ...others] = this.panels.map(({ chart }) => chart.element);
    this.element = el("div", {}, problems, tiles, el("div", { class: "grid" },
      reward, this.heat.element, idle, ledger, actors, timeline, ...others,
      el("div", { class: "card", id: "other" }, el("h2", {}, "Any metric"), this.choice, this.other.element),
      completions, events));
    this.other.element.className = "";
    this.other.element.hidden = true;
    timeline.className = completions.className = "wide";
  }

  async refresh() {
    const query = `?step=${this.known.last}&layout=${this.known.layout}`;
    const state = DATA.saved ? DATA.saved.states[this.name] : await ask(`api/runs/${encodeURIComponent(this.name)}${query}`);
    this.state = state;
    this.known.take(state.history);
    this.draw();
    if (state.seen !== this.seen) {
      this.seen = state.seen;
      this.drawCompletions(state.completions ?? (await ask(`api/runs/${encodeURIComponent(this.name)}/completions`)));
    }
    if (this.choice.value) await this.drawOther();
  }

  draw() {
    const { summary, problems, is_spread: spread, metrics } = this.state;
    const notes = [...problems, ...(spread ? ["The beginning of this long run is drawn from steps at even distances, not from all."] : [])];
    this.parts.problems.replaceChildren(...(notes.length ? [el("div", { class: "problems" }, ...notes.map((note) => el("p", {}, note)))] : []));
    this.drawTiles(summary);
    for (const { panel, chart } of this.panels) chart.update(this.lines(panel, summary));
    this.heat.update(this.known.ages, this.known.width, this.known.last, `share of tokens by staleness in steps; bound ${short(summary.config.max_staleness)}`);
    this.drawIdle(summary);
    this.drawLedger(summary);
    this.drawActors(summary);
    this.drawTimeline();
    this.drawEvents();
    if (this.choice.options.length !== metrics.length + 1) {
      const chosen = this.choice.value;
      this.choice.replaceChildren(el("option", { value: "" }, `one of ${metrics.length} metrics …`), ...metrics.toSorted().map((name) => el("option", { value: name }, name)));
      this.choice.value = chosen;
    }
    $("other").hidden = !metrics.length || !!DATA.saved;
  }

  lines(panel, summary) {
    const lines = Object.entries(panel.metrics).map(([label, metric], index) => ({ label, index, curve: this.known.curves[metric] }));
    if (panel.metrics.mean === "reward") lines.push({ label: "held-out", index: 1, dots: true, curve: evaluationCurve(summary.evaluations) });
    return lines;
  }

  drawTiles({ state, step, max_steps: steps, last, evaluations, config, hub }) {
    const best = evaluations.filter((e) => Number.isFinite(e.mean_reward)).at(-1);
    const tile = (value, words, share = null) => {
      const bar = share === null ? null : el("div", { class: "bar" }, el("i"));
      if (bar) bar.firstChild.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
      return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, words), bar);
    };
    const now = last ?? {};
    this.parts.tiles.className = "tiles";
    this.parts.tiles.replaceChildren(
      tile(short(step), `of ${short(steps)} steps`, steps ? step / steps : 0),
      tile(short(now.reward), "reward of the newest step"),
      tile(best ? short(best.mean_reward) : "–", best ? `held-out reward at step ${short(best.step)}` : "held-out reward"),
      tile(short(now.tokens_per_second), "tokens a second"),
      tile(short(now["staleness/mean"]), `staleness, bound ${short(config.max_staleness)}`),
      tile(short(now["queue/depth"]), "groups in the queue"),
      tile(short(now["is/ratio_max"]), "largest importance ratio"),
      tile(short(hub.version), "weights version"),
    );
    if (!last) this.parts.tiles.append(el("p", { class: "empty wide" }, `No step yet: ${state}. ${hub.waiting_for ?? ""}`));
  }

  drawIdle({ last, hub }) {
    const curves = this.known.curves, rows = [];
    const recent = (name) => { const values = (curves[name]?.mean ?? []).slice(-20); return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null; };
    for (const [words, metric] of [["learner", "idle/learner"], ["actors", "idle/actor"]]) {
      const share = recent(metric), bar = el("div", { class: "bar" }, el("i"));
      bar.firstChild.style.width = `${100 * Math.min(1, share ?? 0)}%`;
      bar.firstChild.className = "idle-span";
      rows.push(el("span", {}, words), bar, el("span", {}, percent(share)));
    }
    this.parts.idle.className = "card";
    this.parts.idle.replaceChildren(el("h2", {}, "Who is idle, and why"), el("div", { class: "idle" }, ...rows),
      el("p", {}, ...why(recent("idle/learner"), recent("idle/actor"), last, hub)), el("p", { class: "pale" }, "mean of the newest 20 points; an idle actor decodes no sequence"));
  }

  drawLedger({ hub }) {
    const counts = hub.ledger;
    this.parts.ledger.className = "card";
    const words = counts ? (counts.closes ? "every group ever begun is in one place: it closes" : "DOES NOT CLOSE: a defect") : "no ledger.json that can be read";
    this.parts.ledger.replaceChildren(el("h2", {}, "Ledger [groups]"), el("p", { class: "pale" }, words));
    if (counts) this.parts.ledger.append(Drawings.ledger(counts, Math.max(300, this.parts.ledger.clientWidth - 30)));
  }

  drawActors({ hub, alive }) {
    const actors = Object.entries(hub.actors ?? {});
    this.parts.actors.className = "card";
    const rows = actors.map(([name, { version, groups, silent_s: silent }]) => {
      const behind = hub.version - version;
      return el("tr", { class: "row" }, el("td", {}, name), el("td", { class: "n" }, `${version}${behind > 0 ? ` (${behind} behind)` : ""}`), el("td", { class: "n" }, short(groups)), el("td", { class: "n" }, `${short(silent)} s`));
    });
    const heads = ["actor", "version", "groups", "heard"].map((text, i) => el("th", { class: i ? "n" : "" }, text));
    this.parts.actors.replaceChildren(el("h2", {}, "Actors"), actors.length
      ? el("div", { class: "scroll" }, el("table", {}, el("tr", {}, ...heads), ...rows))
      : el("p", { class: "pale" }, alive ? "none has joined" : "none: the run does not live"));
  }

  drawTimeline() {
    const { timeline } = this.state, place = this.parts.timeline;
    place.hidden = !timeline.lanes.length;
    if (place.hidden) return;
    const kinds = el("div", { class: "legend" }, ...Drawings.KINDS.map(([kind, words]) => el("span", {}, el("i", { class: kind === "idle" ? "idle-span" : kind }), words)));
    place.replaceChildren(el("section", { class: "card" }, el("h2", {}, "Stages on a time line"), kinds, Drawings.timeline(timeline, Math.max(280, place.clientWidth - 30))));
  }

  drawEvents() {
    const rows = this.state.events.map(({ kind, step, time, text }) => el("tr", {},
      el("td", { class: "n" }, step === null ? "" : short(step)), el("td", {}, time === null ? "" : new Date(time * 1000).toLocaleTimeString("en-GB")),
      el("td", {}, kind), el("td", {}, text)));
    const heads = ["step", "time", "what", ""].map((text, i) => el("th", { class: i ? "" : "n" }, text));
    this.parts.events.className = "card wide";
    this.parts.events.replaceChildren(el("h2", {}, "Changes and events"), rows.length
      ? el("div", { class: "scroll" }, el("table", {}, el("tr", {}, ...heads), ...rows)) : el("p", { class: "pale" }, "none yet"));
  }

  drawCompletions(groups) {
    const place = this.parts.completions;
    const shown = groups.map(({ step, group, actor, prompt, rollouts, more }) => el("div", { class: "group" },
      el("div", { class: "pale" }, `step ${step}, group ${group}, ${actor}${more ? `, ${more} more completions` : ""}`),
      el("div", { class: "text prompt" }, prompt), ...rollouts.map(rollout)));
    place.replaceChildren(el("section", { class: "card" }, el("h2", {}, "Completions"),
      el("p", { class: "pale" }, "newest first; a colour for each version that sampled the tokens"),
      shown.length ? el("div", { class: "scroll" }, ...shown) : el("p", { class: "pale" }, "none yet")));
  }

  async drawOther() {
    const name = this.choice.value;
    const found = name ? (await ask(`api/runs/${encodeURIComponent(this.name)}/curves?metric=${encodeURIComponent(name)}`)).curves[name] : null;
    this.other.update(found ? [{ label: name, index: 0, curve: found }] : []);
  }
}

function rollout({ pieces, spans, scores, advantage, ended, tokens }) {
  const text = el("div", { class: "text" }, ...pieces.map(([version, part]) => el("span", { class: `v${version % 6}`, title: `version ${version}` }, part)));
  const numbers = Object.entries(scores).map(([name, score]) => `${name} ${score === null ? "failed" : short(score)}`);
  if (advantage !== null) numbers.push(`advantage ${short(advantage)}`);
  const versions = spans.length > 1 ? spans.map(([version, count]) => `v${version}: ${count}`).join(", ") : `v${spans[0]?.[0] ?? "?"}`;
  return el("div", { class: "rollout" }, text, el("span", { class: "pale" }, `${numbers.join(" · ")} · ${tokens} tokens (${versions})${ended === "stop" ? "" : ` · ${ended}`}`));
}

function why(learner, actors, last, hub) {
  if (hub.waiting_for) return [`The learner waits: ${hub.waiting_for}.`];
  if (!last || learner === null) return ["No step has been made."];
  if (learner > 0.5 && (actors ?? 0) < 0.5) return ["The learner waits for rollouts: generation or scoring is the slower part."];
  if ((actors ?? 0) > 0.5 && learner < 0.5) return ["The actors wait for credits: the learner is the slower part, or the staleness bound is tight."];
  if (learner > 0.5) return ["Both wait: scoring takes the time, or the staleness bound lets only one of them work."];
  return ["Neither waits for most of its time."];
}

// ---- several runs

class ListView {
  constructor() {
    this.chosen = null;
    this.known = new Map();
    this.charts = DATA.panels.map((panel) => ({ metric: Object.values(panel.metrics)[0], chart: Charts.plot(`${panel.title}: ${Object.keys(panel.metrics)[0]}`, { ...panel, noisy: true, bare: true }) }));
    this.evaluated = Charts.plot("Held-out reward", {});
    this.table = el("div", { class: "scroll" });
    const grid = el("div", { class: "grid", id: "compared" }, this.evaluated.element, ...this.charts.map(({ chart }) => chart.element));
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
    const heads = ["", "run", "state", "step", "reward", "held-out", "tokens/s", "staleness", "idle: learner", "actors"];
    const colours = [...this.chosen];
    const rows = found.runs.map(({ name, state, alive, step, max_steps: steps, last, evaluation, ended }) => {
      const box = el("input", { type: "checkbox", "aria-label": `compare ${name}`, onchange: () => { this.chosen[box.checked ? "add" : "delete"](name); void poll(); } });
      box.checked = this.chosen.has(name);
      box.disabled = !box.checked && this.chosen.size >= MAX_COMPARED;
      const mark = el("i"), at = colours.indexOf(name);
      if (at >= 0) mark.style.background = `var(--c${at % 7})`;
      const numbers = [`${short(step)} / ${short(steps)}`, short(last.reward), evaluation ? short(evaluation.mean_reward) : "–", short(last.tokens_per_second),
        short(last["staleness/mean"]), percent(last["idle/learner"]), percent(last["idle/actor"])];
      return el("tr", {}, el("td", {}, el("span", { class: "mark" }, box, mark)), el("td", {}, el("a", { href: `#${encodeURIComponent(name)}` }, name)),
        el("td", {}, badge(state, alive, ended)), ...numbers.map((text) => el("td", { class: "n" }, text)));
    });
    this.table.replaceChildren(el("table", {}, el("tr", {}, ...heads.map((text, i) => el("th", { class: i > 2 ? "n" : "" }, text))), ...rows));
    await this.compare(found);
  }

  async compare(found) {
    const names = [...this.chosen].filter((name) => found.runs.some((run) => run.name === name)), evaluations = {};
    await Promise.all(names.map(async (name) => {
      if (!this.known.has(name)) this.known.set(name, new Curves());
      const curves = this.known.get(name);
      const state = DATA.saved ? DATA.saved.states[name] : await ask(`api/runs/${encodeURIComponent(name)}?step=${curves.last}&layout=${curves.layout}`);
      curves.take(state.history);
      evaluations[name] = evaluationCurve(state.summary.evaluations);
    }));
    const index = (name) => [...this.chosen].indexOf(name);
    for (const { metric, chart } of this.charts) chart.update(names.map((name) => ({ label: name, index: index(name), curve: this.known.get(name).curves[metric] })));
    this.evaluated.update(names.map((name) => ({ label: name, index: index(name), dots: true, curve: evaluations[name] })));
  }
}

// ---- what is open

function badge(state, alive, ended) {
  return el("span", { class: `badge ${alive ? "lives" : ended?.code ? "failed" : ""}`, title: ended?.reason ?? "" }, state);
}

let view = null, one = false, busy = false, again = false;

function show(found) {
  const named = decodeURIComponent(location.hash.slice(1)), open = found.one ? found.runs[0]?.name : found.runs.find(({ name }) => name === named)?.name;
  one = found.one;
  if (!view || (open ?? null) !== (view.name ?? null)) {
    view = open ? new RunView(open) : new ListView();
    $("main").replaceChildren(view.element);
  }
  $("back").replaceChildren(...(open && !one ? [el("a", { href: "#" }, "all runs")] : []));
  $("title").textContent = open ?? "Runs";
  document.title = open ? `${open} · async-rlhf` : "async-rlhf";
}

function stand(text, run = null) {
  const end = run?.ended?.reason ? ` ${run.ended.reason} ·` : "";
  $("standing").replaceChildren(...(run ? [badge(run.state, run.alive, run.ended), end] : []), ` ${text}`);
}

async function poll() {
  if (busy) { again = true; return; }
  busy = true;
  try {
    const found = await listing();
    show(found);
    await view.refresh(found);
    const when = DATA.saved ? `as it was on ${new Date(DATA.saved.time * 1000).toLocaleString("en-GB")}` : `read at ${new Date().toLocaleTimeString("en-GB")}`;
    stand(when, found.runs.find(({ name }) => name === view.name));
    document.body.dataset.ready = "yes";
  } catch (error) {
    stand(`not up to date: ${error.message}`);
  } finally {
    busy = false;
    if (again) { again = false; void poll(); }
  }
}

window.addEventListener("hashchange", () => void poll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => void poll());
void poll();
if (!DATA.saved) setInterval(() => { if (!document.hidden) void poll(); }, PERIOD_MS);
