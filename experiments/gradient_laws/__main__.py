"""`python -m async_rlhf.experiments.gradient_laws [learning]`: print the tables of `docs/learner.md`."""

from __future__ import annotations

import sys

import torch

from async_rlhf.experiments.gradient_laws import learning, table

torch.set_num_threads(1)
sys.stdout.write((learning if sys.argv[1:] == ["learning"] else table).markdown() + "\n")
