"""The learner benchmark gives every side the same samples, and says of their seconds what they say. No rate is asserted."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from async_rlhf.experiments.throughput import __main__ as all_parts
from async_rlhf.experiments.throughput.__main__ import Part
from async_rlhf.experiments.throughput.learner import judged, show
from async_rlhf.experiments.throughput.learner_sides import (
    Seconds,
    bare,
    bare_batches,
    long_tailed,
    make_groups,
    off,
    ours,
    share_of_diagnostics,
)
from async_rlhf.experiments.throughput.sides import MODEL


def test_lengths_are_long_tailed_and_always_the_same() -> None:
    lengths = long_tailed(200, 8)
    assert np.array_equal(lengths, long_tailed(200, 8))
    assert lengths.min() >= 1 and lengths.max() == 256
    assert np.median(lengths) == pytest.approx(48, rel=0.1)
    assert lengths.mean() > 1.3 * np.median(lengths)


def test_the_bare_loop_learns_from_the_tokens_that_we_learn_from() -> None:
    groups = make_groups(long_tailed(3, 4), vocabulary=99)
    borne = sum(int(batch.bears_loss.sum()) for batch in bare_batches(groups))
    assert borne == sum(group.num_tokens for group in groups)


def test_a_ratio_is_the_median_over_turns_and_above_one_where_we_are_faster() -> None:
    seconds = {
        "ours": [Seconds(1.0, 1.0), Seconds(2.0, 1.0), Seconds(1.0, 1.0)],
        "off": [Seconds(1.0, 0.99)] * 3,
        "bare": [Seconds(1.2, 0.5), Seconds(2.2, 0.5), Seconds(9.0, 0.5)],
    }
    result = judged("tiny", "alone", 100, seconds, overhead=0.01)
    assert result.ratio["bare"] == pytest.approx(1.2)
    assert result.cpu_ratio == {"off": 0.99, "bare": 0.5}
    assert result.tokens_per_s["ours"] == 100.0
    assert "goal 0.9" in show(result) and "goal 1.3" not in show(result)


def test_every_side_of_this_process_makes_steps_and_diagnostics_are_a_part_of_ours() -> None:
    groups = make_groups(np.array([[3, 5], [2, 4]]), vocabulary=99)
    for side in (ours(MODEL, groups, 1), off(MODEL, groups, 1), bare(MODEL, groups)):
        assert side().wall > 0
    assert 0 < share_of_diagnostics(MODEL, groups, 1) < 1


def test_every_part_is_a_module_and_named_in_the_help() -> None:
    app = typer.Typer()
    app.command()(all_parts.main)
    shown = CliRunner().invoke(app, ["--help"]).stdout
    for part in Part:
        assert importlib.util.find_spec(f"async_rlhf.experiments.throughput.{part}") is not None
        assert part in shown


def test_a_part_that_fails_is_named_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(part: Part, as_json: bool, require_trl: bool) -> int:
        ran.append(part)
        return int(part is Part.QUEUE)

    monkeypatch.setattr(all_parts, "run", run)
    app = typer.Typer()
    app.command()(all_parts.main)
    done = CliRunner().invoke(app, [])
    assert ran == list(Part)
    assert done.exit_code == 1 and "failed: queue" in done.output
