"""Losses and advantage estimators by name: what each declares, read without importing it, and the function itself.

`kind` is the name of a shipped one, or names a user's own as `file.py:name` or `package.module:name`. A declaration is the
decorator `@loss(...)` or `@advantage(...)`. Its arguments are literals: configurations are checked in processes without torch,
which read the source and do not import it. No torch here.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.user_files import import_file

Function = TypeVar("Function", bound=Callable[..., Any])
_OBJECTIVE = "async_rlhf.learner.objective"


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LossSpec(_Spec):
    """What a loss is, apart from its formula."""

    level: Literal["token", "sequence", "pair"] = "token"
    """What one term of the loss belongs to: a token, a whole completion, or two completions of a group."""
    corrects: Literal["weights and masks", "masks", "nothing"] = "weights and masks"
    """What its terms are multiplied by. A loss that has the ratio to the behaviour policy in itself takes masks only."""
    learns_from: Literal["all", "pair", "best", "teacher"] = "all"
    """Members of a group that it is given. `teacher`: all, and what the reference says of each token counts, no advantage."""
    needs: tuple[Literal["proximal", "behaviour", "reference", "top_k"], ...] = ("proximal",)
    """The log-probabilities that it reads beside the current ones. `top_k`: of the `loss.teacher_top_k` likeliest tokens under
    the current policy, under it and a reference that the learner holds."""
    truncates: bool = False
    """Whether its own ratio to the behaviour policy is truncated at `is_cap`."""

    @property
    def takes_ratios(self) -> bool:
        """Whether it compares the policy with the one that sampled, and so with what that one really sampled from."""
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


class AdvantageSpec(_Spec):
    """What an advantage estimator is, apart from its formula."""

    level: Literal["group", "group_tokens", "token_rewards", "tokens"] = "group"
    """What it is called with: the rewards of one group (None: does not count); rewards, and energies of tokens (see
    `PolicyEvaluation`), of its completions that count; rewards and ends of all tokens of the batch; or rewards, a critic's
    values, log-ratios proximal / behaviour and ends of all tokens."""
    off_policy: bool = True
    """False: it takes data as the policy's own."""

    @property
    def needs_critic(self) -> bool:
        return self.level == "tokens"


def loss(*bare: Any, **declared: Any) -> Callable[[Function], Function]:
    """Declare a loss by fields of `LossSpec`: a function `(inputs: LossInputs, weight_N, config: LossConfig)` that returns
    terms (of tokens, completions or pairs) and sums over tokens to record."""
    _declared("loss", LossSpec, declared, *bare)
    return lambda function: function


def advantage(*bare: Any, **declared: Any) -> Callable[[Function], Function]:
    """Declare an estimator by fields of `AdvantageSpec`. Its keyword-only parameters are settings of `[advantage]`."""
    _declared("advantage", AdvantageSpec, declared, *bare)
    return lambda function: function


SpecT = TypeVar("SpecT", bound=LossSpec | AdvantageSpec)


def _declared(decorator: str, spec: type[SpecT], declared: Mapping[str, Any], *bare: Any) -> SpecT:
    if bare:
        raise ConfigError(f"@{decorator} takes no function: write @{decorator}(), with its parentheses")
    try:
        return spec(**declared)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"@{decorator} {'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg']}") from error


class _Kind(Generic[SpecT]):
    """The functions with one decorator: those shipped in the module `place` of `objective/`, and users' own."""

    def __init__(self, decorator: str, place: str, spec: type[SpecT]) -> None:
        self._decorator, self._place, self._spec = decorator, place, spec
        self.shipped: Callable[[], Mapping[str, str]] = cache(self._shipped)
        self.spec: Callable[[str], SpecT] = cache(self._read)
        self.settings: Callable[[str], tuple[str, ...]] = cache(self._settings)
        self.load: Callable[[str], Callable[..., Any]] = cache(self._load)

    def _shipped(self) -> Mapping[str, str]:
        """The shipped ones by name, and the module of each."""
        functions = _functions(Path(__file__).parent / "objective" / f"{self._place}.py")
        return {each.name: f"{_OBJECTIVE}.{self._place}" for each in functions if _call(each, self._decorator)}

    def _read(self, kind: str) -> SpecT:
        """What a function declares. Raises ConfigError for one that is not there or not declared with the decorator."""
        decorator = self._decorator
        _, call = self._declaration(kind)
        try:
            declared = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            return _declared(decorator, self._spec, declared)
        except ConfigError as error:
            raise ConfigError(f"{decorator}.kind = {kind!r}: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"{decorator}.kind = {kind!r}: the arguments of @{decorator}(...) must be written out (strings, True, tuples "
                "of strings): they are read without running the file"
            ) from error

    def _settings(self, kind: str) -> tuple[str, ...]:
        """The keyword-only parameters of a function. Raises ConfigError as `spec` does."""
        node, _ = self._declaration(kind)
        return tuple(each.arg for each in node.args.kwonlyargs)

    def _load(self, kind: str) -> Callable[..., Any]:
        """The function; imports torch, and a user's own file. Raises ConfigError."""
        place, name = self._where(kind)
        try:
            module = import_file(Path(place)) if place.endswith(".py") else import_module(place)
            function: Callable[..., Any] = getattr(module, name)
        except (Exception, SystemExit) as error:
            what = f"importing {place} raised {type(error).__name__}: {error}"
            raise ConfigError(f"{self._decorator}.kind = {kind!r}: {what}") from error
        return function

    def _where(self, kind: str) -> tuple[str, str]:
        """File or module, and name in it."""
        place, _, name = kind.rpartition(":")
        return (self.shipped()[kind], kind) if kind in self.shipped() else (place, name)

    def _declaration(self, kind: str) -> tuple[ast.FunctionDef, ast.Call]:
        """A function and the call of its decorator, read from the source."""
        asked, decorator = f"{self._decorator}.kind = {kind!r}", self._decorator
        place, name = self._where(kind)
        functions = {
            each.name: each for each in _functions(Path(place) if place.endswith(".py") else _module_file(place, asked))
        }
        if name not in functions:
            hint = did_you_mean(name, list(functions)) if functions else "it defines no function"
            raise ConfigError(f"{asked}: no function {name!r} at the top level of {place}; {hint}")
        if (call := _call(functions[name], decorator)) is not None:
            return functions[name], call
        if other := next((other for other in ("loss", "advantage") if _call(functions[name], other)), None):
            raise ConfigError(f"{asked} is declared with @{other}(): name it in {other}.kind")
        raise ConfigError(f"{asked} is not declared: write @{decorator}() above its 'def' (from async_rlhf import {decorator})")


_LOSSES, _ADVANTAGES = _Kind("loss", "losses", LossSpec), _Kind("advantage", "advantages", AdvantageSpec)
losses, loss_spec, load_loss = _LOSSES.shipped, _LOSSES.spec, _LOSSES.load
advantages, advantage_spec, load_advantage = _ADVANTAGES.shipped, _ADVANTAGES.spec, _ADVANTAGES.load
advantage_settings = _ADVANTAGES.settings


def check_kind(kind: str, section: Literal["loss", "advantage"]) -> str:
    """Raises ValueError for what is neither shipped nor names a user's own."""
    shipped = losses() if section == "loss" else advantages()
    if kind in shipped or all(kind.rpartition(":")[::2]):
        return kind
    raise ValueError(f"{kind!r} is none of {', '.join(shipped)} and names no 'file.py:name' or 'package.module:name'")


def _module_file(module: str, asked: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{asked}: {error}; install it, or name its file ('path.py:name')") from error
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise ConfigError(f"{asked}: there is no module {module!r}; name its file ('path.py:name')")
    return Path(spec.origin)


def _functions(file: Path) -> list[ast.FunctionDef]:
    try:
        return [node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.FunctionDef)]
    except OSError as error:
        hint = "paths are relative to the configuration's folder"
        raise ConfigError(f"{file} cannot be read: {error.strerror}; {hint}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} is no Python: {error}") from error


def _call(node: ast.FunctionDef, name: str) -> ast.Call | None:
    """The call of `@name(...)` or `@anything.name(...)`."""
    calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
    return next((each for each in calls if ast.unparse(each.func).rpartition(".")[2] == name), None)
