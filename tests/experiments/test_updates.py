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
    result = updates.measure_update(mode, 2)
    assert result.mode == mode and result.updates == 2
    assert 0 < result.gap_p50_ms <= result.gap_p99_ms
    assert result.gap_p50_ms <= result.all_on_p50_ms <= result.all_on_p99_ms


def test_the_first_token_is_measured_with_and_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "LONG_PROMPT", 40)
    result = updates.measure_first_token(1)
    assert result.members == 8 and result.ratio == pytest.approx(result.apart_ms / result.shared_ms, rel=0.05)
