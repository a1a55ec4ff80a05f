"""The command line's root: its groups of commands, the parameters they share, how errors are reported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Asynchronous off-policy RLHF. Start with:  async-rlhf train quick\n\n"
    "Exit codes: 0 done, 1 failed, 2 usage, 3 configuration, 4 stalled, 5 a process ends again and again, "
    "6 rewards fail too often, 7 refused to train, 8 a file is damaged, 130 forced to end.",
)

rollouts_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look at a run's rollouts, or learn from them again."
)
app.add_typer(rollouts_app, name="rollouts")
keys_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Keys for a hub that listens to other machines.")
app.add_typer(keys_app, name="keys")
rewards_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at rewards before a run depends on them.")
app.add_typer(rewards_app, name="rewards")
environments_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Play an environment before a run depends on it."
)
app.add_typer(environments_app, name="environments")
app.add_typer(loss_app := typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at a loss."), name="loss")

spool_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Prompts that come while a run goes on.")
app.add_typer(spool_app, name="spool")

ConfigPath = Annotated[Path, typer.Argument(help="TOML file, or the name of a shipped configuration: quick.")]
RunPath = Annotated[Path, typer.Argument(help="Run directory, for example runs/quick.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, for example --set queue.max_staleness=0.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a script.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"async-rlhf {version('async-rlhf')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


def experiment(name: str) -> Any:
    """A function of the experiments, which lie a floor above: found by its entry point. Raises ConfigError."""
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group="async_rlhf.experiments", name=name)), None)
    if found is None:
        raise ConfigError(
            f"this installation is older than its code and knows no {name!r}: install it again, as it was installed"
        )
    return found.load()


def say(text: str, *, err: bool = False) -> None:
    """Print what comes from files or peers: it may not speak to the terminal."""
    from async_rlhf.run.run_files import printable

    typer.echo(printable(text), err=err)


def load_config(config: Path, overrides: list[str] | None) -> Any:
    from async_rlhf.run.config import load, parse_override

    return load(config, dict(parse_override(text) for text in overrides or []))


@contextmanager
def errors() -> Iterator[None]:
    """An error on purpose is one message and its exit code; anything else is a defect and shows where."""
    try:
        # Rewards named by import path are found from where the command is run, after everything that is installed.
        sys.path.append(str(Path.cwd()))
        yield
    except AsyncRLHFError as error:
        from async_rlhf.launch.exit_codes import exit_code

        say(f"error: {error}", err=True)
        raise typer.Exit(exit_code(error)) from error
