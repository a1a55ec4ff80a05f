"""`python -m experiments.gradient_laws`: print the table of `docs/learner.md`."""

from __future__ import annotations

import sys

from experiments.gradient_laws.table import markdown

sys.stdout.write(markdown() + "\n")
