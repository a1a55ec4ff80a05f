"""A run on virtual time: the real `Admission` decides, actors and learner take what their stages cost.

    actor    actor.py
    hub      `Admission`, called as `buffers.hub.exchange` does; messages and the journal take no time
    learner  take, train, report that the step is done (the weights of the step before have arrived by then), begin to publish
             every `publish_every` steps, commit: as `learner.loop.trainer`, with every version waited for in exact mode

Nothing is random but what a workload draws from, by the number of the group: who makes a group, and when, changes
nothing of it. More staleness can lengthen a run, though hardly: rows that begin earlier share the decode steps of those that
the learner waits for, and several actors are given groups in another order (Graham, Bounds on multiprocessing timing anomalies,
1969).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.queue.ledger import Ledger
from async_rlhf.buffers.record import Entry, staleness
from async_rlhf.experiments.planning.simulation.actor import Draws, OpenGroup, SimulatedActor
from async_rlhf.experiments.planning.simulation.virtual_time import Account, Clock, Judges, RoleTime
from async_rlhf.experiments.planning.simulation.workload import Costs, Workload

_DRAWN = 64  # groups whose random numbers are drawn together
_BOUNDS = 0.9  # a role that is busy for less of its time does not bound the step by itself


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Rates, shares and means are over the steps behind the warm-up; the ledger and `total_s` are of all.

    staleness: tokens that were trained on, by their staleness in steps. queue_depth: groups ready and not taken. roles:
    `learner`, `scoring` and the actors by name. scoring_load: share of the judges' time in which they scored; 0 where their
    number has no limit.
    """

    steps: int
    total_s: float
    seconds_per_step: float
    samples_per_s: float
    staleness: Mapping[int, int]
    queue_depth_mean: float
    queue_depth_max: int
    roles: Mapping[str, RoleTime]
    scoring_load: float
    ledger: Ledger

    @property
    def staleness_mean(self) -> float:
        tokens = sum(self.staleness.values())
        return sum(age * count for age, count in self.staleness.items()) / tokens if tokens else 0.0

    @property
    def bound_by(self) -> str:
        """`learner`, `scoring` or `actors`, whichever is busy nearly always; else `max_staleness`: once around binds, as each
        role waits for another."""
        actors = [1 - time.idle for name, time in self.roles.items() if name not in ("learner", "scoring")]
        busy = {
            "actors": sum(actors) / len(actors) if actors else 0.0,
            "scoring": self.scoring_load,
            "learner": 1 - self.roles["learner"].idle,
        }
        name = max(busy, key=lambda name: busy[name])
        return name if busy[name] >= _BOUNDS else "max_staleness"


def simulate(workload: Workload, costs: Costs, *, steps: int, warm_up: int | None = None) -> Simulated:
    """`steps` learner steps. warm_up: those at the beginning that rates and shares leave out; None: what fills the queue, at
    most half of them. The data do not end with the run, so its last steps are like the others.
    """
    usual = min(steps // 2, workload.max_staleness + 2)
    return Simulation(workload, costs, steps, usual if warm_up is None else warm_up).run()


class Simulation:
    """The hub and the learner; actors report to it."""

    def __init__(self, workload: Workload, costs: Costs, steps: int, warm_up: int) -> None:
        self.workload, self.costs, self._steps, self._warm_up = workload, costs, steps, warm_up
        self.clock = Clock()
        self._admission = Admission(workload.bound)
        self._draws = dict[int, Draws]()
        self._learner, self._scoring = Account(self.clock, "publish"), Account(self.clock, "completions")
        self.judges = Judges(
            self.clock,
            self._scoring,
            float("inf") if workload.judges is None else workload.judges,
            owners=1 if workload.shared_judges else max(1, workload.actors),
        )
        self._versions = dict[int, dict[int, int]]()  # of groups that are ready: tokens by version
        self._takes = self._sent = False  # the learner waits for its batch; a set of weights is on its way
        self._trained = False  # the step is done and not reported yet
        self._announced: int | None = None  # what actors were last given to adopt
        self._awaited: tuple[bool, int | None] | None = None  # all that `waits_for` depends on but the actor
        self._began = 0.0
        self._staleness = dict[int, int]()
        self._depth = self._deepest = 0
        self._depth_s = self._depth_at = 0.0
        self._actors = dict[str, SimulatedActor]()
        for number in range(workload.actors):
            name = f"actor-{number}"
            actor = self._actors[name] = SimulatedActor(name, self, 0 if workload.shared_judges else number)
            self._admission.fleet.join(name, Actor(actor.capacity, 0, -1, 0.0, life=str(number + 1)))

    def run(self) -> Simulated:
        self._admission.register(1, 0, 0)
        self._publish(whole=True)
        while self._admission.step < self._steps:
            if not self.clock.turn():
                raise ConfigError(
                    f"the run stands still after {self.clock.now:.3f} s, at step {self._admission.step} of {self._steps}: none "
                    f"of its {len(self._actors)} actors can make what its batch needs"
                )
        self._count_depth()
        seconds, steps = self.clock.now - self._began, self._steps - self._warm_up
        rate = 1 / seconds if seconds > 0 else float("inf")
        accounts = {"learner": self._learner, "scoring": self._scoring}
        accounts |= {name: actor.account for name, actor in self._actors.items()}
        return Simulated(
            steps=self._steps,
            total_s=self.clock.now,
            seconds_per_step=seconds / steps,
            samples_per_s=steps * self.workload.samples * rate,
            staleness=dict(sorted(self._staleness.items())),
            queue_depth_mean=self._depth_s * rate if seconds > 0 else 0.0,
            queue_depth_max=self._deepest,
            roles={name: account.close() for name, account in accounts.items()},
            scoring_load=self.judges.load_s * rate if seconds > 0 else 0.0,
            ledger=self._admission.ledger,
        )

    # -- what actors report ------------------------------------------------------------------------------------------

    def draws(self, number: int) -> Draws:
        if number not in self._draws:
            self._draw(number // _DRAWN)
        return self._draws[number]

    def _draw(self, block: int) -> None:
        """Of `_DRAWN` groups at once."""
        workload, random = self.workload, np.random.default_rng([0, block])
        shape = (_DRAWN, workload.group_size)
        lengths = random.choice(np.asarray(workload.lengths), (*shape, workload.turns)).tolist()
        rewards = random.choice(np.asarray(workload.reward_s, float), shape).tolist()
        environments = random.choice(np.asarray(workload.environment_s, float), (*shape, workload.turns - 1)).tolist()
        for place, parts in enumerate(zip(lengths, rewards, environments, strict=True)):
            self._draws[block * _DRAWN + place] = Draws(*parts)

    def made(self, actor: SimulatedActor, group: OpenGroup) -> None:
        credit, versions = group.credit, group.versions
        entry = Entry(credit.attempt, min(versions), max(versions), sum(versions.values()))
        known = self._admission.fleet.actors[actor.name]
        known.has_put(credit.number, self.clock.now)
        self._admission.put(actor.name, credit.number, entry)
        self._versions[credit.number] = versions
        known.capacity = actor.capacity
        self._count_depth()
        self._pump(actor)

    def reported(self, actor: SimulatedActor) -> None:
        known = self._admission.fleet.actors[actor.name]
        if actor.version >= 0:
            known.fence, known.version = self._admission.fence, actor.version
        known.capacity = actor.capacity
        self._pump(actor)

    def waits_for(self, actor: SimulatedActor) -> str:
        """With groups that are being scored it waits for the scores where the learner does; else for a version that may begin
        the next group, if there is none."""
        within = actor.waits_within
        if within and self._takes:
            return within
        return within or "credit" if self._admission.may_begin(actor.version) else "weights"

    # -- the hub -----------------------------------------------------------------------------------------------------

    def _pump(self, changed: SimulatedActor | None = None) -> None:
        """What follows from a change, in the order of `Exchange`: adoptions, credits, the learner's batch. Of thousands of
        actors it looks at those alone for which something may have changed. changed: the one that reports."""
        admission = self._admission
        if admission.bound.exact or admission.published != self._announced:
            self._announced = admission.published
            for name, actor in self._actors.items():
                target = admission.target(name)
                if target is not None and target != actor.version:
                    actor.adopt(target)
        for name, credits in admission.credits().items():
            self._actors[name].begin(credits)
        if self._takes and admission.num_queued >= self.workload.groups_per_batch:
            self._take()
        before, self._awaited = self._awaited, (self._takes, admission.order.next_number())
        own = () if changed is None else (changed,)
        for actor in own if self._awaited == before else self._actors.values():
            if actor.is_idle:
                actor.account.turn_to(self.waits_for(actor))

    def _count_depth(self) -> None:
        now = self.clock.now
        self._depth_s += self._depth * (now - self._depth_at)
        self._depth, self._depth_at = self._admission.num_queued, now
        self._deepest = max(self._deepest, self._depth)

    # -- the learner -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Take the next batch, or wait for it."""
        self._learner.turn_to("batch")
        self._takes = True
        self._pump()

    def _take(self) -> None:
        step = self._admission.step
        numbers = self._admission.take(step)
        if numbers is None:
            return
        self._takes = False
        self._count_depth()
        tokens = 0
        for number in numbers:
            del self._draws[number]
            for version, count in self._versions.pop(number).items():
                tokens += count
                if step >= self._warm_up:
                    age = staleness(version, step)
                    self._staleness[age] = self._staleness.get(age, 0) + count
        workload = self.workload
        seconds = self.costs.training_s(len(numbers), workload.prompt_tokens, tokens, workload.updates_per_step)
        self._learner.turn_to("train")
        self.clock.begin(seconds, self._finish)

    def _finish(self) -> None:
        """The update is made; its step is done once the weights of the step before have arrived."""
        self._trained = True
        self._learner.turn_to("weights")
        if not self._sent:
            self._end_step()

    def _end_step(self) -> None:
        self._trained = False
        admission = self._admission
        admission.trained(admission.step)
        admission.commit(admission.step)
        step = admission.step
        if step == self._warm_up:
            self._restart()
        if step == self._steps:
            return
        self._pump()
        if step % self.workload.publish_every:
            self._ask()
        else:
            self._publish(whole=self.workload.exact)

    def _restart(self) -> None:
        """What was counted until now was the warm-up."""
        self._began = self._depth_at = self.clock.now
        self._depth_s, self._deepest = 0.0, self._admission.num_queued
        self.judges.restart()
        for account in (self._learner, self._scoring, *(actor.account for actor in self._actors.values())):
            account.restart()

    def _publish(self, *, whole: bool) -> None:
        """Copy the weights; they travel while the learner goes on. whole: it waits for them, as with the first."""
        self._learner.turn_to("publish")

        def copied() -> None:
            self._sent = True
            self.clock.begin(self.costs.travel_s, arrived)
            if whole:
                self._learner.turn_to("weights")
            else:
                self._ask()

        def arrived() -> None:
            self._sent = False
            self._admission.publish(self._admission.step)
            self._pump()
            if whole:
                self._ask()
            elif self._trained:
                self._end_step()

        self.clock.begin(self.costs.copy_s, copied)
