"""Everything about a run that can be found wrong before it begins: its data, rewards, packages, devices, the model's files.

Without torch, but where a setting asks for a device other than the CPU or for episodes of chat messages. Nothing is written
and no process is started.
"""

from __future__ import annotations

import codecs
import json
import locale
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from async_rlhf.actors.data.rows import epoch_of, load_rows
from async_rlhf.actors.data.tokens import PromptLengths, PromptTokenizer
from async_rlhf.actors.environments import EnvironmentSpec
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.prompts import Row, of_prompts
from async_rlhf.buffers.config import check_installed
from async_rlhf.buffers.errors import ConfigError, check_all, did_you_mean
from async_rlhf.buffers.model_directory import check_stop_strings, from_pretrained
from async_rlhf.buffers.record import SOURCE, source_of
from async_rlhf.launch.forked import umask
from async_rlhf.launch.sockets import socket_root
from async_rlhf.run.checks.model import (
    check_adapters,
    check_model_files,
    check_routing,
    check_teachers,
    longest_prompt,
    names_end,
    no_room,
)
from async_rlhf.run.checks.servers import unanswered
from async_rlhf.run.checks.spool import check_spool
from async_rlhf.run.config import Config
from async_rlhf.run.effects import without_effect
from async_rlhf.run.learning_checks import remarks
from async_rlhf.run.run_data import Rows
from async_rlhf.run.scoring import (
    check_columns,
    check_judged,
    check_judging,
    common_columns,
    environment_specs,
    of_source,
    played_by,
    score_names,
    stage_specs,
    stop_strings,
)
from async_rlhf.run.tracking import check_place
from async_rlhf.run.watching import HooksConfig, TrackingConfig

_SHOWN = 10
_OF_SOURCE = re.compile(r"\bdata\.(?=(source|columns|options|size|template)\b)")

Environments = Mapping[str, EnvironmentSpec]
"""As `environment_specs` gives them."""


@dataclass(frozen=True)
class Prepared:
    """What a run will train on and be evaluated with. rows: each once, without the `dropped` ones. num_prompts: of one epoch.
    environments: by source what answers the model between its turns. remarks: what a person should know, and what stops
    nothing."""

    rows: Rows
    num_prompts: int
    environments: Environments = field(default_factory=dict)
    dropped: int = 0
    remarks: list[str] = field(default_factory=list)


def preflight(config: Config, rows: Rows | None = None, *, is_here: bool = True) -> Prepared:
    """rows: where they are loaded already, by `load_rows` or from a run. is_here: whether the run will be on this machine; else
    it needs none of its packages and devices. Raises ConfigError."""
    if is_here:
        check_all(check_inherited, partial(_check_packages, config), partial(_check_devices, config))
    environments = dict[str, EnvironmentSpec]()
    check_all(
        lambda: environments.update(environment_specs(config)), partial(check_tracking, config.tracking),
        partial(check_hooks, config.hooks), partial(check_teachers, config), partial(stage_specs, config),
    )  # fmt: skip
    rows = rows or load_rows(config.data)
    spool = config.data.spool
    of_spool = check_spool(spool) if spool is not None and is_here else []
    rules = [partial(_check_judged, config, rows[0], environments)]
    if spool is None:  # of a spool's row what is wanted of it is looked at when it comes
        rules += [
            partial(_check_columns, config, [*rows[0], *rows[1]], environments),
            partial(_check_sources, config, rows[0]),
            partial(config.scoring.reference.check_taught, [row.columns for row in rows[0]]),
        ]
    check_all(*rules)
    names = score_names(config, environments.values())
    config.rewards.composition.check(names)
    judges = {"data.curriculum.reward": config.data.curriculum.reward, "evaluation.solved_by": config.evaluation.solved_by}
    for setting, judge in judges.items():
        if judge and judge not in names:
            raise ConfigError(f"{setting} = {judge!r} is no reward of this run; {did_you_mean(judge, names)}")
    # A file is converted when the run starts, and looked into then.
    converted = Path(config.model).is_dir()
    if converted:
        prepared = check_model(config, rows, environments)
    else:
        prepared = Prepared(
            rows, len(epoch_of(config.data, rows[0])), environments, remarks=list(remarks(config.learner, config.max_steps))
        )
    check_stop_strings(stop_strings(config), Path(config.model))
    _check_evaluation(config, rows[1], environments, converted)
    config.bound(prepared.num_prompts).check()
    # Other hosts may reach what this machine does not. A server may come up while a run goes on, which then asks it again.
    of_servers = [*unanswered(config)] if is_here and config.launch.kind == "local" else []
    is_evaluated = rows[1] or config.evaluation.source is not None
    of_evaluation = check_judging(config, names) if is_evaluated else ()
    return replace(prepared, remarks=[*of_spool, *prepared.remarks, *of_servers, *of_evaluation, *without_effect(config)])


def _check_evaluation(config: Config, held_out: Sequence[Row], environments: Environments, converted: bool) -> None:
    """Whether there is something to evaluate on, and it can be. converted: the model is there to look into."""
    evaluation = config.evaluation
    if (own := evaluation.data(config.data)) is not None:
        try:
            if own.spool is not None:
                raise ConfigError("an evaluation has the same prompts every time, and a spool's are used up; name a file")
            rows, _ = load_rows(own)
            _check_columns(config, rows, environments)
            _check_judged(config, rows, environments)
            if converted:
                check_model(config.model_copy(update={"data": own}), (rows, []), environments)
        except ConfigError as error:
            message = _OF_SOURCE.sub("evaluation.", str(error))  # which speaks of the settings of a run's own prompts
            raise ConfigError(f"evaluation.source: {message}") from error
    elif evaluation.every and config.data.spool is not None:
        raise ConfigError(
            f"evaluation.every = {evaluation.every} with data.source = {config.data.source!r}, of which none are held out; "
            "set evaluation.source"
        )
    elif evaluation.every and not held_out:
        raise ConfigError(
            f"evaluation.every = {evaluation.every} with data.held_out = 0: there are no prompts to evaluate on; "
            "set data.held_out, or evaluation.source"
        )


def check_model(config: Config, rows: Rows, environments: Environments) -> Prepared:
    """The model directory by its files, and whether it can take the prompts. Raises ConfigError."""
    check_model_files(Path(config.model))
    check_adapters(config)
    _check_rendering(config, environments)
    limit, setting = longest_prompt(config)
    tokenizer = PromptTokenizer(Path(config.model))
    everyone = [*rows[0], *rows[1]]
    template = config.data.row_template
    texts = of_prompts(everyone, partial(tokenizer.text, template=template))
    are_chats = [template.is_chat(row) for row in everyone] or [template.chat]
    found = tokenizer.lengths(texts, are_chats[: len(texts)], limit)
    _check_lengths(config, texts, found, limit, setting)
    first_held_out = len(rows[0])
    repeated = (
        _repeated(config, everyone, texts, first_held_out, tokenizer, environments) - found.too_long.keys()
        if rows[1]
        else set()
    )
    left_out = found.too_long.keys() | repeated
    kept = (
        [row for number, row in enumerate(rows[0]) if number not in left_out],
        [row for number, row in enumerate(rows[1], first_held_out) if number not in found.too_long],
    )
    if not kept[0] and config.data.spool is None:
        raise ConfigError(
            f"all {first_held_out} training prompts are left out: {first_held_out - len(repeated)} are longer than {setting}, "
            f"{len(repeated)} are, as the model reads them, prompts that are held out; data.held_out = 0 holds none out"
        )
    known = [*remarks(config.learner, config.max_steps), *check_routing(config), *_of_prompts(config, found, len(repeated))]
    known += [*tokenizer.remarks(texts, are_chats), *_of_answers(config, kept[0])]
    if template.variables and everyone and not any(are_chats) and not environments:
        known.append("data.chat_template_kwargs has no effect: all prompts are texts; set data.chat = true, or leave it out.")
    return Prepared(kept, len(epoch_of(config.data, kept[0])), environments, len(left_out), known)


def _repeated(
    config: Config,
    rows: Sequence[Row],
    texts: Sequence[str],
    first_held_out: int,
    tokenizer: PromptTokenizer,
    environments: Environments,
) -> set[int]:
    """Training prompts of which the model reads what it reads of held-out ones."""

    def read(row: Row, text: str) -> str:
        source = played_by(config, source_of(row.columns))
        if source is None:
            return tokenizer.normal(text)
        # An environment's own columns are a part of what it asks.
        return source + json.dumps(environments[source].usable({**row.columns, "prompt": row.prompt}), sort_keys=True)

    found = list(map(read, rows, texts))
    held_out = set(found[first_held_out:])
    return {n for n in range(first_held_out) if found[n] in held_out}


def _of_answers(config: Config, rows: Iterable[Row]) -> Iterator[str]:
    """A remark where data with its answers is taken for prompts."""
    asked = (row.prompt for row in rows if played_by(config, source_of(row.columns)) is None)
    if answered := sum(not isinstance(each, str) and each[-1]["role"] == "assistant" for each in asked):
        yield (
            f"{answered} prompts end with a message of the assistant: the model reads it, and begins another turn. Where it is "
            "the answer, leave it out."
        )


def _of_prompts(config: Config, found: PromptLengths, num_repeated: int) -> Iterator[str]:
    """Remarks: which prompts are left out, what the model does not see of the others, and whether it ends its answers."""
    if found.too_long:
        yield f"{len(found.too_long)} prompts are left out: they are too long (data.on_overlong = 'drop')."
    if num_repeated:
        yield f"{num_repeated} training prompts are left out: what is read of them is read of held-out ones too."
    if found.num_unknown:
        shown = " ".join(found.unknown[:_SHOWN]) + (" ..." if len(found.unknown) > _SHOWN else "")
        yield f"{found.num_unknown} prompts have characters that the model has no token for, and does not see: {shown}"
    if not stop_strings(config) and not names_end(Path(config.model)):
        yield (
            "the model's files name no end token (eos_token_id, eos_token): completions end only where they are cut, at "
            "generation.max_completion_length; name the token, or set generation.stop."
        )


def _check_rendering(config: Config, environments: Environments) -> None:
    """Whether observations can be appended to what the model's chat template wrote. Raises ConfigError."""
    for source, spec in environments.items():
        if config.data.chat or spec.tools or spec.calls:
            from transformers import AutoTokenizer

            tokenizer = from_pretrained(AutoTokenizer, Path(config.model))
            render, variables = config.environment.all[source].render, config.data.chat_template_kwargs
            with of_source(source):
                Renderer(tokenizer, config.data.chat or spec.calls, render, spec.tools, variables).check()


def _check_lengths(config: Config, texts: Sequence[str], found: PromptLengths, limit: int, setting: str) -> None:
    if found.empty:
        number = found.empty[0]
        raise ConfigError(
            f"prompt {number} has no tokens ({len(found.empty)} such prompts), its text is {texts[number][:60]!r}; remove the "
            "row or write a data.template around it"
        )
    if limit < 1:
        raise no_room(config, limit, max(found.too_long.values(), default=1))
    if found.too_long and config.data.on_overlong == "error":
        number, num_tokens = next(iter(found.too_long.items()))
        raise ConfigError(
            f"prompt {number} has {num_tokens} tokens ({len(found.too_long)} prompts are too long), the limit is {setting}; "
            f"longest: {max(found.too_long.values())}. Raise the limit, shorten the prompt, which begins "
            f"{texts[number][:60]!r}, or leave such prompts out: data.on_overlong = 'drop'"
        )


def _check_columns(config: Config, rows: Sequence[Row], environments: Environments) -> None:
    """Whether the rows of each source have what their rewards and environments ask for. Raises ConfigError."""
    of: dict[str | None, list[Row]] = {}
    for row in rows:
        of.setdefault(source_of(row.columns), []).append(row)
    judges = stage_specs(config)
    for source, own in of.items():
        columns = common_columns(own)
        try:
            check_columns(config, judges, environments, source, columns)
        except ConfigError as error:
            lacking = sorted({name for row in own for name in row.columns if name not in columns and repr(name) in str(error)})
            if not lacking:
                raise
            number = next(
                number for number, row in enumerate(rows) if source_of(row.columns) == source and lacking[0] not in row.columns
            )
            raise ConfigError(f"prompt {number} has no column {lacking[0]!r}, and others have: {error}") from error


def _check_sources(config: Config, rows: Sequence[Row]) -> None:
    """Raises ConfigError where a setting names a source that no row has."""
    named: dict[str, Iterable[str]] = {
        "rewards.by_source": config.rewards.by_source,
        "environment.by_source": config.environment.by_source,
        "scoring.reference.by_source": config.scoring.reference.by_source,
    }
    found = sorted({source for row in rows if (source := source_of(row.columns)) is not None}) if any(named.values()) else []
    for setting, sources in named.items():
        if (unknown := next((source for source in sources if source not in found), None)) is not None:
            hint = did_you_mean(unknown, found) if found else f"the data have no column {SOURCE!r}"
            raise ConfigError(f"{setting} names {unknown!r}, which is the source of no row; {hint}")


def _check_judged(config: Config, rows: Sequence[Row], environments: Environments) -> None:
    """Whether something gives the rows of each source a score; of a spool those of the sources that are named. Raises
    ConfigError."""
    named = {*config.environment.by_source, *config.rewards.by_source}
    for source in sorted({source_of(row.columns) for row in rows} or named or {None}, key=str):
        check_judged(config, environments, source)


def check_inherited() -> None:
    """What a run inherits and cannot work with, by name; docs/operating.md lists what is obeyed or makes no difference. Raises
    ConfigError."""
    socket_root()
    if codecs.lookup(encoding := locale.getpreferredencoding(False)).name != "utf-8":
        raise ConfigError(f"files are read as {encoding} (LC_ALL, LC_CTYPE, LANG), and they are UTF-8: set PYTHONUTF8=1")
    if sys.flags.optimize > 1:
        raise ConfigError(
            f"PYTHONOPTIMIZE={sys.flags.optimize} takes away docstrings, and transformers reads them: set it to 0"
        )
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise ConfigError("SIGCHLD is ignored in this process, so the end of a child cannot be seen: set it to SIG_DFL")
    if sys.platform == "linux" and (mask := umask()) & 0o700:
        raise ConfigError(f"umask {mask:04o} takes from you the rights to what the run makes: set umask 022, or 077")
    if (most := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) != resource.RLIM_INFINITY and most < 256:
        raise ConfigError(f"a process may open {most} files (ulimit -n), and a run needs 256: raise the limit")


def _check_packages(config: Config) -> None:
    learner = config.learner
    if learner.backend == "deepspeed":
        check_installed("deepspeed", "learner.backend", learner.backend, "deepspeed", "'torch'")
    if learner.lora.rank:
        check_installed("peft", "learner.lora.rank", learner.lora.rank, "lora", "0")
    for package in config.engine.needs:
        check_installed(package, "engine.kind", config.engine.kind, config.engine.kind, "'torch'")
    if Path(config.model).suffix == ".gguf":
        for package in ("gguf", "accelerate"):
            check_installed(package, "model", config.model, "gguf", "a Hugging Face directory")


def _check_devices(config: Config) -> None:
    """Raises ConfigError for a device that this torch does not have. Only a setting other than the CPU costs its import. How
    many there are is for the placement; other hosts, and those that are listed, are not looked at from here."""
    if config.placement.hosts:
        return
    asked, is_here = [("learner.device", config.learner.device)], config.launch.kind == "local"
    if is_here:
        asked.append(("engine.device", config.engine.device))
    if is_here and config.scoring.reference_is_stage:
        asked.append(("scoring.reference.device", config.scoring.reference.device))
    if asked := [each for each in asked if each[1] != "cpu"]:
        from async_rlhf.actors.served_model.devices import check_device

        for setting, device in asked:
            check_device(setting, device)


def check_tracking(config: TrackingConfig) -> None:
    """Raises ConfigError for a tracker whose package is not installed, or that has nowhere to write."""
    for kind in config.kind:
        if config.kind.count(kind) > 1:
            raise ConfigError(f"tracking.kind = {list(config.kind)} names {kind!r} twice, and a run is sent there once")
        without = f"'none', and async-rlhf track RUN_DIR --to {kind} from an environment that has it (docs/watching.md)"
        check_installed(kind, "tracking.kind", kind, kind, without)
        check_place(kind)


def check_hooks(config: HooksConfig) -> None:
    """Raises ConfigError for a program that is not there, and for an address that the environment does not have."""
    if config.argv and shutil.which(config.argv[0]) is None:
        raise ConfigError("hooks.command: its first word is no program that can be started from here; give its whole path")
    if config.url is not None and not config.address:
        raise ConfigError(
            f"hooks.url = {config.url.get_secret_value()!r}: there is no such environment variable; set it, or give the "
            "address itself"
        )
