"""The settings of sampling: what is refused, what cuts something off, and what may be left out where."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_rlhf.actors.config import GenerationConfig
from async_rlhf.buffers.sampling import GREEDY, TRUNCATING, Sampling


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": "1"},
        {"top_k": -1},
        {"top_k": 3.0},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.0},
        {"min_p": -0.1},
        {"top_q": 0.5},
    ],
    ids=str,
)
def test_what_is_out_of_range_or_of_another_type_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**given)


def test_the_first_setting_that_cuts_something_off_is_named_and_greedy_cuts_nothing() -> None:
    assert Sampling(temperature=0.5).truncation == GREEDY.truncation == ""
    assert Sampling(min_p=0.1, top_p=0.9).truncation == "top_p = 0.9"
    assert Sampling(temperature=0, top_k=5).truncation == ""
    assert [Sampling(**{name: 0.5 if name != "top_k" else 1}).truncation.split()[0] for name in TRUNCATING] == list(TRUNCATING)


def test_the_configuration_holds_every_setting_and_gives_them_as_one() -> None:
    config = GenerationConfig.model_validate({"group_size": 4, "temperature": 0.5, "top_k": 7})
    assert config.sampling == Sampling(temperature=0.5, top_k=7) and config.truncation == "top_k = 7"
    with pytest.raises(ValidationError, match="greater than 0"):
        GenerationConfig(temperature=0)
