"""Losses and advantage estimators by name: what each declares, the settings that it takes, and the function itself.

`kind` is the name of a shipped one, or names a user's own as `file.py:name` or `package.module:name`. A declaration is the
decorator `@loss(...)` or `@advantage(...)`; settings are keyword-only parameters. Configurations are checked in processes
without torch, which read the source and do not import it: arguments of the decorator are literals, and so are defaults of
settings (`signature.py`). No torch here.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.user_files import import_file
from async_rlhf.learner.signature import Parameter, last_name, parameters

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Literal["loss", "advantage"]
_MODULES: Mapping[Decorator, str] = {"loss": "losses", "advantage": "advantages"}


class _RegisteredSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LossSpec(_RegisteredSpec):
    """The properties that a loss declares beside its formula."""

    level: Literal["token", "sequence", "pair"] = "token"
    """The unit of one term of the loss: a token, a whole completion, or two completions of a group."""
    corrects: Literal["weights and masks", "masks", "nothing"] = "weights and masks"
    """The factors of its terms. A loss that contains the ratio to the behaviour policy takes masks only."""
    learns_from: Literal["all", "pair", "best", "teacher"] = "all"
    """Members of a group that it gets. `teacher`: all, and the reference's log-probabilities count in place of advantages."""
    needs: tuple[Literal["proximal", "behaviour", "reference", "top_k"], ...] = ("proximal",)
    """The log-probabilities that it reads beside the current ones. `top_k`: of the likeliest tokens under the current policy,
    as many as its parameter `top_k` says, under it and a reference that the learner holds."""

    @property
    def takes_ratios(self) -> bool:
        """Whether it compares the policy with the one that sampled, and so needs the distribution really sampled from."""
        return self.corrects != "nothing"

    @model_validator(mode="after")
    def _check(self) -> LossSpec:
        if "behaviour" in self.needs and self.corrects == "weights and masks":
            raise ValueError(
                "it reads the behaviour policy and is weighed against it as well: the ratio would count twice. "
                'Declare corrects = "masks", or leave "behaviour" out of needs'
            )
        if self.learns_from == "teacher" and "reference" not in self.needs:
            raise ValueError('learns_from = "teacher": declare "reference" in needs too')
        if "top_k" in self.needs and "reference" not in self.needs:
            raise ValueError('needs = ("top_k",): declare "reference" in needs too')
        if self.level == "pair" and self.learns_from != "pair":
            raise ValueError('level = "pair": declare learns_from = "pair" too')
        return self


class AdvantageSpec(_RegisteredSpec):
    """The properties that an advantage estimator declares beside its formula."""

    level: Literal["group", "group_tokens", "tokens"] = "group"
    """Its argument: the rewards of one group (None: does not count); rewards, and energies of tokens (see
    `PolicyEvaluation`), of its completions that count; or all tokens of the batch (`Tokens`)."""
    critic: bool = False
    """Whether tokens have a critic's values; then it gives returns, to which the critic is fitted, beside advantages."""
    off_policy: bool = True
    """False: it takes data as the policy's own."""

    @model_validator(mode="after")
    def _check(self) -> AdvantageSpec:
        if self.critic and self.level != "tokens":
            raise ValueError('critic = True: declare level = "tokens" too')
        return self


def loss(*bare: Any, **declared: Any) -> Callable[[Function], Function]:
    """Declare a loss by fields of `LossSpec`: a function `(inputs: LossInputs, weight_N, *, ...)` that returns terms (of
    tokens, completions or pairs) and sums over tokens to record. Its keyword parameters are settings of `[loss]`: those that
    `[loss]` has for every loss, without a default, and its own."""
    _spec("loss", declared, *bare)
    return lambda function: function


def advantage(*bare: Any, **declared: Any) -> Callable[[Function], Function]:
    """Declare an estimator by fields of `AdvantageSpec`. Its keyword parameters are settings of `[advantage]`, as those of a
    loss are of `[loss]`."""
    _spec("advantage", declared, *bare)
    return lambda function: function


@dataclass(frozen=True)
class Declared:
    """A function as its source has it."""

    spec: LossSpec | AdvantageSpec
    parameters: Mapping[str, Parameter]


@cache
def shipped(decorator: Decorator) -> Mapping[str, str]:
    """The shipped ones by name, and the module of each."""
    place = _MODULES[decorator]
    functions = _functions(_parsed(Path(__file__).parent / "objective" / f"{place}.py"))
    return {name: f"async_rlhf.learner.objective.{place}" for name, node in functions.items() if _call(node, decorator)}


@cache
def declared(decorator: Decorator, kind: str) -> Declared:
    """The declaration of a function. Raises ConfigError for one that does not exist, lacks the decorator, or declares an
    invalid combination."""
    tree, node, call = _declaration(decorator, kind)
    try:
        words = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except ValueError as error:
        raise ConfigError(
            f"{decorator}.kind = {kind!r}: the arguments of @{decorator}(...) must be written out (strings, True, tuples "
            "of strings): they are read without running the file"
        ) from error
    try:
        spec, taken = _spec(decorator, words), parameters(node, tree)
        if "top_k" in getattr(spec, "needs", ()) and "top_k" not in taken:
            raise ConfigError('needs = ("top_k",): add a parameter for the number of tokens, such as *, top_k: int = 32')
    except ConfigError as error:
        raise ConfigError(f"{decorator}.kind = {kind!r}: {error}") from error
    return Declared(spec, taken)


@cache
def load_function(decorator: Decorator, kind: str) -> Callable[..., Any]:
    """The function; imports torch, and a user's own file. Raises ConfigError."""
    place, name = _where(decorator, kind)
    try:
        module = import_file(Path(place)) if place.endswith(".py") else import_module(place)
        function: Callable[..., Any] = getattr(module, name)
    except (Exception, SystemExit) as error:
        what = f"importing {place} raised {type(error).__name__}: {error}"
        raise ConfigError(f"{decorator}.kind = {kind!r}: {what}") from error
    return function


losses, advantages = partial(shipped, "loss"), partial(shipped, "advantage")


def loss_spec(kind: str) -> LossSpec:
    """The declaration of a loss. Raises ConfigError as `declared` does."""
    return declared("loss", kind).spec  # type: ignore[return-value]


def advantage_spec(kind: str) -> AdvantageSpec:
    """The declaration of an estimator. Raises ConfigError as `declared` does."""
    return declared("advantage", kind).spec  # type: ignore[return-value]


def check_kind(kind: str, decorator: Decorator) -> str:
    """Raise ValueError for a name that is neither shipped nor a user's own."""
    if kind in shipped(decorator) or all(kind.rpartition(":")[::2]):
        return kind
    raise ValueError(f"{kind!r} is none of {', '.join(shipped(decorator))}, and not a 'file.py:name' or 'package.module:name'")


def _spec(decorator: Decorator, words: Mapping[str, Any], *bare: Any) -> LossSpec | AdvantageSpec:
    if bare:
        raise ConfigError(f"@{decorator} takes no function: write @{decorator}(), with its parentheses")
    try:
        return LossSpec(**words) if decorator == "loss" else AdvantageSpec(**words)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"@{decorator} {'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}") from error


def _where(decorator: Decorator, kind: str) -> tuple[str, str]:
    """File or module, and name in it."""
    place, _, name = kind.rpartition(":")
    return (shipped(decorator)[kind], kind) if kind in shipped(decorator) else (place, name)


def _declaration(decorator: Decorator, kind: str) -> tuple[ast.Module, ast.FunctionDef, ast.Call]:
    """A function in its file, and the call of its decorator, read from the source."""
    asked = f"{decorator}.kind = {kind!r}"
    place, name = _where(decorator, kind)
    tree = _parsed(Path(place) if place.endswith(".py") else _module_file(place, asked))
    functions = _functions(tree)
    if name not in functions:
        hint = did_you_mean(name, list(functions)) if functions else "it defines no function"
        raise ConfigError(f"{asked}: no function {name!r} at the top level of {place}; {hint}")
    if (call := _call(functions[name], decorator)) is not None:
        return tree, functions[name], call
    if other := next((other for other in _MODULES if _call(functions[name], other)), None):
        raise ConfigError(f"{asked} is declared with @{other}(): name it in {other}.kind")
    raise ConfigError(f"{asked} is not declared: write @{decorator}() above its 'def' (from async_rlhf import {decorator})")


def _module_file(module: str, asked: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{asked}: {error}; install it, or name its file ('path.py:name')") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"{asked}: there is no module {module!r}; name its file ('path.py:name')")
    return Path(spec.origin)


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except OSError as error:
        hint = "paths are relative to the configuration's folder"
        raise ConfigError(f"{file} cannot be read: {error.strerror}; {hint}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} is no Python: {error}") from error


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _call(node: ast.FunctionDef, name: str) -> ast.Call | None:
    """The call of `@name(...)` or `@anything.name(...)`."""
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
    return next((each for each in calls if last_name(each.func) == name), None)
