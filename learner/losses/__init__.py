"""Losses: `objective` is what a backend calls, `LOSSES` the table, `base` the seam."""

from async_rlhf.learner.losses.base import Counts, LossInputs, LossOutputs, denominator
from async_rlhf.learner.losses.objective import objective
from async_rlhf.learner.losses.table import LOSSES

__all__ = ["LOSSES", "Counts", "LossInputs", "LossOutputs", "denominator", "objective"]
