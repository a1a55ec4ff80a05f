"use strict";
// One run: its numbers, curves, drawings, completions and events.

// Where a group may be, and its colour.
const GIVEN_UP = { stale: 1, filtered: 3, failed: 1, quarantined: 1 };
const PLACES = Object.entries({ trained: 2, in_flight: 0, queued: 5, leased: 4, ...GIVEN_UP });

class RunView {
  constructor(name) {
    this.name = name;
    this.known = new Curves();
    this.seen = -1;
    this.panels = DATA.panels.map((panel) => ({ panel, chart: Charts.plot(panel.title, panel) }));
    this.other = Charts.plot("", { noisy: true });
    this.choice = el("select", { "aria-label": "metric", onchange: () => this.drawOther() });
    const part = (id, kind) => (this.parts[id] = el("div", { id, class: kind }));
    this.parts = {};
    const [reward, ...others] = this.panels.map(({ chart }) => chart.element);
    this.element = el(
      "div",
      {},
      part("problems", ""),
      part("tiles", ""),
      el(
        "div",
        { class: "grid" },
        reward,
        ...["ages", "idle", "ledger", "actors"].map((id) => part(id, "card")),
        part("timeline", "card wide"),
        ...others,
        el("div", { class: "card", id: "other" }, el("h2", {}, "Any metric"), this.choice, this.other.element),
        ...["completions", "events"].map((id) => part(id, "card wide")),
      ),
    );
    this.other.element.hidden = true;
  }

  fill(id, title, ...children) {
    this.parts[id].replaceChildren(el("h2", {}, title), ...children);
  }

  async refresh() {
    const query = `?step=${this.known.last}&layout=${this.known.layout}`;
    const state = await ask(`api/runs/${encodeURIComponent(this.name)}${query}`);
    this.state = state;
    this.known.take(state.history);
    this.draw();
    if (state.seen !== this.seen) {
      this.seen = state.seen;
      this.drawCompletions(await ask(`api/runs/${encodeURIComponent(this.name)}/completions`));
    }
    if (this.choice.value) await this.drawOther();
  }

  draw() {
    const { summary, problems, is_spread: spread, metrics } = this.state;
    const notes = [
      ...problems,
      ...(summary.hub.spool?.problem ? [summary.hub.spool.problem] : []),
      ...(spread ? ["The beginning of this long run is drawn from steps at even distances, not from all."] : []),
    ];
    this.parts.problems.replaceChildren(
      ...(notes.length ? [el("div", { class: "problems" }, ...notes.map((note) => el("p", {}, note)))] : []),
    );
    this.drawTiles(summary);
    for (const { panel, chart } of this.panels) chart.update(this.lines(panel, summary), this.state.changed);
    this.drawAges(summary);
    this.drawIdle(summary);
    this.drawLedger(summary);
    this.drawActors(summary);
    this.drawTimeline();
    this.drawEvents();
    if (this.choice.options.length !== metrics.length + 1) {
      const chosen = this.choice.value;
      this.choice.replaceChildren(
        el("option", { value: "" }, `one of ${metrics.length} metrics …`),
        ...metrics.toSorted().map((name) => el("option", { value: name }, name)),
      );
      this.choice.value = chosen;
    }
    $("other").hidden = !metrics.length;
  }

  lines(panel, summary) {
    const lines = Object.entries(panel.metrics).map(([label, metric], index) => ({
      label,
      index,
      curve: this.known.curves[metric],
    }));
    if (panel.metrics.mean === "reward") {
      const { evaluations } = summary;
      lines.push({ label: "held-out", index: 1, dots: true, curve: evaluationCurve(evaluations) });
      const means = evaluations.flatMap((e) => Object.entries(e.rewards ?? {}));
      const names = [...new Set(means.filter(([, mean]) => Number.isFinite(mean)).map(([name]) => name))];
      for (const [i, name] of (names.length > 1 ? names : []).entries()) {
        const curve = evaluationCurve(evaluations, (e) => e.rewards?.[name]);
        lines.push({ label: `held-out ${name}`, index: 2 + i, dots: true, curve });
      }
    }
    return lines;
  }

  drawTiles({ state, step, max_steps: steps, last, evaluations, config, hub }) {
    const best = evaluations.filter((e) => Number.isFinite(e.mean_reward)).at(-1);
    const tile = (value, words, share = null) => {
      return el("div", { class: "tile" }, el("b", {}, value), el("span", {}, words), share === null ? null : bar(share));
    };
    const now = last ?? {};
    const tiles = el(
      "div",
      { class: "tiles" },
      tile(short(step), steps ? `of ${short(steps)} steps` : "steps, without end", steps ? step / steps : 0),
      tile(short(now.reward), "reward of the newest step"),
      tile(best ? short(best.mean_reward) : "–", best ? `held-out reward at step ${short(best.step)}` : "held-out reward"),
      tile(short(now.tokens_per_second), "tokens a second"),
      tile(short(now["staleness/mean"]), `staleness, bound ${short(config.max_staleness)}`),
      tile(short(now["queue/depth"]), "groups in the queue"),
      tile(short(now["is/ratio_max"]), "largest importance ratio"),
      tile(short(hub.version), "weights version"),
    );
    const none = last ? null : el("p", { class: "empty" }, `No step yet: ${state}. ${hub.waiting_for ?? ""}`);
    this.parts.tiles.replaceChildren(tiles, none ?? "");
  }

  drawAges({ config }) {
    const { ages, width, last } = this.known,
      place = this.parts.ages;
    place.hidden = !ages.step.length;
    if (place.hidden) return;
    const words = `share of tokens by staleness in steps; bound ${short(config.max_staleness)}`;
    const drawn = Drawings.ages(ages, width, last, Math.max(280, place.clientWidth - 30));
    this.fill("ages", "Staleness of the tokens", el("div", { class: "legend" }, words), drawn);
  }

  drawIdle({ last, hub }) {
    const curves = this.known.curves;
    const recent = (name) => {
      const values = (curves[name]?.mean ?? []).slice(-20);
      return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
    };
    const [learner, actors] = ["idle/learner", "idle/actor"].map(recent);
    const rows = Object.entries({ learner, actors }).map(([words, share]) => [words, share ?? 0, percent(share), 4]);
    this.fill(
      "idle",
      "Who is idle, and why",
      bars(rows),
      el("p", {}, ...why(learner, actors, last, hub)),
      el("p", { class: "pale" }, "mean of the newest 20 points; an idle actor decodes no sequence"),
      hub.spool ? el("p", {}, ofSpool(hub.spool)) : "",
      hub.curriculum ? el("p", {}, ofCurriculum(hub.curriculum)) : "",
    );
  }

  drawLedger({ hub }) {
    const { credited, closes, ...counts } = hub.ledger ?? {};
    const words = hub.ledger
      ? `${short(credited)} groups were credited: ${closes ? "each is in one place, it closes" : "it DOES NOT CLOSE, a defect"}`
      : "no ledger.json that can be read";
    const rows = (hub.ledger ? PLACES : []).map(([place, colour]) => {
      const count = counts[place] || 0;
      const share = count && Math.max(0.01, count / credited); // never too thin to see
      return [place.replace("_", " "), share, count.toLocaleString("en"), colour];
    });
    this.fill("ledger", "Ledger [groups]", el("p", { class: "pale" }, words), bars(rows));
  }

  drawActors({ hub, alive, restarts }) {
    const actors = Object.entries(hub.actors ?? {});
    const rows = actors.map(([name, { version, groups, silent_s: silent }]) => {
      const behind = hub.version - version;
      return [name, `${version}${behind > 0 ? ` (${behind} behind)` : ""}`, short(groups), `${short(silent)} s`];
    });
    const again = Object.entries(restarts ?? {}).map(([role, count]) => `${role} ${short(count)}`);
    const heads = ["actor", "version", "groups", "last message"];
    this.fill(
      "actors",
      "Actors",
      actors.length
        ? el("div", { class: "scroll" }, table(heads, rows, Boolean))
        : el("p", { class: "pale" }, alive ? "none has joined" : "none: the run has ended"),
      hub.fence > 1 ? el("p", {}, `The learner has started ${short(hub.fence)} times.`) : "",
      again.length ? el("p", {}, `Started again: ${again.join(", ")}.`) : "",
    );
  }

  drawTimeline() {
    const { timeline } = this.state,
      place = this.parts.timeline;
    place.hidden = !timeline.lanes.length;
    if (place.hidden) return;
    const kinds = el(
      "div",
      { class: "legend" },
      ...Drawings.KINDS.map(([kind, words]) => el("span", {}, el("i", { class: kind }), words)),
    );
    this.fill("timeline", "Stages on a time line", kinds, Drawings.timeline(timeline, Math.max(280, place.clientWidth - 30)));
  }

  drawEvents() {
    const rows = this.state.events.map(({ kind, step, time, text }) => [
      step === null ? "" : short(step),
      time === null ? "" : new Date(time * 1000).toLocaleTimeString("en-GB"),
      kind,
      text,
    ]);
    this.fill(
      "events",
      "Changes and events",
      this.state.changed.length ? el("p", { class: "pale" }, "a dotted upright line in each curve: something was changed") : "",
      rows.length
        ? el("div", { class: "scroll" }, table(["step", "time", "what", ""], rows, (column) => column === 0))
        : el("p", { class: "pale" }, "none yet"),
    );
  }

  drawCompletions(groups) {
    const shown = groups.map(({ step, group, actor, prompt, images, rollouts, more }) =>
      el(
        "div",
        { class: "group" },
        el("div", { class: "pale" }, `step ${step}, group ${group}, ${actor}${more ? `, ${more} more completions` : ""}`),
        el("div", { class: "text prompt" }, prompt),
        ...images.map(({ name, source }) => (source ? el("img", { src: source, alt: name, title: name }) : el("div", { class: "pale" }, `image ${name}`))),
        ...rollouts.map(rollout),
      ),
    );
    const given = groups.some(isEpisode) ? "; without a colour: read, not trained on" : "";
    this.fill(
      "completions",
      "Completions",
      el("p", { class: "pale" }, "newest first; a colour for each version that sampled the tokens", given),
      shown.length ? el("div", { class: "scroll" }, ...shown) : el("p", { class: "pale" }, "none yet"),
    );
  }

  async drawOther() {
    const name = this.choice.value;
    const found = name
      ? (await ask(`api/runs/${encodeURIComponent(this.name)}/curves?metric=${encodeURIComponent(name)}`)).curves[name]
      : null;
    this.other.update(found ? [{ label: name, index: 0, curve: found }] : [], this.state.changed);
  }
}

const isEpisode = ({ rollouts }) => rollouts.some(({ spans }) => spans.some(([version]) => version === null));

function rollout({ pieces, anew, spans, scores, advantage, ended, tokens }) {
  const heads = anew.length ? [0, ...anew] : [];
  const text = el(
    "div",
    { class: "text" },
    ...pieces.flatMap(([version, part], at) => [
      heads.includes(at) ? el("div", { class: "row" }, `row ${heads.indexOf(at) + 1}`) : "",
      version === null
        ? el("span", { class: "observed", title: "read" }, part)
        : el("span", { class: `v${version % 6}`, title: `version ${version}` }, part),
    ]),
  );
  const numbers = Object.entries(scores).map(([name, score]) => `${name} ${score === null ? "failed" : short(score)}`);
  if (advantage !== null) numbers.push(`advantage ${short(advantage)}`);
  const versions =
    spans.length > 1
      ? spans.map(([version, count]) => `${version === null ? "read" : `v${version}`}: ${count}`).join(", ")
      : `v${spans[0]?.[0] ?? "?"}`;
  return el(
    "div",
    { class: "rollout" },
    text,
    el(
      "span",
      { class: "pale" },
      `${numbers.join(" · ")} · ${tokens} tokens (${versions})${ended === "stop" ? "" : ` · ${ended}`}`,
    ),
  );
}

function ofSpool({ rows, rejected, ended }) {
  const aside = rejected ? `, ${short(rejected)} lines were set aside` : "";
  return `Spool: ${short(rows)} rows have come${aside}${ended ? ", no more will" : ""}.`;
}

function ofCurriculum({ places, new: fresh, hard, retired, pass_rate: rate }) {
  const counts = `${short(places)} prompts, ${short(fresh)} not used yet, ${short(hard)} hard, ${short(retired)} retired`;
  return `Curriculum: ${counts}; mean pass rate ${short(rate)}.`;
}

function why(learner, actors, last, hub) {
  if (hub.waiting_for) return [`The learner waits: ${hub.waiting_for}.`];
  if (!last || learner === null) return ["No step has been made."];
  if (learner > 0.5 && (actors ?? 0) < 0.5)
    return ["The learner waits for rollouts: generation or scoring is the slower part."];
  if ((actors ?? 0) > 0.5 && learner < 0.5)
    return ["The actors wait for credits: the learner is the slower part, or the staleness bound is tight."];
  if (learner > 0.5) return ["Both wait: scoring takes the time, or the staleness bound lets only one of them work."];
  return ["Neither waits for most of its time."];
}
