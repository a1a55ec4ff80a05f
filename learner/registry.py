"""Losses and advantage estimators by name: what each declares, read without importing it, and the function itself.

`kind` is the name of a shipped one, or names a user's own as `file.py:name` or `package.module:name`. A declaration is the
decorator `@loss(...)` or `@advantage(...)`. Its arguments are literals: configurations are checked in processes without torch,
which read the source and do not import it. No torch here.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from async_rlhf.buffers.errors import ConfigError, did_you_mean
from async_rlhf.buffers.user_files import import_file

Function = TypeVar("Function", bound=Callable[..., Any])
LossLevel = Literal["token", "sequence", "pair"]
Corrects = Literal["weights and masks", "masks", "nothing"]
LearnsFrom = Literal["all", "pair", "best"]
Needs = Literal["proximal", "behaviour", "reference"]
AdvantageLevel = Literal["group", "batch", "token_rewards", "completion", "tokens"]

_OBJECTIVE = "async_rlhf.learner.objective"


@dataclass(frozen=True)
class LossSpec:
    """What a loss is, apart from its formula."""

    level: LossLevel = "token"
    """What one term of the loss belongs to: a token, a whole completion, or two completions of a group."""
    corrects: Corrects = "weights and masks"
    """What its terms are multiplied by. A loss that has the ratio to the behaviour policy in itself takes masks only."""
    learns_from: LearnsFrom = "all"
    """Members of a group that it is given."""
    needs: tuple[Needs, ...] = ("proximal",)
    """The log-probabilities that it reads beside the current ones."""
    truncates: bool = False
    """Whether its own ratio to the behaviour policy is truncated at `is_cap`."""

    @property
    def takes_ratios(self) -> bool:
        """Whether it compares the policy with the one that sampled, and so with what that one really sampled from."""
        return self.corrects != "nothing"

    def check(self, name: str) -> None:
        """Raises ConfigError for a declaration without meaning."""
        choices = {"level": LossLevel, "corrects": Corrects, "learns_from": LearnsFrom}
        for field, choice in choices.items():
            _check_choice(name, field, [getattr(self, field)], choice)
        _check_choice(name, "needs", self.needs, Needs)
        if "behaviour" in self.needs and self.corrects == "weights and masks":
            raise ConfigError(
                f"loss {name!r} reads the behaviour policy and is weighed against it as well: the ratio would count twice. "
                'Declare corrects = "masks", or leave "behaviour" out of needs'
            )
        if self.level == "pair" and self.learns_from != "pair":
            raise ConfigError(f'loss {name!r} has level = "pair": declare learns_from = "pair" too')


@dataclass(frozen=True)
class AdvantageSpec:
    """What an advantage estimator is, apart from its formula."""

    level: AdvantageLevel = "group"
    """What it is called with: the rewards of one group (None: does not count); those of all groups of the batch; rewards and
    ends of all tokens; rewards and values of the tokens of one completion; or rewards, values, log-ratios proximal / behaviour
    and ends of all tokens."""
    off_policy: bool = True
    """False: it takes data as the policy's own."""

    @property
    def needs_critic(self) -> bool:
        return self.level in ("completion", "tokens")

    def check(self, name: str) -> None:
        """Raises ConfigError for a declaration without meaning."""
        _check_choice(name, "level", [self.level], AdvantageLevel)


def loss(
    *,
    level: LossLevel = "token",
    corrects: Corrects = "weights and masks",
    learns_from: LearnsFrom = "all",
    needs: tuple[Needs, ...] = ("proximal",),
    truncates: bool = False,
) -> Callable[[Function], Function]:
    """Declare a loss, see `LossSpec`: a function `(inputs: LossInputs, weight_N, config: LossConfig)` that returns terms (of
    tokens, completions or pairs) and sums over tokens to record."""
    LossSpec(level, corrects, learns_from, needs, truncates).check("loss")
    return lambda function: function


def advantage(*, level: AdvantageLevel = "group", off_policy: bool = True) -> Callable[[Function], Function]:
    """Declare an advantage estimator, see `AdvantageSpec`. Its keyword-only parameters are settings of `[advantage]`."""
    AdvantageSpec(level, off_policy).check("advantage")
    return lambda function: function


SpecT = TypeVar("SpecT", bound=LossSpec | AdvantageSpec)


class _Kind(Generic[SpecT]):
    """The functions with one decorator: those shipped in the module or folder `place` of `objective/`, and users' own."""

    def __init__(self, decorator: str, place: str, spec: type[SpecT]) -> None:
        self._decorator, self._place, self._spec = decorator, place, spec
        self.shipped: Callable[[], Mapping[str, str]] = cache(self._shipped)
        self.spec: Callable[[str], SpecT] = cache(self._read)
        self.settings: Callable[[str], tuple[str, ...]] = cache(self._settings)
        self.load: Callable[[str], Callable[..., Any]] = cache(self._load)

    def _shipped(self) -> Mapping[str, str]:
        """The shipped ones by name, and the module of each."""
        root = Path(__file__).parent / "objective" / self._place
        files = sorted(root.glob("*.py")) if root.is_dir() else [root.with_suffix(".py")]
        found: dict[str, str] = {}
        for file in files:
            module = f"{_OBJECTIVE}.{self._place}" + (f".{file.stem}" if root.is_dir() else "")
            found |= {node.name: module for node in _functions(file) if _decorator(node, self._decorator) is not None}
        return found

    def _read(self, kind: str) -> SpecT:
        """What a function declares. Raises ConfigError for one that is not there or not declared with the decorator."""
        decorator = self._decorator
        _, call = self._declaration(kind)
        try:
            given: dict[str, Any] = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        except ValueError as error:
            raise ConfigError(
                f"{decorator}.kind = {kind!r}: the arguments of @{decorator}(...) must be written out (strings, True, tuples "
                "of strings): they are read without running the file"
            ) from error
        known = set(self._spec.__dataclass_fields__)
        if call.args or set(given) - known:
            unknown = min(set(given) - known, default="a positional argument")
            raise ConfigError(
                f"{decorator}.kind = {kind!r}: @{decorator} has no {unknown!r}; it takes {', '.join(sorted(known))}"
            )
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        spec = self._spec(**given)
        spec.check(kind)
        return spec

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
            raise ConfigError(
                f"{self._decorator}.kind = {kind!r}: importing {place} raised {type(error).__name__}: {error}"
            ) from error
        return function

    def _where(self, kind: str) -> tuple[str, str]:
        """File or module, and name in it."""
        if kind in self.shipped():
            return self.shipped()[kind], kind
        place, _, name = kind.rpartition(":")
        return place, name

    def _declaration(self, kind: str) -> tuple[ast.FunctionDef, ast.Call]:
        """A function and the call of its decorator, read from the source."""
        asked, decorator = f"{self._decorator}.kind = {kind!r}", self._decorator
        place, name = self._where(kind)
        functions = _functions(Path(place) if place.endswith(".py") else _module_file(place, asked))
        node = next((each for each in functions if each.name == name), None)
        if node is None:
            hint = did_you_mean(name, [each.name for each in functions]) if functions else "it defines no function"
            raise ConfigError(f"{asked}: no function {name!r} at the top level of {place}; {hint}")
        call = _decorator(node, decorator)
        if call is None and (other := next((o for o in ("loss", "advantage") if _decorator(node, o)), None)):
            raise ConfigError(f"{asked} is declared with @{other}(): name it in {other}.kind")
        if call is None:
            raise ConfigError(
                f"{asked} is not declared: write @{decorator}() above its 'def' (from async_rlhf import {decorator})"
            )
        return node, call


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
        tree = ast.parse(file.read_text())
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; paths are relative to the configuration's folder"
        ) from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no Python: {error}") from error
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _decorator(node: ast.FunctionDef, name: str) -> ast.Call | None:
    """The call of `@name(...)` or `@anything.name(...)`."""
    for each in node.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func).rpartition(".")[2] == name:
            return each
    return None


def _check_choice(name: str, field: str, values: Iterable[str], choice: Any) -> None:
    for value in values:
        if value not in get_args(choice):
            raise ConfigError(f"{name!r} declares {field} = {value!r}; it is one of {', '.join(map(repr, get_args(choice)))}")
