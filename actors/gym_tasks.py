"""The import of reasoning-gym: its tasks and their scorers. Holds nothing.

The package imports every task that it has, and so what only one of them needs. Most of the time goes to cellpylib, for which it
imports matplotlib, in every process of a run. So its tasks get a cellpylib that is imported when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def _imported_when_used(name: str) -> Iterator[None]:
    """Gives imports inside the context a stand-in for this module, and later imports the module."""
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.__getattr__ = lambda attribute: getattr(importlib.import_module(name), attribute)  # type: ignore[method-assign]
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


with _imported_when_used("cellpylib"):
    from reasoning_gym import create_dataset, get_score_answer_fn
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

__all__ = ["DATASETS", "ProceduralDataset", "create_dataset", "get_score_answer_fn"]
