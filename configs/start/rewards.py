"""Rewards: functions that get a completion and the columns of its prompt by name, and return how good it is.

Try one before a run: async-rlhf try reward rewards.py:backward --data FILE, with `completion` and `answer` in every line.
"""

from async_rlhf import reward


@reward
def backward(completion: str, answer: str) -> float:
    """1 for the answer, else half of the share of its letters that stand where they should."""
    given = completion.strip()
    if given == answer:
        return 1.0
    right = sum(ours == theirs for ours, theirs in zip(given, answer, strict=False))
    return 0.5 * right / max(len(given), len(answer))
