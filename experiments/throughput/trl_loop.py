"""TRL's `GRPOTrainer` as a side of the episodes benchmark: the same episodes as an actor's, a batch when it is told."""

from __future__ import annotations

import tempfile
from pathlib import Path

from async_rlhf.actors.engine import RolloutKey
from async_rlhf.experiments.throughput import slow_tool
from async_rlhf.experiments.throughput.episode_loops import GROUP_SIZE, LONGEST, PROMPTS, TURNS, Window, tokens_of
from async_rlhf.experiments.throughput.sides import MODEL
from async_rlhf.experiments.throughput.trl_process import TrlProcess

_BATCHES = 8


class TrlLoop(TrlProcess):
    """In a process of its own. groups: of a batch."""

    def __init__(self, python: Path, groups: int, threads: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="async-rlhf-bench-")
        keys = [RolloutKey(group, 0, member) for group in range(_BATCHES * groups) for member in range(GROUP_SIZE)]
        lengths, self._rollouts = list(map(tokens_of, keys)), groups * GROUP_SIZE
        spec = {
            "model": str(MODEL),
            "output_dir": self._directory.name,
            "prompts": PROMPTS,
            "lengths": [lengths[at : at + self._rollouts] for at in range(0, len(lengths), self._rollouts)],
            "group_size": GROUP_SIZE,
            "turns": TURNS,
            "max_completion_length": TURNS * (LONGEST + len(slow_tool.OBSERVATION)),
            "mean_s": slow_tool.MEAN_S,
            "threads": threads,
        }
        super().__init__(python, "episodes", spec, Path(self._directory.name))

    def play(self) -> Window:
        said = self.step()
        return Window(said["tokens"], self._rollouts, said["wall"], said["cpu"])

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._directory.cleanup()
