"""The settings by which a token is sampled from the model's distribution, named here only.

The configuration's `[generation]`, requests, records, the wire and both engines take names, types, defaults and ranges from the
fields below. A setting is added here, in `actors/torch_engine/sampling.py` (what it keeps of a distribution) and in
`docs/generation.md`; vLLM is given it by the same name, and is refused where it has none.
"""

from __future__ import annotations

from pydantic import ConfigDict, Field

from async_rlhf.buffers.config import Section


class Sampling(Section):
    """Settings at their defaults cut nothing off. `min_p`, `top_k` and `top_p` are applied in this order to the distribution at
    the temperature, each to what the one before left. Raises ValidationError for a value of another type or out of range.
    """

    model_config = ConfigDict(strict=True)

    temperature: float = Field(default=1.0, ge=0, le=100)
    """Divisor of the logits; 0 is greedy, with the log-probabilities of temperature 1, and nothing is cut off then."""
    top_k: int = Field(default=0, ge=0, le=(1 << 31) - 1)
    """Only the likeliest `top_k` tokens are sampled; 0: all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Only the fewest likeliest tokens whose probabilities sum to `top_p` are sampled; 1: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Only tokens at least `min_p` times as likely as the likeliest are sampled; 0: all."""

    @property
    def truncation(self) -> str:
        """The first setting that leaves some tokens no probability, as `top_k = 5`; empty where there is none."""
        if self.temperature == 0:
            return ""
        given = {name: getattr(self, name) for name in TRUNCATING}
        cuts = (f"{name} = {value}" for name, value in given.items() if value != Sampling.model_fields[name].default)
        return next(cuts, "")


TRUNCATING = tuple(name for name in Sampling.model_fields if name != "temperature")
"""Settings that can leave a token no probability."""
GREEDY = Sampling(temperature=0.0)
