"use strict";
// The ages of tokens as a map, and the stages of a run on a time line. Names come from a run and are set as text.

const Drawings = (() => {
  function svg(kind, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const words = (x, y, anchor, text) => svg("text", { class: "pale", x, y, "text-anchor": anchor }, text);

  // Share of tokens by staleness (upwards) and step (to the right). ages: {step: [], tokens: [{age: count}]}, steps: in each.
  function ages({ step, tokens }, steps, newest, width) {
    const height = 206,
      left = 34,
      foot = 36;
    const rows = 1 + Math.max(1, ...tokens.flatMap((counts) => Object.keys(counts).map(Number))),
      high = (height - foot) / rows;
    const first = step[0],
      end = Math.min(step.at(-1) + steps, newest + 1),
      across = (width - left) / (end - first);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    step.forEach((at, i) => {
      const all = Object.values(tokens[i]).reduce((a, b) => a + b, 0);
      for (const [age, count] of Object.entries(tokens[i])) {
        const place = { x: left + (at - first) * across, y: height - foot - (Number(age) + 1) * high };
        const size = { width: Math.max(1, steps * across + 0.5), height: Math.max(0.5, high - 1) };
        picture.append(svg("rect", { class: "train", "fill-opacity": 0.08 + (0.92 * count) / all, ...place, ...size }));
      }
    });
    for (let age = 0; age < rows; age += Math.ceil(rows / 8))
      picture.append(words(left - 6, height - foot - (age + 0.5) * high + 4, "end", String(age)));
    picture.append(
      words(left, height - 20, "start", short(first)),
      words(width, height - 20, "end", short(end - 1)),
      words(left + (width - left) / 2, height - 4, "middle", "step"),
    );
    return picture;
  }

  const KINDS = [
    ["train", "trains"],
    ["wait", "waits"],
    ["generate", "generates"],
    ["score", "scores"],
    ["idle", "idle engine"],
    ["adopt", "adopts weights"],
  ];

  function timeline({ began, ended, lanes }, width) {
    const row = 20,
      label = width < 520 ? 0 : 128,
      lead = label ? 0 : 15,
      foot = 22;
    const height = lanes.length * (row + lead) + foot;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    const across = (width - label) / (ended - began || 1);
    const parts = label ? 4 : 2;
    for (let i = 0; i <= parts; i++) {
      const x = label + ((width - label) * i) / parts,
        ago = ((ended - began) * (parts - i)) / parts;
      picture.append(svg("line", { class: "rule", x1: x, x2: x, y1: 0, y2: height - foot + 4 }));
      const anchor = i === 0 ? "start" : i === parts ? "end" : "middle";
      picture.append(words(x, height - 5, anchor, i === parts ? "newest step" : `−${short(ago)} s`));
    }
    let before = "";
    lanes.forEach(({ name, spans }, i) => {
      const top = i * (row + lead) + lead;
      if (name !== before) picture.append(words(0, label ? top + 14 : top - 3, "start", name.slice(0, 22)));
      before = name;
      for (const [kind, about, from, to] of spans) {
        const start = Math.max(from, began),
          x = label + (start - began) * across;
        const box = svg("rect", {
          class: kind,
          x,
          y: top + 2,
          width: Math.max(0.6, (Math.min(to, ended) - start) * across),
          height: row - 5,
        });
        box.append(svg("title", {}, `${about}: ${(to - from).toFixed(3)} s`));
        picture.append(box);
      }
    });
    return picture;
  }

  return { ages, timeline, KINDS };
})();
