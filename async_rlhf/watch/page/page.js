"use strict";
// What is open, asked for every two seconds.

const PERIOD_MS = 2000;
let view = null,
  one = false,
  busy = false,
  again = false;

function show(found) {
  const named = decodeURIComponent(location.hash.slice(1)),
    open = found.one ? found.runs[0]?.name : found.runs.find(({ name }) => name === named)?.name;
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
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    const found = await ask("api/runs");
    show(found);
    await view.refresh(found);
    stand(
      `read at ${new Date().toLocaleTimeString("en-GB")}`,
      found.runs.find(({ name }) => name === view.name),
    );
    document.body.dataset.ready = "yes";
  } catch (error) {
    stand(`not up to date: ${error.message}`);
  } finally {
    busy = false;
    if (again) {
      again = false;
      void poll();
    }
  }
}

window.addEventListener("hashchange", () => void poll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => void poll());
void poll();
setInterval(() => {
  if (!document.hidden) void poll();
}, PERIOD_MS);
