"""Run directories as a run leaves them, written at once: of any length, empty, damaged, hostile."""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from async_rlhf.run.loading import dump, load

QUICK = Path(__file__).resolve().parents[2] / "configs" / "quick.toml"
BEGAN = 1_790_000_000.0
HOSTILE = "<img src=x onerror=\"document.title='broken in'\"></script><script>document.title='broken in'</script>"


def made_run(
    directory: Path, steps: int = 40, seed: int = 0, sampled: Callable[[int], dict[str, Any]] | None = None, **overrides: Any
) -> Path:
    """A run that has ended after so many steps, with a sample of its groups, evaluations, spans and changes.

    sampled: the group that is sampled of a step; left out: `group`.
    """
    directory.mkdir(parents=True)
    config = load(QUICK, {"name": directory.name, "output_dir": str(directory.parent), "max_steps": max(1, steps), **overrides})
    (directory / "config.toml").write_text(dump(config))
    if steps:
        write_lines(directory / "metrics.jsonl", records(steps, seed))
        write_lines(directory / "rollouts.jsonl", map(sampled or group, range(max(1, steps - 40), steps + 1)))
        marks = range(0, steps + 1, max(1, steps // 10))
        about = {"label": "step", "accuracy": 0.5, "model": str(directory)}
        evaluated = [{**about, "step": step, "time": BEGAN + step, "mean_reward": learned(step, steps)} for step in marks]
        write_lines(directory / "evaluations.jsonl", evaluated)
        write_lines(directory / "spans" / "actor-0.jsonl", spans(max(0, steps - 40), steps))
        asked = {"number": 1, "kind": "asked", "values": {"learner.learning_rate": [2e-4, 1e-4]}}
        applied = {"number": 1, "kind": "applied", "step": steps // 2}
        write_lines(directory / "changes.jsonl", [each | {"time": BEGAN + steps // 2} for each in (asked, applied)])
        (directory / "restarts.json").write_text('{"actor": 3, "scorer": 1}')
        ended = {"code": 0, "reason": "all steps done", "finished": True}
        (directory / "ledger.json").write_text(json.dumps({**status(steps), "ended": ended}))
    return directory


def records(steps: int, seed: int = 0, begin: int = 1) -> Iterator[dict[str, Any]]:
    """What the learner records of each step, as far as the page draws it."""
    chance = random.Random(seed)
    for step in range(begin, steps + 1):
        noise = chance.gauss(0, 1)
        stale = min(4, int(abs(chance.gauss(0, 1.5))))
        yield {
            "step": step, "time": BEGAN + step, "version": step - 1, "reward": learned(step, steps) + 0.05 * noise,
            "num_tokens": 800, "num_tokens_total": 800 * step, "step_time": 1.0, "tokens_per_second": 800.0 + 60 * noise,
            "staleness/mean": 0.2 * stale, "staleness/max": stale, "staleness/violations": 0,
            "staleness/histogram": {"0": 800 - 100 * stale, str(stale or 1): 100 * stale},
            "idle/learner": 0.2 + 0.02 * abs(noise), "idle/actor": 0.4 + 0.02 * abs(noise), "queue/depth": float(stale),
            "completions/mean_length": 6.5 + 0.2 * noise, "completions/max_length": 9, "completions/clipped_ratio": 0.0,
            "kl/behaviour": 1e-3 * abs(noise), "entropy": 0.4 * math.exp(-2 * step / steps) + 0.01 * abs(noise),
            "is/ratio_max": 1.1 + 0.1 * abs(noise), "is/ratio_q99": 1.02, "is/ratio_q01": 0.98, "is/ess": 0.99,
            "is/second_moment": 1e-3, "is/tail_negative": 0.0, "clip_ratio/region_mean": 0.01 * abs(noise),
            "mismatch/abs_log_ratio": None, "drift/kl": 1e-4, "grad_norm": 0.8 + 0.1 * noise, "loss": -0.01,
            "rewards/failed_ratio": 0.0, "frac_reward_zero_std": 0.3, "broadcast/seconds": 1e-4, "learning_rate": 2e-4,
            "records/lost_lines": 0, "checkpoint/failed": 0, "applied": True, "actors": 2.0,
        }  # fmt: skip


def group(step: int) -> dict[str, Any]:
    """A sampled group: two completions, the second sampled by two versions."""
    began = BEGAN + step - 2
    stages = {"generation.began": 0.0, "generation.ended": 0.6, "judge.began": 0.6, "judge.ended": 0.9}
    timings = {name: began + after for name, after in stages.items()}
    rollouts = [
        {
            "finish_reason": "stop", "weight": 1.0, "timings": timings, "text": text, "tokens": tokens, "spans": spans,
            "scores": {"judge": score}, "advantage": 2 * score - 1.2,
        }
        for text, tokens, spans, score in (
            ("steel", [31, 32, 17, 17, 24, 1], [[step - 1, 6]], 0.2),
            ("leets", [24, 17, 17, 32, 31, 1], [[step - 2, 3], [step - 1, 3]], 1.0),
        )
    ]  # fmt: skip
    prompt = f"Spell backward: steel ({step})"
    return {"step": step, "group": step, "attempt": 0, "actor": "actor-0", "prompt": prompt, "rollouts": rollouts}


def episode(step: int) -> dict[str, Any]:
    """A sampled group of two episodes of two turns, the second of another version, and what a calculator has answered between
    them."""
    made = group(step)
    for rollout, call, product, answer in zip(
        made["rollouts"], ("<34 * 12>", "<34 * 21>"), ("408\n", "714\n"), ("408", "714"), strict=True
    ):
        right = answer == "408"
        rollout["text"], rollout["scores"] = call + product + answer, {"calculator": float(right)}
        rollout["advantage"] = 0.8 if right else -0.8
        rollout["tokens"] = [*spelled(call), _END, *spelled(product), *spelled(answer), _END]
        rollout["spans"] = [[step - 2, len(call) + 1], [None, len(product)], [step - 1, len(answer) + 1]]
    return {**made, "prompt": "34 * 12 =\n"}


_LETTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
_END = 1


def spelled(text: str) -> list[int]:
    """As the tokenizer of the quick run's model has it."""
    return [3 + _LETTERS.index(letter) for letter in text]


def spans(begin: int, end: int) -> Iterator[dict[str, Any]]:
    for step in range(begin, end):
        yield {"name": f"adopt {step}", "began": BEGAN + step, "ended": BEGAN + step + 0.05}
        yield {"name": "idle", "began": BEGAN + step + 0.05, "ended": BEGAN + step + 0.3}


def status(steps: int) -> dict[str, Any]:
    """The hub's, which is `ledger.json`."""
    places = {"trained": 16 * steps, "queued": 12, "in_flight": 16, "leased": 20, "stale": 6, "filtered": 0, "failed": 3}
    ledger = {"credited": sum(places.values()) + 1, **places, "quarantined": 1, "closes": True}
    actors = {f"actor-{i}": {"version": steps - 1 - i, "groups": 10, "silent_s": 0.2} for i in range(2)}
    spool = {"rows": 4 * steps, "rejected": 2, "ended": False, "problem": ""}
    lacks = {"waiting_for": "", "waits_for_prompts": False, "waits_for_room": False}
    numbers = {"state": "running", "step": steps, "version": steps - 1, "fence": 1}
    return {**numbers, **lacks, "spool": spool, "ledger": ledger, "actors": actors}


def learned(step: int, steps: int) -> float:
    return 0.3 + 0.65 * (1 - math.exp(-3 * step / max(1, steps)))


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def broken_run(directory: Path) -> Path:
    """Damaged lines in its records, no ledger.json, texts that would be markup."""
    run = made_run(directory, 30)
    (run / "ledger.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[10], lines[11] = lines[10][:50], '{"step": "eleven", "reward": "much"}'
    (run / "metrics.jsonl").write_text(
        "\n".join([*lines, '{"step": 31, "reward": Infinity, "staleness/histogram": [1]}', '{"step": 32'])
    )
    sample = group(30)
    sample["prompt"] = sample["rollouts"][0]["text"] = HOSTILE
    with (run / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 30, "rollouts": 5}\nno line\n' + json.dumps(sample) + "\n")
    (run / "spans" / "actor-0.jsonl").write_text('{"name": "idle", "began": "now"}\n')
    (run / "changes.jsonl").write_text(json.dumps({"kind": HOSTILE, "step": "1", "values": {"a": HOSTILE}}) + "\n[]\n")
    return run
