"""Corrections for data that other weights sampled: ratios, weights, masks, and how a loss's declared ones are composed.

The three policies are called behaviour (sampled the token), proximal (the learner at the start of the step) and current
(with gradient).
"""

from async_rlhf.learner.corrections.compose import Correction, correct
from async_rlhf.learner.corrections.ratios import MAX_LOG_RATIO, effective_sample_size, log_ratio, ratio, sequence_log_ratio

__all__ = [
    "MAX_LOG_RATIO",
    "Correction",
    "correct",
    "effective_sample_size",
    "log_ratio",
    "ratio",
    "sequence_log_ratio",
]
