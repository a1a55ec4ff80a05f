"""One rank of a learner in a process of its own: `python rank_role.py RANK SIZE MEETING DIRECTORY`, which holds `plan.json`.

The plan is a list of jobs, each a backend with settings that makes steps on the same made-up batches; rank 0 leaves what
came out in DIRECTORY/NAME.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from making import make_group

from async_rlhf.learner.batch.rows import make_rows, split_updates
from async_rlhf.learner.config import LearnerConfig, LossConfig
from async_rlhf.learner.objective.estimation import TokenTargets
from async_rlhf.learner.step.controller import Controller, make_backend
from async_rlhf.learner.step.ranks import Ranks

# One has an episode whose row begins anew.
GROUPS = [make_group(n, [3, 1, 6, 2], version=0, observed=[(2, 4)] if n == 1 else (), anew=[0]) for n in range(4)]
ADVANTAGES = [[1.0, -1.5, 0.5, None], [0.5, 0.25, -1.0, 1.0], [2.0, -0.5, 0.0, -1.0], [-0.25, 1.0, 1.0, -2.0]]
# Plain enough that one step's gradient shows: no clipping of its norm, several micro-batches, fewer on one rank than the other.
SETTINGS = {"learning_rate": 1e-3, "max_grad_norm": 1e6, "micro_batch_tokens": 40, "weight_decay": 0.1}


def make(job: dict[str, Any], ranks: Ranks | None) -> Controller:
    config = LearnerConfig(**SETTINGS | job.get("settings", {}))
    loss = LossConfig(kl_coef=0.1) if job.get("reference") else LossConfig()
    reference = Path(job["model"]) if job.get("reference") else None
    if "teacher" in job:
        loss, reference = LossConfig(kind="reverse_kl_top_k", top_k=5), Path(job["teacher"])
    return make_backend(Path(job["model"]), config, loss, ranks=ranks, reference=reference)


def control(backend: Any, job: dict[str, Any], out: Path) -> None:
    """What rank 0 asks for: maybe load, look at the batch, make steps (the one at `poison` with a NaN; with `dry_run` two that
    are not made before each; at some with other `rates`; a `pause` after that one until there is a file `go`), save."""
    out.mkdir()
    if "load" in job:
        backend.load(Path(job["load"]))
    seen = backend.evaluate(make_rows(GROUPS, ADVANTAGES))
    returns = {member: np.full_like(each.logp_proximal, 2.0) for member, each in seen.items() if each.value is not None}
    targets = {member: TokenTargets(seen[member], advantage=each, returns=each) for member, each in returns.items()}
    first, last = job.get("first", 0), job["steps"]
    reports = []
    for step in range(first, last):
        advantages = [[float("nan"), *ADVANTAGES[0][1:]], *ADVANTAGES[1:]] if job.get("poison") == step else ADVANTAGES
        if job.get("dry_run"):
            for values in (ADVANTAGES, [[float("nan"), *ADVANTAGES[0][1:]], *ADVANTAGES[1:]]):
                backend.dry_run(split_updates(make_rows(GROUPS, values), 2), step)
        updates = split_updates(make_rows(GROUPS, advantages, targets), job.get("updates", 1))
        reports.append(backend.step(updates, step, job.get("rates", {}).get(str(step))))
        if job.get("watch"):
            sys.stdout.write(f"step {step}\n")
            sys.stdout.flush()
        while job.get("pause") == step and not (out.parent / "go").exists():
            time.sleep(0.02)
    backend.snapshot()(out)
    tensors = backend.tensors()
    reference = backend.machine._reference
    referred = backend.evaluate(make_rows(GROUPS, ADVANTAGES)) if reference is not None else {}
    held = [getattr(p, "ds_tensor", p) for p in reference.parameters()] if reference is not None else []
    report = {
        "metrics": [dict(report.metrics) for report in reports],
        "members": [{str(m): w for m, w in report.weight_of_member.items()} for report in reports],
        "applied": [report.applied for report in reports],
        "observed": {str(member): each.logp_proximal.tolist() for member, each in seen.items()},
        "references": {str(member): each.logp_reference.tolist() for member, each in referred.items()},
        "reference_bytes": sum(part.numel() * part.element_size() for part in held),
        "canary": list(backend.canary().logprobs),
        "weights": {name: bytes(tensor.data).hex() for name, tensor in tensors.items()},
        "shapes": {name: list(tensor.shape) for name, tensor in tensors.items()},
    }
    (out / "report.json").write_text(json.dumps(report))


def main(rank: int, size: int, meeting: str, directory: Path) -> None:
    plan = json.loads((directory / "plan.json").read_text())
    ranks = Ranks.join(
        rank, size, meeting, timeout_s=plan[0].get("timeout_s", 60.0), idle_timeout_s=plan[0].get("idle_timeout_s", 60.0)
    )
    for job in plan:
        controller = make(job, ranks)
        if rank > 0:
            controller.work()
            continue
        control(controller, job, directory / job["name"])
        controller.close()
    ranks.close()


def _follow_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_follow_parent, daemon=True).start()
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)
