"""`python -m async_rlhf` is `async-rlhf`."""

from async_rlhf.cli.commands import main

main()
