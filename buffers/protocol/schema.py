"""What every group of a run looks like, by its configuration: checked before a group is made durable.

What the learner could not read, or would train on wrongly, must not enter: a batch is given again as it was, so one such
group would end the learner at every start.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from async_rlhf.buffers.errors import WireError
from async_rlhf.buffers.protocol.wire import GroupHeader
from async_rlhf.buffers.record import Group, Int32Array
from async_rlhf.buffers.sampling import Sampling


@dataclass(frozen=True)
class GroupSchema:
    """vocabulary: rows of the model's embedding; token ids are below. max_completion_length: of all behind a prompt.
    environment: whether there is one, whose observations may stand between turns. splits: whether they may begin a row anew."""

    group_size: int
    vocabulary: int
    max_prompt_length: int
    max_completion_length: int
    rewards: frozenset[str]
    sampling: Sampling
    environment: bool = False
    splits: bool = False

    def check(self, header: GroupHeader, ids: Int32Array) -> None:
        """ids: the prompt's and the completions'. Raises WireError (`schema`): what, the value, the limit."""
        for name, value, wanted in (
            ("members", len(header.num_tokens), self.group_size),
            ("rewards", header.scores.keys(), self.rewards),
            ("sampling", header.sampling, self.sampling),
        ):
            if value != wanted:
                raise _wrong(header.number, f"{name}: {_shown(value)}; this run's: {_shown(wanted)}")
        for name, value, most in (
            ("prompt tokens", header.num_prompt_tokens, self.max_prompt_length),
            ("tokens of a completion", max(header.num_tokens), self.max_completion_length),
            ("largest token id", int(ids.max()), self.vocabulary - 1),
        ):
            if value > most:
                raise _wrong(header.number, f"{name}: {value}; at most {most}")

        if not self.environment and any(version is None for spans in header.spans for version, *_ in spans):
            raise _wrong(header.number, "tokens that were not sampled; this run has no environment")
        if not self.splits and any(header.restarts):
            raise _wrong(header.number, "a row that begins anew; this run has environment.render other than 'split'")

    def check_supports(self, group: Group) -> None:
        """The tokens that others were chosen among exist. Raises WireError (`schema`)."""
        top = max(
            (int(rollout.sampling_mask.ids.max()) for rollout in group.rollouts if rollout.sampling_mask is not None), default=0
        )
        if top >= self.vocabulary:
            raise _wrong(group.number, f"largest token id in a sampling mask: {top}; at most {self.vocabulary - 1}")


def _shown(value: object) -> str:
    return str(sorted(value) if isinstance(value, Set) else value)[:200]


def _wrong(number: int, detail: str) -> WireError:
    return WireError(f"group {number}: {detail}", "schema")
