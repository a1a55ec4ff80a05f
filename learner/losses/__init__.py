"""Losses: `objective` is what a backend calls, `LOSSES` the table, `base` the seam."""

from learner.losses.base import Counts, Loss, LossInputs, LossOutputs
from learner.losses.objective import divisor, objective
from learner.losses.table import LOSSES

__all__ = ["LOSSES", "Counts", "Loss", "LossInputs", "LossOutputs", "divisor", "objective"]
