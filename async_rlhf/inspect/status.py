"""The state of a run: live from its hub and its scorer, or from its files.

Trusts neither files nor peers: what cannot be read is named beside the rest, every wait is bounded, and only sockets that a
living run of this user has made are connected to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from async_rlhf.actors.workers.client import describe
from async_rlhf.buffers.clients.control import control
from async_rlhf.buffers.errors import AsyncRLHFError, DamagedError
from async_rlhf.buffers.transport.link import connector
from async_rlhf.launch.sockets import hub_address, scorer_address
from async_rlhf.learner.checkpoint.evaluated import best_step
from async_rlhf.learner.loop.budget import Spent
from async_rlhf.run.display.console import held_out, line
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir

_PATIENCE_S = 3.0
_STEP_BYTES = 64 << 10
"""Holds the last step; a page asks every second."""
_MOST_CHANGES = 10
_LAST_STATES = ("finished", "drained")  # the last states that a hub writes
_ACTOR = "version {version:.0f}, {groups:.0f} groups, last message {silent_s:.1f} s ago"
_BEHIND = "; not version {behind_version} for {behind_s:.1f} s: {behind_because}"
_OUT = "; broadcasts of weights no longer serve it: {no_broadcasts}"
_CURRICULUM = (
    "{places:,.0f} prompts, {new:,.0f} not used yet, {hard:,.0f} hard, {retired:,.0f} retired; mean pass rate {pass_rate:.2f}"
)
_PLACES = ("trained", "queued", "in_flight", "leased", "stale", "filtered", "failed", "quarantined")


class _ShownShape(BaseModel):
    """The fields shown of a file or an answer have these types; further fields are allowed."""

    model_config = ConfigDict(extra="allow", strict=True)


class _HubStatus(_ShownShape):
    state: str = ""
    waiting_for: str = ""
    ledger: dict[str, int | bool] = {}
    actors: dict[str, dict[str, float | str]] = {}
    refused: dict[str, int] = {}
    weights: dict[str, int] = {}
    spool: dict[str, int | bool | str] | None = None
    curriculum: dict[str, float] | None = None


class _StepLine(_ShownShape):
    step: int
    num_tokens_total: int = 0
    step_time_total: float = 0.0


class _EvaluationLine(_ShownShape):
    label: str


def read(reading: Reading) -> dict[str, Any]:
    """The state as values for JSON. `problems` names unreadable parts. Raises ConfigError and DamagedError."""
    run, config, problems = reading.run, reading.config(), list[str]()

    def tried(look: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return look()
        except DamagedError as error:
            problems.append(str(error))
            return otherwise

    metrics = tried(lambda: reading.newest(run.metrics, _StepLine, problems, _STEP_BYTES), [])
    evaluations = tried(lambda: reading.newest(run.evaluations, _EvaluationLine, problems), [])
    hub = tried(lambda: _checked(run.read_ledger(), "ledger.json"), {})
    alive, scorer = run.is_alive(), {}
    if (sockets := tried(run.sockets, None)) is not None:
        try:
            with control(hub_address(sockets), _PATIENCE_S, connector(config.security.directory)) as client:
                hub = _checked(client.status(), "the hub's answer")
        except AsyncRLHFError as error:
            is_over = _is_newer(run.ledger, run.lock_file) and hub.get("state") in _LAST_STATES  # only evaluations are left
            hub["state"] = "ending" if is_over else f"the hub does not answer: {error}"
        scorer = _scorer(scorer_address(sockets)) if (sockets / "scorer").exists() else {}
    spent = Spent.until(metrics[-1] if metrics else {})
    done = config.budget.ended(spent)
    end = None if alive else run.end()
    if end is not None:
        stands = "failed" if end.code else "finished" if end.finished else "stopped"
    elif alive:
        stands = "ending" if done else "starting"
    else:
        stands = "finished" if done else "stopped"
    state = (hub.get("state") or "starting") if sockets else stands
    return {
        "run_dir": str(run.path),
        "state": state,
        "alive": alive,
        "step": metrics[-1]["step"] if metrics else 0,
        "max_steps": config.max_steps,
        "trained_tokens": spent.tokens,
        "max_trained_tokens": config.max_trained_tokens,
        "seconds": spent.seconds,
        "max_seconds": config.max_seconds,
        "used_up": done,
        "ended": None if end is None else end.model_dump(),
        "hub": hub,
        "no_broadcasts": config.no_broadcasts,
        "scorer": scorer,
        "bits": None if (bits := run.bits()) is None else bits._asdict(),
        "restarts": tried(run.read_restarts, {}),
        "last": metrics[-1] if metrics else None,
        "changes": tried(reading.changes_in_words, []),
        "evaluations": evaluations,
        "problems": problems,
    }


def lines(run: RunDir, state: dict[str, Any]) -> list[str]:
    """The result of `read` as text for a person."""
    hub, alive = state["hub"], state["alive"]
    ledger = hub.get("ledger", {})
    lines = [_head(run, state), *_ending(state)]
    if ledger:
        shown = " + ".join(f"{ledger.get(place, '?')} {place}" for place in _PLACES)
        closes = "closes" if ledger.get("closes") else "DOES NOT CLOSE"
        lines.append(f"ledger: {ledger.get('credited', '?')} credited = {shown} ({closes})")
    if bits := state["bits"]:
        lines.append(f"bits of completions: {bits['obstacle'] and 'not promised: '}{bits['obstacle'] or 'promised'}")
    for name, actor in hub.get("actors", {}).items() if alive else ():
        behind = _sentence(actor, _BEHIND.format_map) if "behind_because" in actor else ""
        out = _sentence(actor, _OUT.format_map) if "no_broadcasts" in actor else ""
        lines.append(f"{name}: {_sentence(actor, _ACTOR.format_map)}{behind}{out}")
    if alive and state["no_broadcasts"]:
        lines.append(f"weights are not broadcast: {state['no_broadcasts']}")
    restarts = dict(sorted(state["restarts"].items()))
    refused = dict(sorted(hub.get("refused", {}).items(), key=lambda item: -item[1]))
    spoilt = {name: hub.get("weights", {}).get(f"broadcasts_{name}", 0) for name in ("failed", "refused")}
    lines += _listed("broadcasts of weights", spoilt if any(spoilt.values()) else {}, "{1} {0}")
    lines += _listed("scorer", state["scorer"], "{0} {1}")
    lines += _listed("started again", restarts, "{0} {1}")
    if alive and hub.get("waiting_for"):
        lines.append(f"waiting: {hub['waiting_for']}")
    if spool := hub.get("spool"):
        lines.append(f"spool: {_sentence(spool, partial(_spool, run))}")
    if curriculum := hub.get("curriculum"):
        lines.append(f"curriculum: {_sentence(curriculum, _CURRICULUM.format_map)}")
    lines += _listed("refused messages", refused, "{1} {0}")
    if ledger.get("quarantined"):
        lines.append(f"quarantined groups, and why: {run.path / 'quarantine.jsonl'}")
    if state["last"]:
        lines.append(f"last step: {_sentence(state['last'], line)}")
        if failed := state["last"].get("checkpoint/failed"):
            lines.append(f"checkpoints that could not be written: {failed}; see {run.log('learner')}")
    lines += _changes(state["changes"], run)
    lines += [f"cannot be read: {problem}" for problem in state["problems"]]
    return lines + _evaluations(state["evaluations"])


def _head(run: RunDir, state: dict[str, Any]) -> str:
    """State, and how much of each budget is used."""
    head = f"{run.path}: {state['state']}, step {state['step']}"
    if (most := state["max_steps"]) is not None:
        head += f" of {most}"
    if (most := state["max_trained_tokens"]) is not None:
        head += f", {state['trained_tokens']:,} of {most:,} tokens"
    if (most := state["max_seconds"]) is not None:
        head += f", {state['seconds']:,.0f} of {most:,.10g} seconds"
    return head


def _ending(state: dict[str, Any]) -> list[str]:
    """How the run ended, or what will end it."""
    if (end := state["ended"]) and end["code"]:
        return [f"ended with code {end['code']}: {end['reason']}"]
    if reason := end["reason"] if end else state["used_up"]:
        return [f"ended: {reason}"]
    return [] if state["alive"] else ["ended: it was killed, or the machine went down; --resume goes on"]


def _listed(title: str, counts: dict[str, Any], form: str) -> list[str]:
    return [f"{title}: {', '.join(form.format(*each) for each in counts.items())}"] if counts else []


def _changes(found: Sequence[str], run: RunDir) -> list[str]:
    """The newest, and where the others are."""
    earlier = len(found) - _MOST_CHANGES
    before = [f"changed {earlier} times before that: {run.path / 'changes.jsonl'}"] if earlier > 0 else []
    return [*before, *(f"changed: {change}" for change in found[-_MOST_CHANGES:])]


def _spool(run: RunDir, found: dict[str, Any]) -> str:
    """The rows in the spool, the rejected ones, and the spool's problem."""
    rejected, problem = found["rejected"], found["problem"]
    aside = f", {rejected:,} lines were set aside ({run.path / 'data' / 'spool' / 'rejected'})" if rejected else ""
    ended = ", no more will" if found["ended"] else ""
    return f"{found['rows']:,} rows have come{aside}{ended}{problem and '; '}{problem}"


def _evaluations(records: Sequence[dict[str, Any]]) -> list[str]:
    """The newest, the first and the best in words, in the order in which they were made."""
    best = best_step(records)
    chosen = [r for i, r in enumerate(records) if i == 0 or i >= len(records) - 3 or r.get("step") == best]
    others = [f"{len(records) - len(chosen)} more evaluations"] if len(chosen) < len(records) else []
    words = [_sentence(r, held_out) + ("  (best)" if len(chosen) > 2 and r.get("step") == best else "") for r in chosen]
    return words + others


def _sentence(record: dict[str, Any], words: Callable[[dict[str, Any]], str]) -> str:
    try:
        return words(record)
    except (KeyError, TypeError, ValueError) as error:
        return f"a record that cannot be shown ({type(error).__name__}: {error})"


def _checked(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Check the types of a hub's status. Raises DamagedError."""
    try:
        _HubStatus.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        raise DamagedError(f"{name}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    return values


def _is_newer(path: Path, other: Path) -> bool:
    """Whether a file was written after another; not where one is missing."""
    with suppress(OSError):
        return path.stat().st_mtime_ns > other.stat().st_mtime_ns
    return False


def _scorer(address: str) -> dict[str, Any]:
    """The numbers of requests that the scorer process has answered since it started, and that wait."""
    try:
        return describe(address, _PATIENCE_S).model_dump(include={"answered", "waiting"})
    except AsyncRLHFError as error:
        return {"state": str(error)}
