"""`plan --from-run`: a run whose times are known is found again, and what it has reached serves a plan; `try machine`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from async_rlhf.api import train
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.queue.bound import Bound
from async_rlhf.cli.commands import app
from async_rlhf.experiments.planning.calibration import RunTimes, measure, reached, times_of_run, what_if
from async_rlhf.experiments.planning.command import what_if_as_json, what_if_lines
from async_rlhf.experiments.planning.model.stages import Layout, decode_step_s, training_s
from async_rlhf.experiments.planning.placement.roles import Roles
from async_rlhf.experiments.planning.placement.spec import Spec
from async_rlhf.run.config import Config
from async_rlhf.run.loading import validated
from async_rlhf.run.run_dir import RunDir
from tests.formats.sample import copied
from tests.planning.specs import spec

RUN = RunTimes(
    bound=Bound(groups_per_batch=8, max_staleness=0, num_groups=800), steps=100, actors=1, slots=32, rows=32, mean_length=30.0,
    longest=60.0, step_s=10.0, learner_idle=0.7, train_s=2.5, alive=16.0, decode_s=0.1, copy_s=0.2, travel_s=0.5, adopt_s=0.3,
    score_s=0.5, judges=3.0,
)  # fmt: skip


def with_bound(bound: int, **changes: Any) -> RunTimes:
    return replace(RUN, bound=replace(RUN.bound, max_staleness=bound, **changes))


def test_by_hand() -> None:
    """Once around: the longest row, the last score, training, the weights. In a batch alone 16 rows are decoded in the mean, as
    in the run; with more batches 32, in steps that are longer by a quarter."""
    found = what_if(RUN)
    assert set(found.by_bound) == {0, 1, 2, 4, 8}
    rest, judges = 0.5 + 2.5 + 0.7 + 0.3, 32 * 0.5 / 3
    seconds = [found.by_bound[bound].seconds for bound in (0, 1, 2, 8)]
    assert seconds == pytest.approx([60 * 0.1 + rest, (60 * 0.125 + rest) / 2, judges, judges])
    assert found.by_bound[8].bound_by.name == "judges" and found.best == 2 and found.factor == pytest.approx(1.0)
    text = "\n".join(what_if_lines(found))
    assert "[queue]\nmax_staleness = 2" in text and "(this run)" in text and "an actor more" in text
    assert json.loads(json.dumps(what_if_as_json(found), allow_nan=False))["settings"] == {"queue": {"max_staleness": 2}}
    # With 8 slots, of which 24 rows wait for theirs: 960 tokens by 8 rows a step, and adoption.
    crowded = what_if(replace(with_bound(4), slots=8, judges=100.0, step_s=120 * 0.0875 + 0.3))
    assert crowded.by_bound[0].seconds == pytest.approx((60 + 90) * 0.085 + rest)
    assert crowded.by_bound[4].seconds == pytest.approx(crowded.run.step_s) and crowded.factor == pytest.approx(1.0)
    assert crowded.with_another_actor.seconds == pytest.approx(60 * 0.0875 + 0.3)


@given(st.integers(0, 8), st.floats(0.1, 100), st.integers(1, 64), st.integers(1, 4))
def test_its_own_speed_is_met_and_more_staleness_or_actors_are_never_slower(
    bound: int, step_s: float, slots: int, actors: int
) -> None:
    run = replace(with_bound(bound), step_s=step_s, slots=slots, actors=actors)
    found = what_if(run)
    own = found.by_bound[bound].seconds
    assert own == pytest.approx(step_s) or (own > step_s and found.factor < 1)  # another circuit takes longer than the run
    assert all(later.seconds <= earlier.seconds * (1 + 1e-9) for earlier, later in pairwise(found.by_bound.values()))
    assert found.with_another_actor.seconds <= own * (1 + 1e-9)


def test_a_bound_under_which_the_run_would_hang_is_left_out() -> None:
    assert set(what_if(with_bound(2, publish_every=3)).by_bound) == {2, 4, 8}


def question(**efficiency: float) -> Spec:
    return spec(lengths={"prompt": 16, "mean": 30, "longest": 60}, efficiency=efficiency)


def config() -> Config:
    return validated({"name": "run", "model": "MODEL", "data": {"source": "DATA"}, "learner": {"micro_batch_tokens": 64}})


def of(spec: Spec, *, faster: float = 1.0) -> RunTimes:
    """A run on one device for each role, as the stages give for the spec."""
    roles, efficiency = Roles(spec), spec.efficiency
    step_s = training_s(roles.place(Layout(), efficiency.of_training), 32, 16 + 30, micro_batches=32)
    decode_s = decode_step_s(roles.engine(1), 16, 16 + 30 / 2)
    return replace(RUN, train_s=step_s / faster, decode_s=decode_s / faster, travel_s=2.0)


def test_the_shares_that_a_run_has_reached_are_found() -> None:
    truth = question(training=0.3, launch_s=0.006)
    found = reached(question(), config(), of(truth))
    assert found.training == pytest.approx(0.3, rel=1e-3) and found.launch_s == pytest.approx(0.006, rel=1e-3)
    assert found.decode == question().efficiency.decode
    assert found.weights_bytes_per_s == pytest.approx(Roles(truth).policy.weight_bytes / 2.0)
    # An engine that is faster than its share allows has a larger one.
    found = reached(question(decode=0.2), config(), of(question(decode=0.5, launch_s=0.0)))
    assert found.launch_s == 0 and found.decode == pytest.approx(0.5, rel=1e-3)
    with pytest.raises(ConfigError, match=r"a decode step of the run took .* by the peaks of the spec's device 'A100-80GB'"):
        reached(question(), config(), of(question(), faster=100.0))


@pytest.mark.rest
def test_the_times_of_a_real_run_make_a_step_of_about_its_length(small: Callable[..., Any]) -> None:
    config = small(max_steps=100, **{"engine.slots": 8, "checkpoint.save_every": 100})
    ended = RunDir.existing(train(config, quiet=True).run_dir)
    run = times_of_run(ended)
    assert (run.bound.groups_per_batch, run.rows, run.slots, run.bound.max_staleness) == (4, 16, 8, 1)
    assert 1 <= run.mean_length <= run.longest <= 12 and 1 <= run.alive <= 8
    assert min(run.decode_s, run.train_s, run.copy_s, run.travel_s, run.adopt_s) > 0 and 0 <= run.learner_idle < 1
    assert 0.4 < what_if(run).factor < 2.5
    shown = CliRunner().invoke(app, ["plan", "--from-run", str(ended.path)])
    assert shown.exit_code == 0 and "100 steps of 16 completions by 1 actor(s), max_staleness 1" in shown.output


def test_a_run_of_too_few_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has done 3 steps: at least 4 are needed"):
        times_of_run(copied(tmp_path, 3))


def test_a_machine_that_was_measured_is_the_device_of_a_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_rlhf.experiments.planning.command._MEASURED_S", 0.01)
    shown = CliRunner().invoke(app, ["try", "machine"])
    assert shown.exit_code == 0, shown.output
    roles = Roles(spec(cluster=tomllib.loads(shown.stdout)["cluster"]))
    assert roles.device.is_cpu and min(roles.device.model_dump().values()) > 0
    with pytest.raises(ConfigError, match=r"'meteor' cannot be used.*use 'cpu'"):
        measure("meteor", "float32", 1, 0.01)
