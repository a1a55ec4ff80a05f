"""A pool of episodes, a scripted model that answers it, and how it writes a call of a tool."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_rlhf.actors.environments import EnvironmentConfig, EnvironmentSpec, Reply, load
from async_rlhf.actors.environments.pool import EpisodePool
from async_rlhf.actors.environments.yields import EpisodeEnd, Read
from async_rlhf.buffers.score import Score


class Bench:
    """Begins episodes and replies to them; a lost one is begun again."""

    def __init__(self, source: Path, name: str, own: Any = None, **settings: Any) -> None:
        """source: its file, or the folder from where another target is given by name. own: to be played by threads."""
        target = f"{source}:{name}" if source.suffix else name
        config = EnvironmentConfig(**{"function": target, **settings})
        spec = config.spec(source.parent if source.suffix else source)
        assert spec is not None
        self.woken = threading.Event()
        self.pool: EpisodePool[Any] = EpisodePool(spec, config, self.woken.set, own)
        self.fields: dict[Any, Mapping[str, Any]] = {}
        self.events: dict[Any, list[Read | EpisodeEnd | None]] = {}
        """Of each episode what came of it; None: it was lost."""

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.close(60.0)

    def begin(self, key: Any, **fields: Any) -> None:
        self.fields[key] = {
            "prompt": "",
            "seed": 1,
            "question": "?",
            "answer": "4",
            "act": "",
            "path": "",
            "n": 1,
            "task": "one",
            **fields,
        }
        self.events[key] = []
        self.pool.begin(key, self.fields[key])

    def until(self, done: Callable[[], bool], model: Callable[[Any, int], str | Reply | None] = lambda key, turn: None) -> None:
        """Play until it is done. model: what is written in a turn (from 1) of a key; None: nothing. Fails after five
        minutes."""
        by = time.monotonic() + 300.0
        while not done():
            assert time.monotonic() < by, self.events
            self.woken.wait(0.1)
            self.woken.clear()
            for event in self.pool.poll():
                self.events[event.key].append(event.result)
                if event.result is None:
                    self.pool.begin(event.key, self.fields[event.key])
                elif isinstance(event.result, Read) and (text := model(event.key, self.turns(event.key))) is not None:
                    call = event.result.call
                    self.pool.reply(
                        event.key, text._replace(conversation=call.conversation) if call and isinstance(text, Reply) else text
                    )

    def turns(self, key: Any) -> int:
        """The model's turn that it is, in the episode as it was last begun."""
        events = self.events[key]
        begun = max((at for at, event in enumerate(events) if event is None), default=-1)
        return sum(isinstance(event, Read) for event in events[begun + 1 :])

    def opens(self, *keys: Any, **fields: Any) -> None:
        """Begin these episodes, until each has said something."""
        for key in keys:
            self.begin(key, **fields)
        self.until(lambda: all(self.events[key] for key in keys))

    def fails(self, key: Any, **fields: Any) -> str:
        """The reason for which it fails in its first step, though the others are not answered."""
        self.begin(key, **fields)
        self.until(lambda: self.ended(key) is not None, lambda of, turn: "" if of == key else None)
        return self.failure(key)

    def heard(self, count: int) -> Callable[[], bool]:
        """Whether so many events came in all."""
        return lambda: sum(map(len, self.events.values())) >= count

    def play(self, *texts: str | Reply, **fields: Any) -> list[Any]:
        """The observations' contents of one episode, and its end."""
        key = len(self.events)
        self.begin(key, **fields)
        self.until(lambda: self.ended(key) is not None, lambda of, turn: texts[turn - 1] if of == key else None)
        return [each.content if isinstance(each, Read) else each for each in self.events[key]]

    def ended(self, key: Any) -> EpisodeEnd | None:
        last = self.events[key][-1:]
        return last[0] if last and isinstance(last[0], EpisodeEnd) else None

    def failure(self, key: Any) -> str:
        """The reason for which it failed."""
        end = self.ended(key)
        assert end is not None and end.reason == "failed" and end.score is not None, self.events[key]
        return end.score.failure or ""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def walk(spec: EnvironmentSpec, *texts: str, **row: Any) -> tuple[list[Any], Score]:
    """The observations of an environment for a row and these turns, without any pool, and its score."""
    episode = load(spec)(seed=1, **row)
    sends = episode.asend if spec.kind == "async" else episode.send
    said = [await sends(text) if spec.kind == "async" else sends(text) for text in (None, *texts)]
    *read, score = said
    assert isinstance(score, Score)
    return read, score
