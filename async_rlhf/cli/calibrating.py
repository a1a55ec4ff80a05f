"""The command that measures this machine for `plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.cli.app import AsJson, app, errors, say


@app.command()
def calibrate(
    model: Annotated[
        str, typer.Option(help="Directory, or name of a shipped model: its stages are measured.")
    ] = "tiny-speller",
    device: Annotated[str, typer.Option(help="Torch device of engine and learner.")] = "cpu",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the engine's weights.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the engine, and of the learner.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Most rows that are decoded together.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, max=170, help="What measuring may take, about; loading comes on top.")] = 60,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("calibration.json"),
    as_json: AsJson = False,
) -> None:
    """Measure this machine for `plan`: arithmetic, memory, links, and what each stage of a run of one model costs."""
    with errors():
        from async_rlhf.calibrate.machine import calibrate as measure
        from async_rlhf.plan.calibration import save
        from async_rlhf.run import shipped

        if not out.resolve().parent.is_dir():
            raise ConfigError(f"--out {str(out)!r}: its folder does not exist")
        found = measure(
            shipped.model_directory(model) or Path(model).expanduser(),
            device=device,
            dtype=dtype,
            threads=threads,
            slots=slots,
            seconds=seconds,
            say=lambda line: say(line, err=True),
        )
        save(found, out)
        if as_json:
            typer.echo(found.model_dump_json(indent=1))
        else:
            say(f"{out}: measured in {found.seconds:.0f} s")
