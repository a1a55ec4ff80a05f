"""Rules about prompts as the model reads them: whether it can, which are left out, and how completions end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.model_directory import check_stop_strings, from_pretrained
from async_rlhf.buffers.record import source_of
from async_rlhf.run.checks import images
from async_rlhf.run.checks.model import (
    check_adapters,
    check_model_files,
    check_routing,
    names_end,
    no_room,
)
from async_rlhf.run.checks.subject import Stage, Subject, of_config
from async_rlhf.run.scoring import of_source, played_by, stop_strings

_SHOWN = 10


def check_rendering(subject: Subject) -> None:
    """Whether observations can be appended to what the model's chat template wrote. Raises ConfigError."""
    config = subject.config
    for source, spec in subject.environments.items():
        if config.data.chat or spec.tools or spec.calls:
            from transformers import AutoTokenizer

            tokenizer = from_pretrained(AutoTokenizer, Path(config.model))
            render, variables = config.environment.all[source].render, config.data.chat_template_kwargs
            with of_source(source):
                Renderer(tokenizer, config.data.chat or spec.calls, render, spec.tools, variables, subject.images).check()


def check_reading(subject: Subject) -> None:
    """Whether engine, learner and model read the images of prompts. Raises ConfigError."""
    if subject.images is not None:
        images.check_reading(subject.config)


def check_lengths(subject: Subject) -> None:
    """Raises ConfigError for prompts without a token, and for those that are too long where none is to be left out."""
    found, texts, (limit, setting) = subject.lengths, subject.texts, subject.limit
    if found.empty:
        number = found.empty[0]
        raise ConfigError(
            f"prompt {number} has no tokens ({len(found.empty)} such prompts), its text is {texts[number][:60]!r}; remove the "
            "row or write a data.template around it"
        )
    if limit < 1:
        raise no_room(subject.config, limit, max(found.too_long.values(), default=1))
    if found.too_long and subject.config.data.on_overlong == "error":
        number, num_tokens = next(iter(found.too_long.items()))
        raise ConfigError(
            f"prompt {number} has {num_tokens} tokens ({len(found.too_long)} prompts are too long), the limit is {setting}; "
            f"longest: {max(found.too_long.values())}. Raise the limit, shorten the prompt, which begins "
            f"{texts[number][:60]!r}, or leave such prompts out: data.on_overlong = 'drop'"
        )


def check_kept(subject: Subject) -> Iterator[str]:
    """Remarks on prompts that are left out. Raises ConfigError where none is left."""
    num_training, num_repeated, too_long = len(subject.rows[0]), len(subject.repeated), subject.lengths.too_long
    if not subject.kept[0] and subject.config.data.spool is None:
        raise ConfigError(
            f"all {num_training} training prompts are left out: {num_training - num_repeated} are longer than "
            f"{subject.limit[1]}, {num_repeated} are, as the model reads them, prompts that are held out; "
            "data.held_out = 0 holds none out"
        )
    if too_long:
        yield f"{len(too_long)} prompts are left out: they are too long (data.on_overlong = 'drop')."
    if num_repeated:
        yield f"{num_repeated} training prompts are left out: what is read of them is read of held-out ones too."


def seen(subject: Subject) -> Iterator[str]:
    """Remarks on what the model does not see of prompts, or sees where it should not."""
    config, found = subject.config, subject.lengths
    if found.num_unknown:
        shown = " ".join(found.unknown[:_SHOWN]) + (" ..." if len(found.unknown) > _SHOWN else "")
        yield f"{found.num_unknown} prompts have characters that the model has no token for, and does not see: {shown}"
    yield from subject.tokenizer.remarks(subject.texts, subject.are_chats)
    asked = (row.prompt for row in subject.kept[0] if played_by(config, source_of(row.columns)) is None)
    if answered := sum(not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" for prompt in asked):
        yield (
            f"{answered} prompts end with a message of the assistant: the model reads it, and begins another turn. Where it is "
            "the answer, leave it out."
        )
    if config.data.row_template.variables and subject.all_rows and not any(subject.are_chats) and not subject.environments:
        yield "data.chat_template_kwargs has no effect: all prompts are texts; set data.chat = true, or leave it out."


def ends(subject: Subject) -> Iterator[str]:
    """A remark where nothing ends a completion before its length does."""
    if not stop_strings(subject.config) and not names_end(Path(subject.config.model)):
        yield (
            "the model's files name no end token (eos_token_id, eos_token): completions end only where they are cut, at "
            "generation.max_completion_length; name the token, or set generation.stop."
        )


def check_stop(subject: Subject) -> None:
    """Raises ConfigError as `check_stop_strings` does."""
    check_stop_strings(stop_strings(subject.config), Path(subject.config.model))


RULES = (
    Stage("model directory", of_config(lambda config: check_model_files(Path(config.model)))),  # which all others read
    Stage("model directory", check_reading),
    Stage("model directory", of_config(check_adapters), check_rendering, check_lengths),
    Stage("model directory", check_kept, of_config(check_routing), seen, ends),
)
"""Also of a model file, once it is converted into a directory."""
