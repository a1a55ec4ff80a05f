"""How a reward is called: which of a completion's fields and columns go to which of its parameters.

Three forms, known by the parameters' names and the decorator:

    one      f(completion, prompt, answer, ...)                   -> one score
    list     f(prompts, completions, answer, ...)                 -> a list; TRL's form: every argument is a list, and a
             completion is a list of messages where its prompt is one
    group    @reward(scope="group") f(completions, prompt, ...)   -> a list, one for each member of the prompt's group

Never here: finding a function by name (`loading`), or what calls it and when (`async_rlhf.actors.scoring`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

from async_rlhf.actors.rewards.answer import Answer, read, read_list
from async_rlhf.actors.rewards.settings import RewardFunction, settings_of
from async_rlhf.buffers.errors import ConfigError, RewardError, did_you_mean
from async_rlhf.buffers.images import IMAGE, IMAGES

# The fields of every completion; a parameter is one of these or a column of the data.
FIELDS = frozenset({"completion", "prompt", "model_prompt", "completion_ids", "prompt_ids", "finish_reason"})

# TRL's names for lists of ours. A function with one of these parameters is called TRL's way.
_LISTED = {"prompts": "prompt", "completions": "completion", "stream_ids": "stream_id"}
# The members' own fields in the group form; everything else belongs to the prompt, which they share.
_GROUPED = {"completions": "completion", "completion_ids": "completion_ids", "finish_reasons": "finish_reason"}
# What TRL passes and an actor does not have: never passed here, so a function may not require them.
_TRL_ONLY = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
# An adapter's parameter that any one of several columns can fill: name -> the columns, in order.
ALTERNATIVES = "__reward_alternatives__"


@dataclass(frozen=True)
class Signature:
    """The parameters of a function."""

    required: tuple[str, ...]
    """Parameter names as written."""
    optional: tuple[str, ...]
    """Likewise."""
    any_column: bool
    """Whether it takes `**columns`."""
    form: Literal["one", "list", "group"]
    is_async: bool
    alternatives: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, function: RewardFunction) -> Signature:
        """Raises RewardError for a function whose arguments cannot be given by name."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise RewardError(f"{function!r} does not say what arguments it takes; wrap it in a function") from error
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
        if positional:
            raise RewardError(f"{function!r} takes {positional} by position; arguments are given by name: remove the '/'")
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        call = getattr(function, "__call__", None)  # noqa: B004  its kind is asked for: an object may have an asynchronous one
        form: Literal["one", "list", "group"] = "list" if any(p.name in _LISTED for p in named) else "one"
        return cls(
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            any_column=any(p.kind is p.VAR_KEYWORD for p in parameters),
            form="group" if settings_of(function).scope == "group" else form,
            is_async=any(map(inspect.iscoroutinefunction, (function, call))),
            alternatives=getattr(function, ALTERNATIVES, ()),
        )

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Names of the fields and columns a call can use, None for all: what has to travel to another process."""
        if self.any_column:
            return None
        names = tuple(self._renamed.get(name, name) for name in self.required + self.optional)
        names += (IMAGES,) if IMAGE in names and IMAGES not in names else ()
        return (*names, "prompt", "completion_messages") if self.form == "list" and "completion" in names else names

    def check(self, name: str, columns: AbstractSet[str], options: AbstractSet[str] = frozenset()) -> None:
        """Raises ConfigError when a parameter can get no value: no field, no column of the data, no option."""
        for parameter in self.required:
            if self.form == "list" and parameter in _TRL_ONLY - columns - options:
                way = "name it in environment.options.rewards" if parameter == "environments" else "give it a default of None"
                raise ConfigError(f"reward {name!r} requires TRL's {parameter!r}, which an actor does not have; {way}")
        accepted = None if self.any_column else (*self.required, *self.optional)
        fields = FIELDS | self._renamed.keys()
        check_parameters(f"reward {name!r}", f"rewards.options.{name}", self.required, accepted, fields, columns, options)
        for choices in self.alternatives:
            if not (fields | columns | options).intersection(choices):
                raise ConfigError(
                    f"reward {name!r} needs one of the columns {', '.join(choices)}; "
                    f"there is none in {_every_row(columns)}. Rename one with data.columns"
                )

    @property
    def image_names(self) -> frozenset[str]:
        """By which of its parameters it takes the images of its prompts."""
        return frozenset({IMAGES, IMAGE}.intersection(self.required + self.optional))

    def arguments(self, members: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments of one call. members: the fields of each completion it is about, one for form "one"."""
        if self.form == "one":
            (given,) = members
        else:
            given = self._gathered(members)
        given = {**given, **options}
        if self.any_column:
            return given
        return {name: given[name] for name in self.required + self.optional if name in given}

    def read(self, result: Any, count: int) -> tuple[Answer, ...]:
        """The answers for `count` completions in what the function returned."""
        return (read(result),) if self.form == "one" else read_list(result, count)

    @property
    def _renamed(self) -> Mapping[str, str]:
        """The parameters that are called otherwise than our fields."""
        return {"one": {}, "list": _LISTED, "group": _GROUPED}[self.form]

    def _gathered(self, members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        own = {ours: theirs for theirs, ours in self._renamed.items()}
        shared = self.form == "group"
        if self.form == "list" and "completion" in members[0]:
            members = [{**member, "completion": _written(member)} for member in members]
        return {
            own.get(name, name): value if shared and name not in own else [member.get(name) for member in members]
            for name, value in members[0].items()
            if name not in self._renamed.keys() - self._renamed.values()  # a column called as a list of ours is
        }


def _written(member: Mapping[str, Any]) -> Any:
    """The completion as TRL gives it: text; behind a prompt of messages a list of messages, of an episode all behind it."""
    if not isinstance(member.get("prompt"), list):
        return member["completion"]
    return member.get("completion_messages") or [{"role": "assistant", "content": member["completion"]}]


def check_parameters(
    what: str,
    section: str,
    required: Iterable[str],
    accepted: Sequence[str] | None,
    fields: AbstractSet[str],
    columns: AbstractSet[str],
    options: AbstractSet[str],
) -> None:
    """accepted: its parameters, None for any. section: of its options. fields: what is given beside the columns of every row.

    Raises ConfigError when a parameter can get no value, and for an option that is none of them.
    """
    known = fields | columns | options
    for parameter in required:
        if parameter not in known:
            raise ConfigError(
                f"{what} asks for {parameter!r}, which is neither a field ({', '.join(sorted(fields))}) nor a column of "
                f"{_every_row(columns)} nor an option ({section}); {did_you_mean(parameter, known)}"
            )
    if accepted is not None and (unknown := options - set(accepted)):
        hint = did_you_mean(min(unknown), accepted) if accepted else "it takes none"
        raise ConfigError(f"{section}.{min(unknown)}: {what} has no such parameter; {hint}")


def _every_row(columns: AbstractSet[str]) -> str:
    return f"every row ({', '.join(sorted(columns))})" if columns else "every row (there is no such column)"
