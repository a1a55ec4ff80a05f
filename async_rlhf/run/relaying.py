"""The verb `relay`: checks what it was given, then runs between a hub and its actors until a signal ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from async_rlhf.buffers.config import WeightsConfig
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.transport.keys import load_hub
from async_rlhf.buffers.transport.link import connector
from async_rlhf.buffers.weights.relay import Relay
from async_rlhf.buffers.weights.shared import is_local
from async_rlhf.config import parse_settings


def run_relay(
    hub: str, address: str, keys: Path | None, own_keys: Path | None, overrides: Sequence[str], say: Callable[[str], None]
) -> None:
    """Returns after SIGINT or SIGTERM. Raises ConfigError for what cannot be, DeadlineError when the hub does not let it in."""
    for given, directory, option in ((hub, keys, "--keys"), (address, own_keys, "--own-keys")):
        if directory is None and not is_local(given):
            raise ConfigError(f"{given!r} is beyond this machine, which needs {option} (make them: async-rlhf keys new DIR)")
    config = WeightsConfig.model_validate(parse_settings(("weights",), overrides)["weights"])
    access = None if own_keys is None else load_hub(own_keys)
    relay = Relay(hub, address, config, connector(keys), access)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: relay.stop())
    say(f"relays between {hub} and actors at {address}")
    relay.run()
