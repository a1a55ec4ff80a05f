"""Losses: `objective` is what a backend calls, `LOSSES` the table, `base` the seam."""

from learner.losses.base import Counts, LossInputs, LossOutputs, denominator
from learner.losses.objective import objective
from learner.losses.table import LOSSES

__all__ = ["LOSSES", "Counts", "LossInputs", "LossOutputs", "denominator", "objective"]
