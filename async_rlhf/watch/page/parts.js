"use strict";
// What every view is made of: elements, requests, and what is known of a run's curves.
// Names, completions and messages come from a run and may be anything: they are set as text, never as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const ROOT = location.origin + location.pathname.replace(/[^/]*$/, "");
const $ = (id) => document.getElementById(id);
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.095 ? 1 : 0)} %`);

function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size !== 0 && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

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

function bar(share, colour = 0) {
  const filled = el("i");
  filled.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  filled.style.background = `var(--c${colour})`;
  return el("div", { class: "bar" }, filled);
}

// rows: [words, share, number, colour].
function bars(rows) {
  const cells = rows.map(([words, share, number, colour]) => [el("span", {}, words), bar(share, colour), el("span", {}, number)]);
  return el("div", { class: "bars" }, ...cells.flat());
}

// rows: of cells; isNumber: of a column.
function table(heads, rows, isNumber) {
  const row = (tag, cells) =>
    cells.map((cell, i) => el(tag, isNumber(i) ? { class: "n", "data-head": heads[i] } : {}, cell));
  const lines = [row("th", heads), ...rows.map((cells) => row("td", cells))];
  return el("table", {}, ...lines.map((cells) => el("tr", {}, ...cells)));
}

async function ask(path) {
  const answer = await fetch(ROOT + path, { signal: AbortSignal.timeout(15000) });
  if (!answer.ok)
    throw new Error(answer.status === 404 ? "this run is no longer there" : `the server answers ${answer.status}`);
  return answer.json();
}

class Curves {
  // What is known of the curves of a run; the server tells what has changed.
  constructor() {
    this.layout = "";
    this.last = 0;
    this.width = 1;
    this.curves = {};
    this.ages = { step: [], tokens: [] };
  }

  take({ layout, width, from, last, curves, ages }) {
    if (layout !== this.layout) {
      this.curves = {};
      this.ages = { step: [], tokens: [] };
    }
    for (const [name, curve] of Object.entries(curves)) this.curves[name] = joined(this.curves[name], curve, from);
    this.ages = joined(this.ages, ages, from);
    [this.layout, this.width, this.last] = [layout, width, Math.max(last, 0)];
  }
}

function joined(known, added, from) {
  if (!known) return added;
  const keep = known.step.findIndex((step) => step >= from),
    end = keep < 0 ? known.step.length : keep;
  return Object.fromEntries(Object.entries(added).map(([key, values]) => [key, [...known[key].slice(0, end), ...values]]));
}

function evaluationCurve(evaluations, value = (e) => e.mean_reward) {
  const good = evaluations.filter((e) => Number.isInteger(e.step) && Number.isFinite(value(e)));
  const latest = new Map(good.map((e) => [e.step, value(e)]));
  const steps = [...latest.keys()].sort((a, b) => a - b);
  return { step: steps, mean: steps.map((step) => latest.get(step)) };
}

function badge(state, alive, ended) {
  return el("span", { class: `badge ${alive ? "lives" : ended?.code ? "failed" : ""}`, title: ended?.reason ?? "" }, state);
}
