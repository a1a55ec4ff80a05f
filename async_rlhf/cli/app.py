"""The command line's root: its panels and groups of commands, the parameters they share, how errors are reported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from async_rlhf.buffers.errors import AsyncRLHFError, ConfigError

if TYPE_CHECKING:
    from async_rlhf.run.reading import Reading

PANELS = {
    "Start here": ("init", "check", "train", "status", "watch", "plot", "evaluate", "stop"),
    "One run in detail": ("set", "fork", "rollouts", "report", "track", "push"),
    "Before a run": ("try", "doctor", "plan"),
    "Many runs and machines": ("sweep", "queue", "spool", "serve", "keys"),
}
"""The commands that `--help` lists, under these headings and in this order."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Panels(TyperGroup):
    """Lists its commands by purpose."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        for panel, names in PANELS.items():
            shown = [(name, self.commands[name].get_short_help_str(width)) for name in names if name in self.commands]
            with formatter.section(panel):
                formatter.write_dl(shown)


app = typer.Typer(
    cls=_Panels,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Asynchronous off-policy RLHF. Start with:  async-rlhf train quick\n\n"
    "Exit codes: 0 done, 1 failed, 2 usage, 3 invalid configuration, 4 stalled, 5 a process keeps ending, "
    "6 rewards fail too often, 7 refused to train, 8 a file is damaged, 130 forced to end.",
)


def group(name: str, words: str) -> typer.Typer:
    """A group of commands under the root."""
    made = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=words)
    app.add_typer(made, name=name)
    return made


ConfigPath = Annotated[Path, typer.Argument(help="TOML file, or the name of a shipped configuration: quick.")]
RunPath = Annotated[Path, typer.Argument(help="Run directory, for example runs/quick.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Setting: queue.max_staleness=0.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the token that clients must send.")]
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


def command(group: typer.Typer, name: str | None = None) -> Callable[[_Function], _Function]:
    """Add a function to a group as a command. An error on purpose becomes its message and exit code (`errors`)."""

    def add(function: _Function) -> _Function:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            with errors():
                function(*args, **kwargs)

        group.command(name)(run)
        return function

    return add


def experiment(name: str) -> Any:
    """A function of the experiments, which lie a floor above: found by its entry point. Raises ConfigError."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    entry = next(iter(entry_points(group="async_rlhf.experiments", name=name)), None)
    if entry is None or find_spec("async_rlhf.experiments") is None:
        raise ConfigError(
            f"this installation has no {name!r}: it was made without experiments/, or is older than its code; install it again"
        )
    return entry.load()


def say(text: str, *, err: bool = False) -> None:
    """Print text from files or peers, without its control characters."""
    from async_rlhf.run.run_files import printable

    typer.echo(printable(text), err=err)


def overridden(overrides: list[str] | None) -> dict[str, Any]:
    """The settings given by `--set`. Raises ConfigError."""
    from async_rlhf.run.loading import parse_override

    return dict(parse_override(text) for text in overrides or [])


def opened(run_dir: Path) -> Reading:
    """The run of a directory. Raises ConfigError for one without."""
    from async_rlhf.run.reading import Reading
    from async_rlhf.run.run_dir import RunDir

    return Reading(RunDir.existing(run_dir))


def load_config(config: Path, overrides: list[str] | None) -> Any:
    from async_rlhf.run.loading import load

    return load(config, overridden(overrides))


@contextmanager
def errors() -> Iterator[None]:
    """An error on purpose, a file that cannot be used or a full disk is one message and its exit code; anything else is a
    defect and shows where."""
    try:
        # Rewards named by import path are found from where the command is run, after everything that is installed.
        sys.path.append(str(Path.cwd()))
        yield
    except (AsyncRLHFError, OSError) as error:
        from async_rlhf.buffers.files import FULL
        from async_rlhf.launch.exit_codes import exit_code

        if isinstance(error, OSError) and error.filename is None and error.errno not in FULL:
            raise
        say(f"error: {error}", err=True)
        raise typer.Exit(exit_code(error)) from error
