"""The stages of scoring as data: what may be said of each, and the reference as one of them in a real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.scoring.graph import drawing, stages
from async_rlhf.api import preflight, run
from async_rlhf.config import load, override
from async_rlhf.rollouts import records, replay
from async_rlhf.run_dir import RunDir
from async_rlhf.scoring import stage_specs
from buffers.errors import ConfigError
from tests.conftest import QUICK

IN_THE_ACTOR = {"scoring.stages.reference.placement": "actor", "loss.kl_coef": 0.1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scoring.stages.referense.workers": 1}, "scoring.stages.referense: .*did you mean 'reference'"),
        ({"scoring.stages.reasoning_gym.placement": "learner"}, "is for 'reference' only; a reward has \"actor\""),
        ({"scoring.stages.reference.placement": "actor"}, "nothing asks for a reference; set loss.kl_coef above 0"),
        ({"scoring.stages.reference.batch_size": 4}, 'the learner computes this; set .*placement = "actor"'),
        ({**IN_THE_ACTOR, "scoring.stages.reference.stream_tokens": 8, "generation.top_p": 0.9}, "sample from all tokens"),
        (
            {**IN_THE_ACTOR, "scoring.stages.reference.stream_tokens": 8, "scoring.stages.reference.workers": 2},
            "set workers = 1",
        ),
        ({"rewards.functions": ["reference=exact"]}, "a reward is called 'reference'.*rename it"),
    ],
)
def test_a_stage_that_cannot_be_meant_is_refused_with_the_way_out(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(load(QUICK, changed))


def test_the_reference_stands_in_the_graph_where_an_actor_computes_it() -> None:
    config = load(
        QUICK, {**IN_THE_ACTOR, "scoring.stages.reference.stream_tokens": 4, "scoring.stages.reference.batch_size": 8}
    )
    assert preflight(config) > 0
    drawn = drawing(stages(stage_specs(config), config.scoring, config.generation, config.engine))
    assert drawn[2] == (
        "-> reference  [up to 8 completions within 0.02 s; 1 own worker processes, 1 at once, 60 s; "
        "reads generation along, every 4 tokens]"
    )
    assert "reference" not in str(stage_specs(override(config, {"scoring.stages": {}})))


def test_a_run_whose_actors_ask_the_reference_learns_what_the_learner_would_have_asked(small: Callable[..., Any]) -> None:
    streaming = {"scoring.stages.reference.stream_tokens": 4, "scoring.stages.reference.batch_wait_s": 0.0}
    config = small(**IN_THE_ACTOR, **streaming, max_steps=2, **{"queue.keep_rollouts": True})
    result = run(config, quiet=True)
    rollouts = [rollout for record in records(RunDir.existing(result.run_dir)) for rollout in record["rollouts"]]
    assert all(len(rollout["reference"]) == len(rollout["completion_ids"]) for rollout in rollouts)
    assert all(step["rewards/reference/failed_ratio"] == 0.0 and step["kl/reference"] is not None for step in result.metrics)
    assert all(step["stages/reference/seconds"] > 0 for step in result.metrics)
    computed = override(config, {"name": "computed", "scoring.stages": {}, "output_dir": str(Path(result.run_dir).parent)})
    again = replay(RunDir.existing(result.run_dir), computed).read_metrics()
    for recorded, own in zip(result.metrics, again, strict=True):
        assert recorded["kl/reference"] == pytest.approx(own["kl/reference"], abs=1e-4)
        assert recorded["loss"] == pytest.approx(own["loss"], abs=1e-4)
