"""An environment tried before a run depends on it: episodes played in the terminal, by lines that are typed or by a model.

They run exactly as in a run: same processes, same time-outs, same limits.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typer import style

from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.environments import Content, EnvironmentSpec, Reply
from async_rlhf.actors.environments.pool import EpisodePool, Event
from async_rlhf.actors.environments.worker import EpisodeImages
from async_rlhf.actors.environments.yields import EpisodeEnd
from async_rlhf.actors.prompts import Row, environment_seed
from async_rlhf.buffers.errors import ConfigError, DeadlineError
from async_rlhf.buffers.images import IMAGES
from async_rlhf.buffers.images.store import scratch
from async_rlhf.buffers.score import Score
from async_rlhf.inspect.trials import failures, in_words, quantiles
from async_rlhf.run.config import Config
from async_rlhf.run.loading import load
from async_rlhf.run.scoring import common_columns, environment_specs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from async_rlhf.actors.loop.rollouts import FinishedRollout

# Longer than any step may take by default; only a defect of ours reaches it where a time-out is set higher.
_PATIENCE_S = 600.0
Write = Callable[[Content], str | None]
"""The next turn after the content that was read; None: no further one."""


@dataclass(frozen=True)
class EpisodePart:
    """A message of the environment, or a turn of the model."""

    who: Literal["environment", "model"]
    content: Content
    score: float | None = None
    """The environment's score of the turn before it; where an agent or a model plays, of this one."""
    pieces: Sequence[tuple[str, bool]] = ()
    """Where a model plays, its tokens as text, special ones apart: (text, whether it is a special token)."""
    anew: int = 0
    """Tokens of the whole conversation, where the model read that instead of the content behind its turn."""


@dataclass(frozen=True)
class EpisodeTrial:
    """The record of one episode."""

    row: int
    parts: Sequence[EpisodePart]
    end: str
    """Why it ended; `left` where its player wrote no more."""
    score: Score | None
    seconds: Sequence[float] = field(default_factory=list)
    """Duration of each step of the environment."""

    @property
    def num_turns(self) -> int:
        return sum(part.who == "model" for part in self.parts)

    def plain(self) -> dict[str, Any]:
        """The trial as values for JSON."""
        return asdict(self)


def configuration(function: str, source: str, model: str | None, settings: Mapping[str, Any]) -> Config:
    """The configuration for the trial of an environment. Raises ConfigError."""
    given = {"environment.function": function, "data.source": source, "data.held_out": 0, "rewards.functions": []}
    return load({"model": model or "tiny-speller"}, {**given, **settings})


def rows_of(config: Config, limit: int) -> tuple[list[Row], EnvironmentSpec]:
    """The first rows of the data, and the environment, which can take them. Raises ConfigError."""
    rows = load_rows(config.data)[0][:limit]
    if not config.environment.function:
        raise ConfigError("no environment is named; give FILE:NAME")
    spec = environment_specs(config)[""]
    spec.check(common_columns(rows))
    return rows, spec


def play(config: Config, limit: int, write: Write) -> Iterator[EpisodeTrial]:
    """One episode after the other, whose turns `write` gives. Raises ConfigError, EpisodeError, DeadlineError."""
    rows, spec = rows_of(config, limit)
    bell = threading.Event()
    pool = EpisodePool[int](spec, config.environment, bell.set, images=EpisodeImages.of(scratch().directory, takes=True))
    try:
        for number, row in enumerate(rows):
            fields = {**row.columns, "prompt": row.prompt, "seed": environment_seed(config.seed, number)}
            fields |= {IMAGES: [*row.images]} if row.images else {}
            pool.begin(number, fields)
            yield _played(pool, number, write, bell)
    finally:
        pool.close()


def _played(pool: EpisodePool[int], number: int, write: Write, bell: threading.Event) -> EpisodeTrial:
    parts: list[EpisodePart] = []
    seconds: list[float] = []
    while True:
        event = _next(pool, bell)
        if (result := event.result) is None:
            return EpisodeTrial(number, parts, "its process ended", None, seconds)
        seconds.append(event.ended - event.began)
        if isinstance(result, EpisodeEnd):
            scores = dict(zip((at for at, part in enumerate(parts) if part.who == "model"), result.turn_scores, strict=False))
            parts = [replace(part, score=scores.get(at, part.score)) for at, part in enumerate(parts)]
            return EpisodeTrial(number, parts, result.reason, result.score, seconds)
        parts.append(EpisodePart("environment", result.content, result.score))
        if (text := write(result.content)) is None:
            pool.discard([number])
            return EpisodeTrial(number, parts, "left", None, seconds)
        parts.append(EpisodePart("model", text))
        pool.reply(number, text if result.call is None else Reply(text, "stop", 0, 0, result.call.conversation))


def _next(pool: EpisodePool[int], bell: threading.Event) -> Event[int]:
    until = time.monotonic() + _PATIENCE_S
    while not (events := pool.poll()):
        if time.monotonic() > until:
            raise DeadlineError(f"waited {_PATIENCE_S:.0f} s for the environment")
        bell.wait(0.2)
        bell.clear()
    return events[0]


def play_by_model(config: Config, limit: int) -> Iterator[EpisodeTrial]:
    """Episodes of a model, sampled as in training, many at once. Raises ConfigError, EpisodeError, DeadlineError."""
    from transformers import AutoTokenizer

    from async_rlhf.actors.engine import load_engine
    from async_rlhf.actors.loop.episodes import Episodes
    from async_rlhf.buffers.model_directory import from_pretrained
    from async_rlhf.learner.model.gguf import model_directory
    from async_rlhf.run.checks.images import processor_of
    from async_rlhf.run.processes.evaluation import environments_of
    from async_rlhf.run.processes.roles import run_context

    rows, _ = rows_of(config, limit)
    config = config.model_copy(update={"model": model_directory(config.model)})
    tokenizer = from_pretrained(AutoTokenizer, Path(config.model))
    images = processor_of(config, rows)
    engine = load_engine(config.model, config.served_engine, version=0, images=images)

    context = run_context(config, rows, tokenizer, images=images)
    begun = [(row, environment_seed(config.seed, n), context.requests(n, 0, row)[2][:1]) for n, row in enumerate(rows)]
    bell = threading.Event()
    try:
        with environments_of(config, tokenizer, bell.set, images) as environments:
            episodes = Episodes(engine, context.decode, environments)
            episodes.begin(begun)
            num_left, last_answer = len(rows), time.monotonic()
            while num_left:
                for played in episodes.step():
                    num_left -= 1
                    parts = _parts(played, context.decode, partial(with_specials, tokenizer))
                    seconds = [ended - began for began, ended in played.steps]
                    yield EpisodeTrial(played.key.group, parts, played.rollout.finish_reason, played.score, seconds)
                    last_answer = time.monotonic()
                if not engine.num_unfinished:
                    if time.monotonic() - last_answer > _PATIENCE_S:
                        raise DeadlineError(f"waited {_PATIENCE_S:.0f} s for the environment")
                    bell.wait(0.05)
                    bell.clear()
    finally:
        engine.close()


def with_specials(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[tuple[str, bool]]:
    """Tokens as runs of text: (text, whether they are special tokens)."""
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return [(str(tokenizer.decode(list(run))), is_special) for is_special, run in groupby(ids, special.__contains__)]


def _parts(
    played: FinishedRollout,
    decode: Callable[[Sequence[int]], str],
    in_pieces: Callable[[Sequence[int]], Sequence[tuple[str, bool]]],
) -> list[EpisodePart]:
    """Observations and turns in the order of the record; for a row that begins anew the environment's new message, not the
    whole conversation."""

    rollout, anew, scores = played.rollout, iter(played.anew), iter(played.rollout.turn_scores)

    def part(who: Literal["environment", "model"], ids: Sequence[int]) -> EpisodePart:
        return EpisodePart(who, decode(ids), next(scores, None) if who == "model" else None, pieces=in_pieces(ids))

    parts, at = [part("environment", played.read[0])], 0
    for is_turn, spans in groupby(rollout.spans, key=lambda span: span.version is not None):
        run = list(spans)
        count = sum(span.num_tokens for span in run)
        ids = rollout.completion_ids[at : at + count].tolist()
        at += count
        if run[0].restarts:
            parts.append(EpisodePart("environment", next(anew), anew=count))
        else:
            parts.append(part("model" if is_turn else "environment", ids))
    return parts


def lines(trial: EpisodeTrial) -> list[str]:
    """An episode as a person reads it; special tokens are dim where the terminal can show it."""
    text = [f"episode {trial.row}"]
    for part in trial.parts:
        of_turn = "the turn before" if part.who == "environment" else "reward"
        scored = "" if part.score is None else f"   ({of_turn}: {part.score:g})"
        scored += f"   (in the whole conversation: {part.anew} tokens)" if part.anew else ""
        text.append(f"  {'reads ' if part.who == 'environment' else 'writes'}  {_shown(part)}{scored}")
    return [*text, f"  {_outcome(trial)}, {trial.num_turns} turns, environment {sum(trial.seconds):.3f} s"]


def _shown(part: EpisodePart) -> str:
    if not part.pieces:
        return repr(part.content)
    return "".join(style(text, dim=True) if is_special else repr(text)[1:-1] for text, is_special in part.pieces)


def _outcome(trial: EpisodeTrial) -> str:
    if trial.score is None:
        return f"ended ({trial.end}) without a score"
    failure = trial.score.failure
    return f"failed: {failure}" if failure is not None else f"score {trial.score.value} ({trial.end})"


def summary(trials: Sequence[EpisodeTrial]) -> list[str]:
    """The totals of all trials, as lines."""
    if not trials:
        return ["no episode was played"]
    values = [trial.score.value for trial in trials if trial.score is not None and trial.score.value is not None]
    steps = [second for trial in trials for second in trial.seconds]
    text = [
        f"{len(trials)} episodes: "
        + ", ".join(f"{count} {end}" for end, count in Counter(trial.end for trial in trials).most_common()),
        f"turns: mean {statistics.fmean(trial.num_turns for trial in trials):.1f}, most {max(t.num_turns for t in trials)}",
    ]
    if values:
        text.append(f"score: mean {statistics.fmean(values):.3f}, lowest {min(values):g}, highest {max(values):g}")
    if steps:
        text.append(f"seconds a step: {in_words(quantiles(steps))}")
    counted = failures(trial.score for trial in trials if trial.score is not None)
    return text + [f"failed {count} times: {reason}" for reason, count in counted.items()]
