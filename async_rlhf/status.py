"""Where a run stands: live from its hub and its scorer, or from what it left behind."""

from __future__ import annotations

from typing import Any

from actors.scorer.client import ask_alive
from async_rlhf.display import held_out, line
from async_rlhf.run_dir import RunDir
from buffers.clients.control import control
from buffers.errors import DeadlineError
from buffers.transport.link import connector

_PATIENCE_S = 3.0
_PLACES = ("trained", "queued", "in_flight", "leased", "stale", "filtered", "failed", "quarantined")


def read(run: RunDir) -> dict[str, Any]:
    """As plain values, ready for JSON."""
    metrics, config = run.read_metrics(), run.config()
    hub, live = run.read_ledger(), run.live() if run.is_alive() else {}
    if live:  # read once: the run may end while it is asked
        try:
            connect = connector(config.security.directory)
            with control(live["address"], timeout_s=_PATIENCE_S, connect=connect) as asked:
                hub = asked.status()
        except DeadlineError as error:
            hub["state"] = f"the hub does not answer: {error}"
    done = bool(metrics) and metrics[-1]["step"] >= config.max_steps
    state = hub.get("state", "starting") if live else ("finished" if done else "stopped")
    return {
        "run_dir": str(run.path),
        "state": state,
        "step": metrics[-1]["step"] if metrics else 0,
        "max_steps": config.max_steps,
        "hub": hub,
        "scorer": _scorer(live["scorer"]) if live else {},
        "last": metrics[-1] if metrics else None,
        "evaluations": run.read_evaluations(),
    }


def lines(run: RunDir, found: dict[str, Any]) -> list[str]:
    """What `read` found, as a person reads it."""
    ledger = found["hub"].get("ledger", {})
    told = [f"{run.path}: {found['state']}, step {found['step']} of {found['max_steps']}"]
    if ledger:
        shown = " + ".join(f"{ledger[place]} {place}" for place in _PLACES)
        told.append(f"ledger: {ledger['credited']} credited = {shown} ({'closes' if ledger['closes'] else 'DOES NOT CLOSE'})")
    for name, actor in found["hub"].get("actors", {}).items():
        told.append(f"{name}: version {actor['version']}, {actor['groups']} groups, heard {actor['silent_s']:.1f} s ago")
    if found["scorer"]:
        told.append("scorer: " + ", ".join(f"{name} {value}" for name, value in found["scorer"].items()))
    if found["hub"].get("waiting_for"):
        told.append(f"waiting: {found['hub']['waiting_for']}")
    if refused := found["hub"].get("refused"):
        counts = sorted(refused.items(), key=lambda item: -item[1])
        told.append(f"refused messages: {', '.join(f'{count} {reason}' for reason, count in counts)}")
    if ledger.get("quarantined"):
        told.append(f"quarantined groups, and why: {run.path / 'quarantine.jsonl'}")
    if found["last"]:
        told.append(f"last step: {line(found['last'])}")
    return told + [held_out(record) for record in found["evaluations"]]


def _scorer(address: str) -> dict[str, Any]:
    """What the scorer process has answered in its present life, and how much waits; nothing where there is none."""
    if not address:
        return {}
    try:
        return ask_alive(address, _PATIENCE_S).model_dump(include={"answered", "waiting"})
    except DeadlineError as error:
        return {"state": str(error)}
