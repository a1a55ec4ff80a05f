"""`check --deep`: the model is loaded as a run would load it, and held to plain passes by learner and engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from async_rlhf.config import Config


def deep_check(config: Config) -> Iterator[str]:
    """A line for each part that holds. Raises ConfigError for the first that does not."""
    # Torch takes seconds to import, and nothing else of `check` needs it.
    from transformers.utils import logging

    from async_rlhf.actors.torch_engine.loading import load_engine
    from async_rlhf.learner.model.files import load_model
    from async_rlhf.learner.model.policy import Policy
    from async_rlhf.learner.model.verification import check_policy
    from async_rlhf.learner.step.machine import find_device

    logging.disable_progress_bar()
    began = time.monotonic()
    policy = Policy(load_model(Path(config.model), find_device(config.learner.device)), config.learner)
    check_policy(policy)
    rows = "completions of a prompt share its computation" if policy.packs else "each completion has a row of its own"
    yield f"learner: log-probabilities are those of plain passes ({rows}; {time.monotonic() - began:.1f} s)."
    del policy
    if config.engine.kind != "torch":
        yield f"engine: {config.engine.kind} is held to the learner while the run goes on (engine.mismatch_limit)."
        return
    began = time.monotonic()
    engine = load_engine(config.model, config.served_engine)
    bits = ", the same bits alone and in a batch" if engine.is_batch_invariant else ""
    yield f"engine: sampled log-probabilities are those of plain passes{bits} ({time.monotonic() - began:.1f} s)."
