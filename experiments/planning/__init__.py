"""The models of `async_rlhf/plan` held against what was published and what is measured."""

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
"""Its tables are made, in places of the kind `planning` (`experiments.page`)."""
