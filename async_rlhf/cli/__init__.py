"""The command line. `main` is the command `async-rlhf`."""

from async_rlhf.cli.commands import main as main
