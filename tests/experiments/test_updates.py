"""The benchmark of updates on a small load: it ends in every mode, and its numbers hang together."""

from __future__ import annotations

from typing import Any

import pytest

from async_rlhf.experiments.throughput import updates


@pytest.mark.parametrize("mode", ["keep", "interrupt", "finish"])
def test_an_update_is_measured_in_every_mode(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "SEQUENCES", 3)
    monkeypatch.setattr(updates, "STEPS_BETWEEN", 3)
    monkeypatch.setattr(updates, "COMPLETION_TOKENS", (3, 12))
    row = updates.measure_update(mode, 2).row()
    assert (row.load, row.turns) == (mode, 2)
    gap, last = row.sides["gap"], row.figures["all_on_p99_ms"]
    assert gap is not None and last is not None and 0 < gap <= (row.figures["gap_p99_ms"] or 0) and gap <= last


def test_the_first_token_is_measured_with_and_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LONG_PROMPT", 40)
    row = updates.measure_first_token(1)
    assert row.sides["apart"] and row.sides["shared"]
    assert row.ratio == pytest.approx(row.sides["apart"] / row.sides["shared"], rel=0.05)
