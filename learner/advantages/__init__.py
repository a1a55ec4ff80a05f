"""What completions, and their tokens, are worth. Pure functions over rewards and values, in numpy.

The baseline is computed here, when a group is consumed, from the members that count: a failed score never becomes a
number and never moves a mean.
"""

from async_rlhf.learner.advantages.batch import reinforce_pp
from async_rlhf.learner.advantages.gae import gae
from async_rlhf.learner.advantages.groups import group_relative, leave_one_out
from async_rlhf.learner.advantages.select import best, constant, drop_constant, pair
from async_rlhf.learner.advantages.traces import traced, v_trace

__all__ = [
    "best",
    "constant",
    "drop_constant",
    "gae",
    "group_relative",
    "leave_one_out",
    "pair",
    "reinforce_pp",
    "traced",
    "v_trace",
]
