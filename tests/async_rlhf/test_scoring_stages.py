"""The stages of scoring as data: what may be said of each, and the reference as one of them in a real run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from async_rlhf.actors.rewards.settings import settings_of
from async_rlhf.actors.rewards.signature import Signature
from async_rlhf.actors.scoring.model_stages import _ReferenceOptions, reference
from async_rlhf.actors.scoring.pool import STREAM
from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.commands import app
from async_rlhf.inspect.rollouts import records, replay
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.hosts.placement import nodes_of, placement_of
from async_rlhf.run.loading import load, override
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import stage_specs
from tests.conftest import QUICK, wait_for

ONE_JUDGE = {"rewards.functions": ["judge"], "rewards.options.judge": {"url": "http://127.0.0.1:1/v1", "model": "m"}}
IN_THE_ACTOR = {"scoring.stages.reference.placement": "actor", "loss.kl_coef": 0.1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scoring.stages.referense.workers": 1}, "scoring.stages.referense: .*did you mean 'reference'"),
        ({"scoring.stages.reasoning_gym.placement": "learner"}, 'is for \'reference\' only; a reward has "actor" or "process"'),
        ({"scoring.stages.reference.placement": "actor"}, "nothing asks for a reference; set loss.kl_coef above 0"),
        ({"scoring.stages.reference.batch_size": 4}, 'the learner computes this; set .*placement = "actor"'),
        ({"scoring.reference.threads": 2}, 'scoring.reference.threads is about a stage, .*set .*placement = "actor"'),
        ({**IN_THE_ACTOR, "scoring.stages.reference.stream_tokens": 8, "generation.top_p": 0.9}, "sample from all tokens"),
        (
            {**IN_THE_ACTOR, "scoring.stages.reference.stream_tokens": 8, "scoring.stages.reference.workers": 2},
            "set workers = 1",
        ),
        (
            {"scoring.stages.reasoning_gym.batchsize": 2},
            "unknown key .*reasoning_gym.batchsize': did you mean '.*reasoning_gym.batch_size'",
        ),
        ({**ONE_JUDGE, "scoring.stages.judge.workers": 2}, "runs on one event loop; set scoring.stages.judge.max_concurrency"),
        ({**IN_THE_ACTOR, "scoring.stages.reference.max_concurrency": 3}, "highest: 1, or set .*reference.workers = 3"),
        ({"rewards.functions": ["reference=exact"]}, "a reward is called 'reference'.*rename it"),
        ({"rewards.functions": ["generation=exact"]}, "a reward is called 'generation', as a stage of every run is"),
        ({"environment": "generation=configs/environments/calculator.py:calculator"}, "a stage of every run are both called"),
    ],
)
def test_a_stage_that_cannot_be_meant_is_refused_with_the_way_out(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight(load(QUICK, changed))


def test_stages_may_stand_in_one_scorer_process_for_all_actors(small: Callable[..., Any], tmp_path: Path) -> None:
    config = small(**{"scoring.placement": "process", "actors.count": 2, **IN_THE_ACTOR})
    stages = {spec.name: config.scoring.in_process(spec.name) for spec in stage_specs(config)}
    assert stages == {"reasoning_gym": True, "reference": False}
    nodes = nodes_of(config, placement_of(config), RunDir(config.run_dir), tmp_path)
    (scorer,) = [node for node in nodes if node.role == "scorer"]
    served = [scorer.arguments[0] in node.arguments for node in nodes if node.role == "actor"]
    assert served == [True, True]


def test_a_reference_reads_what_is_not_written_yet_and_forgets_it(small: Callable[..., Any]) -> None:
    config = small(**IN_THE_ACTOR, **{"scoring.stages.reference.stream_tokens": 4})
    stream, spec = settings_of(reference).stream, stage_specs(config)[-1]
    assert stream is not None
    begun = Signature.of(reference).arguments(
        [{"prompt_ids": [1, 2], "completion_ids": [3, 4], STREAM: 7, "source": "words"}], spec.options
    )
    judge = _ReferenceOptions.of(**spec.options).judge()
    stream.prefetch(**begun)
    assert judge.streams == {7}
    stream.forget([7], **spec.options)
    assert not judge.streams


def test_a_run_whose_actors_ask_the_reference_learns_what_the_learner_would_have_asked(small: Callable[..., Any]) -> None:
    streaming = {"scoring.stages.reference.stream_tokens": 4}
    config = small(**IN_THE_ACTOR, **streaming, max_steps=2, **{"queue.keep_rollouts": True})
    result = train(config, quiet=True)
    rollouts = [rollout for record in records(Reading(RunDir.existing(result.run_dir))) for rollout in record["rollouts"]]
    assert all(len(rollout["reference"]) == len(rollout["completion_ids"]) for rollout in rollouts)
    assert all(step["rewards/reference/failed_ratio"] == 0.0 and step["kl/reference"] is not None for step in result.metrics)
    assert all(step["stages/reference/seconds"] > 0 for step in result.metrics)
    computed = override(config, {"name": "computed", "scoring.stages": {}, "output_dir": str(Path(result.run_dir).parent)})
    again = replay(RunDir.existing(result.run_dir), computed).read_metrics()
    for recorded, own in zip(result.metrics, again, strict=True):
        assert recorded["kl/reference"] == pytest.approx(own["kl/reference"], abs=1e-4)
        assert recorded["loss"] == pytest.approx(own["loss"], abs=1e-4)


@pytest.mark.rest
def test_a_scorer_process_that_is_killed_is_started_again_and_no_score_is_lost(
    command: Callable[..., Any], small_arguments: Callable[..., list[str]], tmp_path: Path
) -> None:
    overrides = {"scoring.stages": {"reference": {"placement": "process"}}, "scoring.placement": "process"}
    settings = {**overrides, "loss.kl_coef": 0.1, "max_steps": 500}
    started = command(*small_arguments(**settings))
    scorer = started.child("scorer")
    run_dir = RunDir(tmp_path / "runs" / "quick")
    wait_for(lambda: len(run_dir.read_metrics()) >= 2, "two steps")
    status = ["status", str(run_dir.path)]
    wait_for(lambda: "scorer: answered " in CliRunner().invoke(app, status).output, "the scorer to say what it has answered")
    scorer.kill()
    wait_for(lambda: started.child("scorer") != scorer, "another scorer")
    done = len(run_dir.read_metrics())
    # No more than `max_ahead` groups were scored before it died.
    wait_for(lambda: len(run_dir.read_metrics()) >= done + 4, "steps whose scores are those of the other")
    started.process.send_signal(signal.SIGINT)
    code, output = started.finish()
    assert code == 0 and "scorer ended by signal 9 (SIGKILL); starting it again" in output, output
    assert all(step["rewards/failed_ratio"] == 0.0 for step in run_dir.read_metrics())
