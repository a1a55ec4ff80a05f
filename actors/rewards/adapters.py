"""Rewards written for other systems, called the way they expect and score the way they answer.

    form         called as                                                         known by
    trl          f(prompts, completions, **columns) -> list                        its parameters
    verl         f(data_source, solution_str, ground_truth, extra_info) -> number or {"score": ...}    its parameters
    openrlhf     f(queries, prompts, labels) -> list, tensor or {"rewards": ...}   its parameters
    gym          f(answer, entry) -> number (a reasoning-gym scorer)               `gym:TARGET`

TRL's form needs no adapter, it is one of ours (`signature`). Each `from_*` takes the foreign object and gives a function
of ours; `adapted` chooses by what it sees. The functions themselves stay unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from async_rlhf.actors.rewards.answer import as_text, scalar, shown
from async_rlhf.actors.rewards.settings import SETTINGS, RewardFunction, settings_of
from async_rlhf.actors.rewards.signature import ALTERNATIVES
from async_rlhf.buffers.errors import RewardError
from async_rlhf.buffers.score import MAX_SCORE, Score

# Where the right answer may stand, in the order in which it is looked for.
_TRUTH = ("ground_truth", "answer", "label", "labels", "reward_model", "solution")


def adapted(target: Any, scheme: str = "") -> RewardFunction:
    """A function of ours that does what `target` does. Raises RewardError for what is no reward in any known form."""
    if scheme:
        return ADAPTERS[scheme](target)
    if isinstance(target, type):
        raise RewardError(
            f"is the class {target.__name__}; pass an instance of it, or name one: my_reward = {target.__name__}()"
        )
    if not callable(target):
        raise RewardError(f"is a {type(target).__name__}, not a function")
    names = _parameters(target).keys()
    if {"solution_str", "ground_truth"} <= names:
        return from_verl(target)
    if {"queries", "labels"} <= names:
        return from_openrlhf(target)
    return target  # type: ignore[no-any-return]


def from_verl(function: RewardFunction) -> RewardFunction:
    """verl's `compute_score`. The truth is a column `ground_truth` (or `answer`, ...); a dict's other numbers are metrics."""

    def arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
        given = {
            **fields,
            "data_source": fields.get("data_source", ""),
            "solution_str": fields["completion"],
            "ground_truth": _truth(fields),
            "extra_info": fields.get("extra_info"),
        }
        return taken(function, given)

    def score(result: Any) -> Any:
        if not isinstance(result, Mapping):
            return result[0] if isinstance(result, tuple | list) and result else result
        if "score" not in result:
            raise ValueError(f"returned {shown(result)} without a 'score'")
        return _scored(result["score"], {name: value for name, value in result.items() if name != "score"})

    return _adapter(function, arguments, score, _TRUTH)


def from_openrlhf(function: RewardFunction) -> RewardFunction:
    """OpenRLHF's `reward_func(queries, prompts, labels)`: a query is prompt and completion; `extra_logs` are metrics."""

    def arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
        prompt = as_text(fields["prompt"])
        given = {"queries": [prompt + fields["completion"]], "prompts": [prompt], "labels": [_truth(fields)]}
        return taken(function, given)

    def score(result: Any) -> Any:
        if not isinstance(result, Mapping):
            return _only(result)
        if "rewards" not in result:
            raise ValueError(f"returned {shown(result)} without 'rewards'")
        logs = {name: _only(value) for name, value in (result.get("extra_logs") or {}).items()}
        return _scored(_only(result["rewards"]), logs)

    return _adapter(function, arguments, score, _TRUTH)


def from_reasoning_gym(scorer: RewardFunction) -> RewardFunction:
    """A reasoning-gym scorer, `dataset.score_answer`: its `answer` is the completion, its `entry` the column of that name."""

    def arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"answer": fields["completion"], "entry": fields["entry"]}

    return _adapter(scorer, arguments, lambda result: result, ("entry",))


ADAPTERS: Mapping[str, Callable[[Any], RewardFunction]] = {
    "trl": adapted,
    "verl": from_verl,
    "openrlhf": from_openrlhf,
    "gym": from_reasoning_gym,
}


def _adapter(
    function: RewardFunction,
    arguments: Callable[[Mapping[str, Any]], dict[str, Any]],
    score: Callable[[Any], Any],
    alternatives: Sequence[str],
) -> RewardFunction:
    """A function of ours that takes every column; the names of which one must be there are left on it for the check."""
    if inspect.iscoroutinefunction(function):

        async def call(**fields: Any) -> Any:
            return score(await function(**arguments(fields)))

    else:

        def call(**fields: Any) -> Any:  # type: ignore[misc]
            return score(function(**arguments(fields)))

    call.__name__ = getattr(function, "__name__", type(function).__name__)
    setattr(call, ALTERNATIVES, (tuple(alternatives),))
    setattr(call, SETTINGS, settings_of(function))
    return call


def _truth(fields: Mapping[str, Any]) -> Any:
    found = next((fields[name] for name in _TRUTH if fields.get(name) is not None), None)
    # verl's own data sets nest it.
    return found["ground_truth"] if isinstance(found, Mapping) and "ground_truth" in found else found


def _scored(value: Any, metrics: Mapping[str, Any]) -> Any:
    """The value with those of the metrics that are numbers; any other value is left to `answer.read`."""
    numbers = {name: _number(each) for name, each in metrics.items() if _is_number(each)}
    if not _is_number(value):
        return value
    return Score(_number(value), metrics=numbers)


def _is_number(value: Any) -> bool:
    plain = scalar(value)
    return isinstance(plain, int | float) and abs(plain) <= MAX_SCORE


def _number(value: Any) -> float:
    if not _is_number(value):
        raise ValueError(f"returned {shown(value)}; a number within +-{MAX_SCORE:g} was expected")
    return float(scalar(value))


def _only(result: Any) -> Any:
    """The one element of a list or tensor of one; a plain number is itself."""
    plain = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(plain, list | tuple):
        return plain
    if len(plain) != 1:
        raise ValueError(f"returned {shown(plain)} for 1 completion; a list of 1 score was expected")
    return plain[0]


def taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that it takes."""
    parameters = _parameters(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in given.items() if takes_all or name in parameters}


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
