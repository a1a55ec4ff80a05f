"""A run on virtual time: the real `Admission` decides, actors and learner take what their stages cost.

    actor    actor.py
    hub      `Admission`, called as `buffers.hub.exchange` does; messages and the journal take no time
    learner  take, train, report that the step is done (the weights of the step before have arrived by then), begin to publish
             every `publish_every` steps, commit: as `learner.loop.trainer`, with every version waited for in exact mode

Nothing is random but what a workload draws from, by the number of the group and the seed: who makes a group, and when, changes
nothing of it. More staleness can lengthen a run, though hardly: rows that begin earlier share the decode steps of those that
the learner waits for, and several actors are given groups in another order (Graham, Bounds on multiprocessing timing anomalies,
1969).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import get_args

import numpy as np

from async_rlhf.buffers.errors import ConfigError, RefusedError
from async_rlhf.buffers.queue.admission import Actor, Admission
from async_rlhf.buffers.record import Entry, staleness
from async_rlhf.experiments.planning.model.costs import StageCosts
from async_rlhf.experiments.planning.simulation.account import Account, Simulated
from async_rlhf.experiments.planning.simulation.actor import Draws, OpenGroup, SimulatedActor
from async_rlhf.experiments.planning.simulation.judges import Judges, Scoring
from async_rlhf.experiments.planning.simulation.virtual_time import Clock, Cores
from async_rlhf.experiments.planning.simulation.workload import ActorLost, Event, Role, Workload, check_events

_DRAWN = 64  # groups whose random numbers are drawn together


def simulate(
    workload: Workload,
    costs: StageCosts,
    *,
    steps: int,
    seed: int = 0,
    events: Sequence[Event] = (),
    warm_up: int | None = None,
) -> Simulated:
    """`steps` learner steps. warm_up: those at the beginning that rates and shares leave out; None: what fills the queue, at
    most half of them. The data do not end with the run, so its last steps are like the others.

    Raises ConfigError for events that cannot happen, and where no actor is left before the steps are done.
    """
    if steps < 1:
        raise ConfigError(f"steps = {steps} of a simulation: at least 1")
    usual = min(steps // 2, workload.max_staleness + 2)
    if not 0 <= (warm_up := usual if warm_up is None else warm_up) < steps:
        raise ConfigError(f"warm_up = {warm_up} of {steps} steps: 0 to {steps - 1}; nearest: {min(max(warm_up, 0), steps - 1)}")
    return _Simulation(workload, costs, steps, seed, warm_up, check_events(workload, events)).run()


class _Simulation:
    """The hub and the learner; actors report to it (`actor.Hub`)."""

    def __init__(
        self, workload: Workload, costs: StageCosts, steps: int, seed: int, warm_up: int, events: Sequence[Event]
    ) -> None:
        self._workload, self._costs, self._steps, self._seed, self._warm_up = workload, costs, steps, seed, warm_up
        self._clock = Clock()
        self._admission = Admission(workload.bound)
        self._draws = dict[int, Draws]()
        self._accounts = {"learner": Account(0.0, "publish"), "scoring": Account(0.0, "completions")}
        self._cores: dict[Role, tuple[Cores | None, float]] = dict.fromkeys(get_args(Role), (None, 1.0))
        for pool in workload.pools:
            shared = Cores(pool.cores)
            self._cores |= {role: (shared, pool.parallelism_of(role)) for role in pool.roles}
        cores, parallelism = self._cores["scoring"]
        cores = cores if workload.reward_cores else None
        self._scoring = Scoring(self._clock, self._accounts["scoring"], cores, parallelism)
        self._num_judges = float("inf") if workload.judges is None else workload.judges
        self._shared_judges = Judges(self._scoring, self._num_judges) if workload.shared_judges else None
        self._actors = dict[str, SimulatedActor]()
        self._lives = 0
        self._versions = dict[int, dict[int, int]]()  # of groups that are ready: tokens by version
        self._takes = self._sent = False  # the learner waits for its batch; a set of weights is on its way
        self._trained = False  # the step is done and not reported yet
        self._began = 0.0
        self._staleness = dict[int, int]()
        self._depth = self._deepest = 0
        self._depth_s = self._depth_at = 0.0
        for name in workload.names:
            self._join(name)
        for event in events:
            happens = partial(self._lose if isinstance(event, ActorLost) else self._join, event.name)
            self._clock.begin(event.at_s, happens)

    def run(self) -> Simulated:
        self._admission.register(1, 0, 0)
        self._publish(self._ask, whole=True)
        while self._admission.step < self._steps:
            if not self._clock.turn():
                raise ConfigError(
                    f"the run stands still after {self._clock.now:.3f} s, at step {self._admission.step} of {self._steps}: "
                    f"{len(self._admission.fleet.actors)} actors are left, and none can make what its batch lacks"
                )
        self._count_depth()
        seconds, steps = self._clock.now - self._began, self._steps - self._warm_up
        rate = 1 / seconds if seconds > 0 else float("inf")
        return Simulated(
            steps=self._steps,
            warm_up=self._warm_up,
            total_s=self._clock.now,
            seconds_per_step=seconds / steps,
            samples_per_s=steps * self._workload.samples * rate,
            staleness=dict(sorted(self._staleness.items())),
            queue_depth_mean=self._depth_s * rate if seconds > 0 else 0.0,
            queue_depth_max=self._deepest,
            roles={name: account.close(self._clock.now) for name, account in self._accounts.items()},
            scoring_load=self._scoring.load_s * rate if seconds > 0 else 0.0,
            ledger=self._admission.ledger,
        )

    # -- what actors report ------------------------------------------------------------------------------------------

    def draws(self, number: int) -> Draws:
        if number not in self._draws:
            self._draw(number // _DRAWN)
        return self._draws[number]

    def _draw(self, block: int) -> None:
        """Of `_DRAWN` groups at once."""
        workload, random = self._workload, np.random.default_rng([self._seed, block])
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
        known.has_put(credit.number, self._clock.now)
        # In exact mode a quarantine before it may have changed the version that it needs: it is made again.
        with suppress(RefusedError):
            self._admission.put(actor.name, credit.number, entry)
            self._versions[credit.number] = versions
        known.capacity = actor.capacity
        self._count_depth()
        self._pump()

    def reported(self, actor: SimulatedActor) -> None:
        known = self._admission.fleet.actors[actor.name]
        if actor.version >= 0:
            known.fence, known.version = self._admission.fence, actor.version
        known.capacity = actor.capacity
        self._pump()

    def waits_for(self, actor: SimulatedActor) -> str:
        """With groups that are being scored it waits for the scores where the learner does; else for a version that may begin
        the next group, if there is none."""
        within = actor.waits_within
        if within and self._takes:
            return within
        return within or "credit" if self._admission.may_begin(actor.version) else "weights"

    # -- the hub -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """What follows from a change, in the order of `Exchange`: adoptions, credits, the learner's batch."""
        admission = self._admission
        for name, actor in self._actors.items():
            target = admission.target(name)
            if target is not None and target != actor.version:
                actor.adopt(target)
        for name, credits in admission.credits().items():
            self._actors[name].begin(credits)
        if self._takes and admission.num_queued >= self._workload.groups_per_batch:
            self._take()
        for actor in self._actors.values():
            if actor.is_idle:
                actor.account.turn_to(self.waits_for(actor), self._clock.now)

    def _count_depth(self) -> None:
        now = self._clock.now
        self._depth_s += self._depth * (now - self._depth_at)
        self._depth, self._depth_at = self._admission.num_queued, now
        self._deepest = max(self._deepest, self._depth)

    def _join(self, name: str) -> None:
        if (account := self._accounts.get(name)) is None:
            account = self._accounts[name] = Account(self._clock.now, "weights")
        account.turn_to("weights", self._clock.now)
        judges = self._shared_judges or Judges(self._scoring, self._num_judges)
        actor = SimulatedActor(name, self._workload, self._costs, self, self._clock, account, judges, *self._cores["actor"])
        self._actors[name], self._lives = actor, self._lives + 1
        self._admission.fleet.join(name, Actor(actor.capacity, 0, -1, self._clock.now, life=str(self._lives)))
        self._pump()

    def _lose(self, name: str) -> None:
        actor = self._actors.pop(name)
        actor.end()
        if actor.judges is not self._shared_judges:
            actor.judges.end()
        actor.account.turn_to("lost", self._clock.now)
        self._admission.fleet.leave(name, "ended: its process is gone")
        self._pump()

    # -- the learner -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """Take the next batch, or wait for it."""
        self._accounts["learner"].turn_to("batch", self._clock.now)
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
        workload = self._workload
        seconds = self._costs.training_s(len(numbers), workload.prompt_tokens, tokens, workload.updates_per_step)
        self._accounts["learner"].turn_to("train", self._clock.now)
        self._clock.begin(seconds, self._finish, *self._cores["learner"])

    def _finish(self) -> None:
        """The update is made; its step is done once the weights of the step before have arrived."""
        self._trained = True
        self._accounts["learner"].turn_to("weights", self._clock.now)
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
        if step % self._workload.publish_every:
            self._ask()
        else:
            self._publish(self._ask, whole=self._workload.exact)

    def _restart(self) -> None:
        """What was counted until now was the warm-up."""
        self._began = self._depth_at = self._clock.now
        self._depth_s, self._deepest = 0.0, self._admission.num_queued
        self._scoring.restart()
        for account in self._accounts.values():
            account.restart(self._clock.now)

    def _publish(self, then: Callable[[], None], *, whole: bool) -> None:
        """Copy the weights; they travel while the learner goes on. whole: it waits for them, as with the first."""
        self._accounts["learner"].turn_to("publish", self._clock.now)

        def copied() -> None:
            self._sent = True
            self._clock.begin(self._costs.travel_s, arrived)
            if whole:
                self._accounts["learner"].turn_to("weights", self._clock.now)
            else:
                then()

        def arrived() -> None:
            self._sent = False
            self._admission.publish(self._admission.step)
            self._pump()
            if whole:
                then()
            elif self._trained:
                self._end_step()

        self._clock.begin(self._costs.copy_s, copied, *self._cores["learner"])
