"use strict";
// Curves. What is drawn is numbers; every text is set as text.

const Charts = (() => {
  const HEIGHT = 206;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (i) => css(`--c${i % 7}`);
  const axis = (size) => ({
    stroke: css("--pale"),
    grid: { stroke: css("--line"), width: 1 },
    ticks: { show: false },
    size,
    font: "11px system-ui",
  });

  // Tick marks with as many places as tell them apart.
  function marks(u, ticks) {
    const apart = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
    let places = 0;
    while (places <= 6 && Math.abs(Math.round(apart * 10 ** places) - apart * 10 ** places) > 1e-6 * 10 ** places * apart)
      places++;
    return ticks.map((tick) => {
      if (tick === 0) return "0";
      return places > 6 || Math.abs(tick) >= 1e6
        ? tick.toExponential(1)
        : tick.toLocaleString("en", { maximumFractionDigits: places });
    });
  }

  // As wide as the longest mark beside it, which is known when it is drawn for the first time.
  function room(u, ticks, index, cycle) {
    if (cycle > 1) return u.axes[index]._size;
    const longest = Math.max(0, ...(ticks ?? []).map((text) => text.length));
    return 14 + Math.ceil(6.5 * longest);
  }

  // A mean over neighbours, so that a trend is seen among single steps.
  function smooth(values) {
    const half = Math.floor(values.length / 40);
    if (half < 1) return values;
    return values.map((_, i) => {
      const near = values.slice(Math.max(0, i - half), i + half + 1).filter((v) => v !== null);
      return near.length ? near.reduce((a, b) => a + b, 0) / near.length : null;
    });
  }

  // bare: without the single steps behind the mean. lines: [{label, index, curve: {step, mean, min?, max?}, dots?, dash?}], index: of the colour. Gives {element, update(lines, changed)}, changed: steps that have an upright line.
  function plot(title, { noisy = false, floor = null, ceiling = null, bare = false } = {}) {
    const legend = el("div", { class: "legend" }),
      place = el("div", { class: "plot" });
    const element = title ? card(title, legend, place) : el("div", {}, legend, place);
    let chart = null,
      shape = "",
      shown = [],
      told = [],
      marked = [];

    const isWide = (curve) => !bare && !!curve.min && curve.min.some((low, i) => low !== curve.max[i]);

    function tables(lines) {
      return lines.map(({ curve, dots }) => {
        if (dots) return [curve.step, curve.mean];
        const wide = isWide(curve);
        const raw = noisy && !wide ? smooth(curve.mean) : curve.mean;
        const [low, high] = bare ? [raw, raw] : wide ? [curve.min, curve.max] : [curve.mean, curve.mean];
        return [curve.step, low, high, raw];
      });
    }

    function options(lines) {
      const series = [{}],
        bands = [];
      for (const { index, dots, dash, curve } of lines) {
        const stroke = colour(index);
        if (dots) {
          series.push({
            stroke,
            width: 1,
            dash: [3, 4],
            spanGaps: true,
            points: { show: true, size: 7, fill: css("--card"), width: 2 },
          });
          continue;
        }
        const pale = { stroke: stroke + (isWide(curve) ? "00" : "55"), width: 1, points: { show: false }, spanGaps: true };
        series.push(
          pale,
          { ...pale },
          { stroke, width: 1.6, dash, points: { show: lines[0].curve.step.length < 3 }, spanGaps: true },
        );
        bands.push({ series: [series.length - 2, series.length - 3], fill: stroke + "2a" });
      }
      const range = (u, low, high) => {
        if (low === null) return [floor ?? 0, ceiling ?? 1];
        const least = floor === null ? low : Math.min(low, floor),
          most = ceiling === null ? high : Math.max(high, ceiling);
        if (most - least <= 1e-9 * Math.abs(most))
          return most === 0 ? [0, 1] : [least - Math.abs(least) / 10, most + Math.abs(most) / 10];
        const room = (most - least) * 0.06;
        return [least === floor ? least : least - room, most + room];
      };
      return {
        width: place.clientWidth || 320,
        height: HEIGHT,
        series,
        bands,
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        scales: { x: { time: false }, y: { range } },
        axes: [
          { ...axis(26), values: marks, space: 60, label: "step", labelSize: 16, labelFont: "11px system-ui", labelGap: 0 },
          { ...axis(room), values: marks },
        ],
        hooks: { setCursor: [(u) => tell(u.cursor.idx)], drawAxes: [mark] },
      };
    }

    // Where something was changed while the run went on.
    function mark(u) {
      const { left, top, width, height } = u.bbox;
      u.ctx.save();
      u.ctx.strokeStyle = css("--pale");
      u.ctx.lineWidth = devicePixelRatio;
      u.ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const step of marked) {
        const x = Math.round(u.valToPos(step, "x", true));
        if (x < left || x > left + width) continue;
        u.ctx.beginPath();
        u.ctx.moveTo(x, top);
        u.ctx.lineTo(x, top + height);
        u.ctx.stroke();
      }
      u.ctx.restore();
    }

    function tell(at) {
      const step = at === null || at === undefined ? null : chart.data[0][at];
      shown.forEach(({ curve }, i) => {
        const value = step === null ? curve.mean.at(-1) : curve.mean[curve.step.indexOf(step)];
        told[i].textContent = ` ${short(value)}`;
      });
    }

    function draw(lines) {
      // What is named first is drawn last, and single points above everything.
      const order = lines.toReversed().sort((one, other) => Number(!!one.dots) - Number(!!other.dots));
      const joined = uPlot.join(tables(order));
      const now = lines.map((l) => `${l.label}|${l.index}|${isWide(l.curve)}`).join() + css("--card");
      shown = lines;
      if (chart && now === shape) {
        chart.setData(joined);
        tell(null);
        return;
      }
      chart?.destroy();
      shape = now;
      legend.replaceChildren(
        ...lines.map(({ label, index }, i) => {
          const mark = el("i");
          mark.style.background = colour(index);
          told[i] = el("b");
          return el("span", {}, mark, label, told[i]);
        }),
      );
      chart = new uPlot(options(order), joined, place);
      tell(null);
    }

    new ResizeObserver(() => chart?.setSize({ width: place.clientWidth, height: HEIGHT })).observe(place);
    return {
      element,
      update(lines, changed = []) {
        const drawn = lines.filter((l) => l.curve && l.curve.step.length);
        marked = changed;
        element.hidden = !drawn.length;
        if (drawn.length) draw(drawn);
      },
    };
  }

  return { plot };
})();
