"""The arithmetic of the benchmark against vLLM. No rate is measured here."""

from __future__ import annotations

from async_rlhf.experiments.throughput.engine import Load
from async_rlhf.experiments.throughput.vllm_side import result_of


def test_the_ratio_is_ours_over_vllms_by_the_medians_of_the_turns() -> None:
    result = result_of(Load("two", (10, 20), 2), {"vllm": [1.0, 2.0, 90.0], "torch": [0.5, 0.1, 2.0]})
    assert (result.vllm_tokens_per_s, result.engine_tokens_per_s, result.ratio) == (15.0, 60.0, 4.0)
    assert result.useful_tokens == 30
