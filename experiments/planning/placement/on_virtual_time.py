"""A plan on virtual time: the queue's own `Admission`, with actors and a learner that take what the plan has found for its
stages.

What the circuits of `schedules` leave out is in it: groups are credited one by one, rows wait for slots, lengths are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from async_rlhf.experiments.planning.model.schedules import StageTime
from async_rlhf.experiments.planning.model.stages import Layout, Place, decode_step_s, prefill_s
from async_rlhf.experiments.planning.placement.evaluation import Plan, model_seconds
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.simulation.run import Simulated, simulate
from async_rlhf.experiments.planning.simulation.workload import Costs, Workload

_QUEUED = (0, 8, 16, 32, 64)
_QUEUED_TURNS = (128, 256)  # besides, where groups wait for environments and hold no slot meanwhile
_MOST_AHEAD = 16
_MOST_ROWS = 12_500  # completions of the simulations that are compared: enough for an example of 16 devices
_UNBOUNDED = 1024  # steps: the most that a configuration takes


@dataclass(frozen=True, kw_only=True)
class PlanCosts(Costs):
    """By the layouts of a plan. generator: of one engine. token_s: of the learner, for each completion token of a step."""

    generator: Place
    token_s: float

    def decode_s(self, rows: int, context: float) -> float:
        return decode_step_s(self.generator, rows, context)

    def prefill_s(self, prompts: int, tokens: int) -> float:
        return prefill_s(self.generator, prompts, tokens)

    def training_s(self, prompts: int, prompt_tokens: int, completion_tokens: int, updates: int) -> float:
        return self.token_s * completion_tokens


def run_of(plan: Plan, roles: Roles) -> tuple[Workload, PlanCosts]:
    """What is simulated of a plan."""
    spec, layout = roles.spec, plan.layout("generate")
    learner = next(each for each in plan.filled if "train" in each.choices)
    apart = max((model_seconds(each, "score") for each in plan.filled if each is not learner), default=0.0)
    environment = spec.environment
    sent = plan.times.get("publish", plan.times.get("switch", StageTime(0.0, 0.0)))
    copy_s = sent.busy_s if sent.span_s > sent.busy_s else 0.0  # then it travels while training goes on
    workload = Workload(
        groups_per_batch=spec.batch.groups,
        group_size=spec.batch.group_size,
        lengths=[max(1, round(length / environment.turns)) for length in roles.lengths],
        turns=environment.turns,
        environment_s=(environment.seconds,),
        observation_tokens=environment.observation_tokens,
        prompt_tokens=roles.prompt,
        max_staleness=int(min(plan.candidate.max_staleness, _UNBOUNDED)),
        updates_per_step=spec.batch.updates_per_step,
        actors=layout.data,
        slots=plan.slots,
        queued_groups=0,
        # models with devices of their own take their time of each completion, as many at once as are judged at once
        reward_s=(spec.reward.seconds + apart * spec.reward.concurrency / roles.rows,),
        judges=spec.reward.concurrency,
        shared_judges=True,
    )
    steps = plan.times["train"].busy_s + model_seconds(learner, "score")
    costs = PlanCosts(
        generator=roles.place("generate", Layout(tensor=layout.tensor)),
        token_s=steps / (roles.rows * sum(workload.lengths) / len(workload.lengths) * environment.turns),
        copy_s=copy_s,
        travel_s=sent.span_s - copy_s,
        adopt_s=plan.times["adopt"].busy_s if "adopt" in plan.times else 0.0,
    )
    return workload, costs


def simulate_plan(plan: Plan, roles: Roles, *, steps: int, queued_groups: int = 0) -> Simulated:
    """`steps` learner steps. queued_groups: as `actors.queued_groups`."""
    workload, costs = run_of(plan, roles)
    return simulate(replace(workload, queued_groups=queued_groups), costs, steps=steps)


def best_queued_groups(plan: Plan, roles: Roles) -> int:
    """Of a few choices that with which the simulated step is shortest.

    Rows of a group end one by one, and the group counts until the last has ended: an actor that holds no more groups than
    its slots take leaves slots empty. One that holds more takes groups that another could have begun earlier.
    """
    steps = 2 * (int(min(plan.candidate.max_staleness, _MOST_AHEAD)) + 2) + 4
    choices = (*_QUEUED, *_QUEUED_TURNS) if roles.spec.environment.waits_s else _QUEUED
    workload, costs = _part_of(*run_of(plan, roles), most=_MOST_ROWS // steps)
    return min(
        choices, key=lambda queued: simulate(replace(workload, queued_groups=queued), costs, steps=steps).seconds_per_step
    )


def _part_of(workload: Workload, costs: PlanCosts, most: int) -> tuple[Workload, PlanCosts]:
    """Some of the actors with their share of the batch, of the judges and of the learner: at most about so many completions."""
    actors = max(1, min(workload.actors, round(workload.actors * most / workload.samples)))
    share = actors / workload.actors
    judges = None if workload.judges is None else max(1, round(workload.judges * share))
    groups = max(1, round(workload.groups_per_batch * share))
    part = replace(workload, actors=actors, groups_per_batch=groups, judges=judges)
    return part, replace(costs, token_s=costs.token_s * workload.groups_per_batch / groups)


def lines(plan: Plan, found: Simulated) -> Iterator[str]:
    """For a terminal."""
    yield (
        f"On virtual time, with the queue's own admission, {found.steps} steps: {found.seconds_per_step:.3g} s a step "
        f"({plan.step.seconds:.3g} by its circuits), {found.samples_per_s:.3g} samples/s, bound by {found.bound_by}"
    )
    tokens = sum(found.staleness.values())
    ages = ", ".join(f"{age}: {count / tokens:.0%}" for age, count in sorted(found.staleness.items()))
    yield f"  tokens by staleness in steps: {ages} (mean {found.staleness_mean:.2f})"
    yield f"  groups that are ready and wait: {found.queue_depth_mean:.1f} in the mean, {found.queue_depth_max} at most"
    actors = [time for name, time in found.roles.items() if name not in ("learner", "scoring")]
    idle = sum(time.idle for time in actors) / len(actors) if actors else math.nan
    waits = sorted({time.waits_for for time in actors} - {""})
    learner = found.roles["learner"]
    yield f"  idle: actors {idle:.0%}{_for(waits)}, learner {learner.idle:.0%}{_for([learner.waits_for])}"


def _for(waits: Sequence[str]) -> str:
    named = [each for each in waits if each]
    return f" (waiting for {', '.join(named)})" if named else ""
