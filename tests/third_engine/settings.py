"""A third engine's settings, as one writes them: keys of its own, and answers where the usual ones do not hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.buffers.sampling import Sampling

if TYPE_CHECKING:
    from tests.third_engine.engine import ParrotEngine


class ParrotEngineConfig(EngineConfig):
    """Repeats one text, whatever it is asked."""

    kind: Literal["parrot"]
    says: tuple[int, ...]
    """The tokens of every completion."""
    perches: int = Field(default=2, ge=1)
    """Devices that it sits on."""

    def start(self, model_dir: str, *, on_update: object, version: int) -> ParrotEngine:
        from tests.third_engine.engine import ParrotEngine

        return ParrotEngine(self.says, version)

    @property
    def num_devices(self) -> int:
        return self.perches

    def unrecorded(self, sampling: Sampling) -> str:
        return "a parrot leaves nothing out. Set generation.top_p = 1.0"

    def refusals(self, longest: int) -> Iterator[str]:
        if len(self.says) > longest:
            yield f"engine.says has {len(self.says)} tokens, a row {longest} at most: say less"
