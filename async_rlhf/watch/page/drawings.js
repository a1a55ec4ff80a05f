"use strict";
// The stages of a run on a time line. Names come from a run and are set as text.

const Drawings = (() => {
  function svg(kind, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
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
          class: kind,
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

  return { timeline, KINDS };
})();
