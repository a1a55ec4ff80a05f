"use strict";
// The ledger as a flow, and the stages on a time line. Names come from a run and are set as text.

const Drawings = (() => {
  function svg(kind, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const PLACES = ["trained", "in_flight", "queued", "leased", "stale", "filtered", "failed", "quarantined"];

  // From what was credited to where it is; as thick as its share, and never too thin to see.
  function ledger(counts, width) {
    const row = 18,
      height = PLACES.length * row + 64,
      total = counts.credited || 0;
    const left = 92,
      right = Math.max(left + 60, width - 140);
    const thick = (n) => (n > 0 ? Math.max(2, (n / total) * 64) : 0);
    const drawn = PLACES.map((place) => ({ place, n: counts[place] || 0, thick: thick(counts[place] || 0) }));
    const sum = drawn.reduce((all, { thick }) => all + thick, 0);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    picture.append(svg("title", {}, `${total} groups credited`));
    let from = (height - sum) / 2,
      to = (height - sum - PLACES.length * row + 8) / 2;
    const spare = row - 1;
    picture.append(svg("rect", { class: "node p-credited", x: left - 8, y: from, width: 8, height: Math.max(2, sum) }));
    picture.append(svg("text", { x: left - 16, y: height / 2 - 4, "text-anchor": "end" }, "credited"));
    picture.append(
      svg("text", { x: left - 16, y: height / 2 + 12, "text-anchor": "end", class: "pale" }, total.toLocaleString("en")),
    );
    for (const { place, n, thick } of drawn) {
      const y = to + spare / 2,
        middle = (left + right) / 2;
      if (n > 0) {
        const band = `M${left},${from} C${middle},${from} ${middle},${y} ${right},${y} V${y + thick} C${middle},${y + thick} ${middle},${from + thick} ${left},${from + thick} Z`;
        picture.append(svg("path", { class: `flow p-${place}`, d: band }));
        picture.append(svg("rect", { class: `node p-${place}`, x: right, y, width: 8, height: thick }));
      }
      const words = svg(
        "text",
        { x: right + 14, y: y + thick / 2 + 4, class: n ? "" : "pale" },
        `${n.toLocaleString("en")} ${place.replace("_", " ")}`,
      );
      picture.append(words);
      from += thick;
      to += thick + spare;
    }
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
      picture.append(
        svg(
          "text",
          { class: "pale", x, y: height - 5, "text-anchor": anchor },
          i === parts ? "newest step" : `−${short(ago)} s`,
        ),
      );
    }
    let before = "";
    lanes.forEach(({ name, spans }, i) => {
      const top = i * (row + lead) + lead;
      if (name !== before)
        picture.append(svg("text", { class: "pale", x: 0, y: label ? top + 14 : top - 3 }, name.slice(0, 22)));
      before = name;
      for (const [kind, words, from, to] of spans) {
        const start = Math.max(from, began),
          x = label + (start - began) * across;
        const box = svg("rect", {
          class: kind === "idle" ? "idle-span" : kind,
          x,
          y: top + 2,
          width: Math.max(0.6, (Math.min(to, ended) - start) * across),
          height: row - 5,
        });
        box.append(svg("title", {}, `${words}: ${(to - from).toFixed(3)} s`));
        picture.append(box);
      }
    });
    return picture;
  }

  return { ledger, timeline, KINDS };
})();
