"""Commands for processes that actors on several machines share (serve reward, environment, relay), and for their keys."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rlhf.cli.app import Overrides, command, group

serve = group("serve", "Serve a reward, an environment or weights to actors.")
keys = group("keys", "Make and revoke keys for connections from other machines.")

Address = Annotated[str, typer.Option(help="tcp://IP:PORT or ipc://PATH; an address beyond this machine needs --keys.")]
Keys = Annotated[Path | None, typer.Option(help="Key directory (async-rlhf keys new DIR).")]
KeyDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="The hub's or relay's key directory.")]


@command(serve, "reward")
def serve_reward(
    reward: Annotated[str, typer.Argument(metavar="FILE:NAME", help="A reward, as in rewards.functions.")],
    address: Address,
    keys: Keys = None,
    overrides: Overrides = None,
) -> None:
    """Serve a reward, which actors use as `remote`. Ctrl-C ends the server. --set takes keys of [rewards] and [scoring]."""
    from async_rlhf.actors.config import RewardsConfig, ScoringConfig
    from async_rlhf.actors.scoring.server import ScoringServer
    from async_rlhf.run.loading import parse_settings

    given = parse_settings(("rewards", "scoring"), overrides or [])
    scoring = ScoringConfig.model_validate(given["scoring"])
    (spec,) = RewardsConfig.model_validate({**given["rewards"], "functions": [reward]}).specs(Path.cwd(), scoring.stages)
    _serve(spec.name, ScoringServer([spec], scoring, address, keys))


@command(serve, "environment")
def serve_environment(
    environment: Annotated[str, typer.Argument(metavar="FILE:NAME", help="An environment, as in environment.function.")],
    address: Address,
    keys: Keys = None,
    overrides: Overrides = None,
) -> None:
    """Serve an environment, which actors use as `remote:ADDRESS`. Ctrl-C ends the server. --set takes keys of [environment]."""
    from async_rlhf.actors.environments import EnvironmentConfig
    from async_rlhf.actors.environments.server import EnvironmentServer
    from async_rlhf.run.loading import parse_settings

    given = parse_settings(("environment",), overrides or [])["environment"]
    config = EnvironmentConfig.model_validate({**given, "function": environment})
    spec = config.spec(Path.cwd())
    assert spec is not None
    _serve(spec.name, EnvironmentServer(spec, config, address, keys))


@command(serve, "sessions")
def serve_sessions(
    address: Address,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1 for harnesses and agents.")],
    key_file: Annotated[Path, typer.Option(help="File with the harnesses' key; created if missing.")],
    keys: Keys = None,
    overrides: Overrides = None,
) -> None:
    """Let harnesses play the episodes of a run, whose environment is `remote:ADDRESS`. Ctrl-C ends the server. --set takes keys
    of [environment]."""
    from async_rlhf.actors.agents.harness import serve_harnesses
    from async_rlhf.run.loading import parse_settings

    given = parse_settings(("environment",), overrides or [])["environment"]
    server, harnesses = serve_harnesses(address, port, key_file, keys, given)
    typer.echo(f"harnesses start sessions at {harnesses.origin}, with the key in {key_file}")
    _serve("sessions", server, harnesses.counters)


def _serve(name: str, server: Any, further: Mapping[str, int] | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then print the counters. further: more of them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    typer.echo(f"{name} is served at {server.address}")
    server.run()
    typer.echo(", ".join(f"{count} {name}" for name, count in {**server.counters, **(further or {})}.items()))


@command(serve, "relay")
def serve_relay(
    hub: Annotated[str, typer.Argument(help="Address of the hub, or of another relay.")],
    address: Annotated[str, typer.Argument(help="tcp://IP:PORT or ipc://PATH for actors; beyond this machine it needs keys.")],
    keys: Annotated[Path | None, typer.Option(help="Key directory like an actor's, for the hub.")] = None,
    own_keys: Annotated[Path | None, typer.Option(help="Key directory like a hub's, for actors.")] = None,
    overrides: Overrides = None,
) -> None:
    """Relay weights to many actors. The hub sends each version to the relay once. Ctrl-C ends the relay."""
    from async_rlhf.run.processes.roles import relay_by_hand

    relay_by_hand(hub, address, keys, own_keys, overrides or [], typer.echo)


@command(keys, "new")
def keys_new(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New directory; it stays on the hub's machine.")],
    names: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME[:ROLE,...]", help="Machine (roles: actor, relay, learner, control)."),
    ] = None,
) -> None:
    """Make the keys of a hub or relay. Each named machine gets a key, for actors by default. No file is overwritten."""
    from async_rlhf.buffers.transport.keys import create
    from async_rlhf.buffers.transport.link import new_pair

    create(directory, names or [], new_pair)
    typer.echo(f"{directory} stays on this machine; in the configuration:  [security]  keys = {json.dumps(str(directory))}")
    _say_what_to_move(directory, names or [])


@command(keys, "admit")
def keys_admit(
    directory: KeyDirectory,
    names: Annotated[list[str], typer.Argument(metavar="NAME[:ROLE,...]...", help="Further machines, as in `keys new`.")],
) -> None:
    """Make keys for further machines. A running hub admits them within a second; other machines keep their keys."""
    from async_rlhf.buffers.transport.keys import add
    from async_rlhf.buffers.transport.link import new_pair

    add(directory, names, new_pair)
    _say_what_to_move(directory, names)


@command(keys, "revoke")
def keys_revoke(
    directory: KeyDirectory,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Machines to remove.")],
) -> None:
    """Remove machines from the list. A running hub closes their connections within a second."""
    from async_rlhf.buffers.transport.keys import revoke

    revoke(directory, names)
    typer.echo(f"no longer let in: {', '.join(names)}")


def _say_what_to_move(directory: Path, names: list[str]) -> None:
    for name in (text.partition(":")[0] for text in names):
        typer.echo(f"move {directory / f'for-{name}'} to {name}, keeping its modes (scp -rp), and delete it here")
