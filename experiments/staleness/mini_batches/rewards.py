"""The reward that is really wanted."""

from async_rlhf import reward
from async_rlhf.experiments.throughput.judges import similarity


@reward
def gold(completion: str, answer: str) -> float:
    """Share of the answer's letters in their place: what the preferences were drawn from."""
    return similarity(completion, answer)
