"""Policies of the cache at equal budget: arms keep as much as each other, rows become a picture and a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from async_rlhf.experiments.kv_policy.arms import ARMS, FULL, policy, settings, usual_chunk
from async_rlhf.experiments.kv_policy.cost import cost_rows
from async_rlhf.experiments.kv_policy.page import draw, table
from async_rlhf.experiments.kv_policy.prose import prose_rows
from async_rlhf.experiments.kv_policy.rows import Row, read_csv, write_csv
from async_rlhf.run.config import load
from tests.conftest import QUICK


def test_every_arm_keeps_as_much_as_the_window_alone_and_none_is_the_engines_default() -> None:
    ends = np.arange(20) % 5 == 0
    ids = np.random.default_rng(0).integers(0, 20, 200)
    for budget in (8, 24, 33):
        kept = {arm: policy(arm, budget, ends, usual_chunk(ids.tolist(), ends)).mask(ids)[-1] for arm in ARMS}
        assert {arm: int(seen.sum()) for arm, seen in kept.items()} == dict.fromkeys(ARMS, budget)
        assert len({seen.tobytes() for seen in kept.values()}) == len(ARMS), "no two arms are the same"
    for arm in ARMS:
        engine = load(QUICK, {"engine": settings(arm, 24, (" ",), 5), "queue.max_staleness": 0}).engine
        assert engine.kv_budget == 24


def test_the_less_is_kept_of_prose_the_further_it_is_from_full_attention() -> None:
    rows = list(prose_rows(Path(load(QUICK).model), [16, 100], num_texts=1, length=120))
    divergence = {(row.arm, row.budget): row.value for row in rows if row.measure == "kl"}
    assert all(divergence[arm, 16] > divergence[arm, 100] > 0 for arm in ARMS)
    assert [row.arm for row in rows if row.measure == "nll"].count(FULL) == 1


def test_the_bytes_of_a_bounded_cache_are_those_of_any_length() -> None:
    rows = list(cost_rows((72, 96), budget=24, turns=1))
    size = {(row.arm, row.case): row.value for row in rows if row.measure == "bytes"}
    assert size["window", 72] == size["window", 96] == size["first", 96] < size[FULL, 72] < size[FULL, 96]


def test_rows_come_back_from_their_file_and_become_a_picture_and_a_table(tmp_path: Path) -> None:
    rows = [
        Row("prose", arm, budget, case, measure, 1.0 + number + case)
        for number, arm in enumerate(ARMS)
        for budget in (16, 32)
        for case in range(3)
        for measure in ("nll", "kl")
    ]
    rows += [Row("cost", arm, 24, length, "bytes", 1e6) for arm in (FULL, "window", "first") for length in (64, 128)]
    write_csv(rows, tmp_path / "rows.csv")
    assert read_csv(tmp_path / "rows.csv") == rows
    assert "| 16 | 2.000 | 3.000 (+1.000 ± 0.000) | 4.000 (+2.000 ± 0.000)" in table(rows), "differences within a text"
    draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
