"""Faults: processes of a real run are killed and stopped at random; at its end the books must be right.

`async-rlhf try chaos CONFIG --faults 200 --long-freezes 6 --seed S` runs the configuration as `train` does. Beside it a thread
ends (SIGKILL) or freezes (SIGSTOP, later SIGCONT) one process of the run after another; a long freeze outlasts leases and
requests, some outlast the watchdog. On other hosts it ends processes and agents, with all that these run, and freezes nothing.
No process is a target again before all others that run have been as often, and the kinds of faults are drawn before the first:
timing changes neither. It waits for finished steps between two faults, so that a run whose checkpoints are made often enough
always gets on; or, as a soak does, for a share of the whole. `problems` then reads what the run left behind.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from async_rlhf.launch.connection import RemoteProcess
from async_rlhf.learner.loop.budget import Spent
from async_rlhf.run.config import Config
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir

# One fault in five freezes instead of killing: a process that is neither dead nor alive is the harder case.
_FREEZE_SHARE = 0.2
_FREEZE_S = 3.0
_MAX_STEPS_BETWEEN = 2
_LOOK_S = 0.05
# Of a long freeze, in seconds: on both sides of the watchdog's time in configs/chaos.toml.
_LONG_FREEZE_S = (60.0, 120.0)
# With the actors, the hub and the learner all gone, a new step takes some seconds; far more than that is a hang.
_PATIENCE_S = 120.0


class Fault(NamedTuple):
    """An injected fault: its kind, its process and the step."""

    step: int
    target: str
    kind: str


class FaultTarget(Protocol):
    """A process of a run, as its supervisor or any other program sees it."""

    @property
    def pid(self) -> int: ...


@dataclass
class FaultInjector:
    """Injects `num_faults` while the run goes on. Owns one thread; on close every frozen process goes on."""

    processes: Callable[[], Mapping[str, FaultTarget]]
    """The running processes by name."""
    steps: Callable[[], int]
    """How many steps were ever recorded (it never falls)."""
    num_faults: int
    seed: int
    num_long: int = 0
    """How many of the faults are long freezes, of `long_freeze_s` seconds (from, to)."""
    long_freeze_s: tuple[float, float] = _LONG_FREEZE_S
    freeze_share: float = _FREEZE_SHARE
    """Share of short freezes among the other faults."""
    agents: Callable[[], Mapping[str, Callable[[], None]]] = dict
    """See `program.Launcher`."""
    is_due: Callable[[int], bool] | None = None
    """Whether the fault of this number, from 0, must come; without it a fault comes after up to two further steps."""
    faults: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        num_long = min(self.num_long, self.num_faults)
        num_freezes = round((self.num_faults - num_long) * self.freeze_share)
        num_kills = self.num_faults - num_long - num_freezes
        self._kinds = ["long freeze"] * num_long + ["freeze"] * num_freezes + ["kill"] * num_kills
        self._random.shuffle(self._kinds)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._inject_all, name="faults", daemon=True)

    def __enter__(self) -> FaultInjector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(timeout=10)

    def _inject_all(self) -> None:
        while len(self.faults) < self.num_faults and not self._closing.is_set():
            self._await_next()
            # not always right after a step: any moment must do
            if self._closing.wait(self._random.random() * 0.3):
                return
            self._inject()

    def _await_next(self) -> None:
        if self.is_due is not None:
            while not self.is_due(len(self.faults)) and not self._closing.wait(_LOOK_S):
                pass
            return
        wanted, waited = self.steps() + self._random.randint(0 if self.faults else 1, _MAX_STEPS_BETWEEN), 0.0
        # After this long without a step the next fault comes anyway: a hanging process is a target too.
        while self.steps() < wanted and waited < _PATIENCE_S and not self._closing.wait(_LOOK_S):
            waited += _LOOK_S

    def _inject(self) -> None:
        processes, kind = self.processes(), self._kinds[len(self.faults)]
        away = {name: each.kill for name, each in processes.items() if isinstance(each, RemoteProcess)}
        away |= {f"agent of {name}": end for name, end in self.agents().items()}
        here = {name: each for name, each in processes.items() if name not in away}
        if not (names := sorted(here if kind == "long freeze" else {**here, **away})):
            return
        times = Counter(fault.target for fault in self.faults)
        fewest = min(times[name] for name in names)
        name = self._random.choice([each for each in names if times[each] == fewest])
        if name in away:
            away[name]()
            self.faults.append(Fault(self.steps(), name, "kill"))
            return
        target = here[name]
        with suppress(ProcessLookupError):
            os.kill(target.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            self.faults.append(Fault(self.steps(), name, kind))
            if kind != "kill":
                seconds = self._random.uniform(*(self.long_freeze_s if kind == "long freeze" else (0.0, _FREEZE_S)))
                until = time.monotonic() + seconds
                while self.processes().get(name) is target and time.monotonic() < until and not self._closing.wait(_LOOK_S):
                    pass
                if self.processes().get(name) is target:  # else the watchdog has ended it
                    os.kill(target.pid, signal.SIGCONT)


def problems(run: RunDir, config: Config) -> list[str]:
    """Violations in a run that has ended: steps and groups missing or repeated, the bound, the ledger, groups that were
    quarantined though their actors were only silent. Empty when there are none."""
    metrics = run.read_metrics()
    wrong: list[str] = []
    steps = [record["step"] for record in metrics]
    if steps != list(range(1, len(steps) + 1)):
        wrong.append(f"steps are not 1, 2, 3, ...: {steps}")
    trained = Counter(number for record in metrics for number in record["groups"])
    if repeated := sorted(number for number, times in trained.items() if times > 1):
        wrong.append(f"groups trained more than once: {repeated}")
    ledger = run.read_ledger().get("ledger", {})
    by_budget = metrics and config.budget.ended(Spent.until(metrics[-1]))
    most = None if by_budget else config.max_steps
    wanted = (len(metrics) if most is None else most) * config.groups_per_batch
    missing = sorted(set(range(wanted)) - set(trained))
    if config.advantage.constant_groups == "refill":  # others replace quarantined and filtered groups
        if config.data.epochs is None and len(trained) != wanted:
            wrong.append(f"{len(trained)} groups were trained on, of {wanted}")
    elif config.data.epochs is None and len(missing) != ledger.get("quarantined", 0):
        wrong.append(f"groups never trained: {missing} ({ledger.get('quarantined', 0)} were quarantined)")
    if violations := [record["step"] for record in metrics if record["staleness/violations"]]:
        wrong.append(f"steps with tokens over the bound: {violations}")
    if not ledger.get("closes"):
        wrong.append(f"the ledger does not close: {ledger}")
    if ledger.get("trained") != sum(trained.values()):
        wrong.append(f"the ledger has {ledger.get('trained')} trained groups, the metrics {sum(trained.values())}")
    for record in Reading(run).quarantined.whole():
        if not any("ended" in reason for reason in record["reasons"]):
            wrong.append(f"group {record['group']} was quarantined, and no actor ended with it: {record['reasons']}")
    return wrong
