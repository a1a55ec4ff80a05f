"""`python -m async_rlhf.experiments.gradient_laws`: print the table of `docs/learner.md`."""

from __future__ import annotations

import sys

import torch

from async_rlhf.experiments.gradient_laws import table

torch.set_num_threads(1)
sys.stdout.write(table.markdown() + "\n")
