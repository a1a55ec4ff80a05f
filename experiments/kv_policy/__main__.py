"""`python -m async_rlhf.experiments.kv_policy prose|task|cost|report`: rows, then the picture and the table of all of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from async_rlhf.experiments.kv_policy.arms import SINKS
from async_rlhf.experiments.kv_policy.rows import Row, read_csv, write_csv
from async_rlhf.run.config import load

app = typer.Typer(add_completion=False)
Out = Annotated[Path, typer.Option(help="Directory, made.")]
Budgets = Annotated[list[int], typer.Option("--budget", min=SINKS + 2, help="Most tokens kept; again for another.")]
OUT = Path("runs/kv_policy")


@app.command()
def prose(
    model: Annotated[Path, typer.Argument(help="Directory of a pretrained causal language model whose layers attend to all.")],
    budget: Budgets = [48, 96, 192],  # noqa: B006  # typer only reads it
    texts: Annotated[int, typer.Option(min=2)] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 640,
    out: Out = OUT,
) -> None:
    """Nats a token of prose, and the divergence from full attention: 100 passes over a text."""
    from async_rlhf.experiments.kv_policy.prose import prose_rows

    _write(prose_rows(model, budget, texts, length), out / "prose.csv")


@app.command()
def task(
    model: Annotated[Path, typer.Argument(help="Directory of a model that a run of this configuration has trained.")],
    config: Annotated[str, typer.Argument(help="A configuration whose rewards are the task's own.")] = "quick",
    budget: Budgets = [8, 12, 16, 24, 32, 48],  # noqa: B006
    out: Out = OUT,
) -> None:
    """Reward and accuracy of greedy completions, and the divergence of sampled ones, over the held-out prompts."""
    from async_rlhf.experiments.kv_policy.task import task_rows

    _write(task_rows(load(config), model, budget), out / "task.csv")


@app.command()
def cost(
    length: Annotated[list[int], typer.Option(help="Tokens of a row; again for another.")] = [512, 1024, 2048, 4096],  # noqa: B006
    budget: Annotated[int, typer.Option(min=SINKS + 2)] = 256,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    out: Out = OUT,
) -> None:
    """Bytes of keys and values, and tokens a second, by the length of rows."""
    from async_rlhf.experiments.kv_policy.cost import cost_rows

    _write(cost_rows(length, budget, turns), out / "cost.csv")


@app.command()
def report(out: Out = OUT) -> None:
    """`picture.png` and `report.md` of the CSV files in the directory."""
    from async_rlhf.experiments.kv_policy.page import draw, table

    rows = [
        row for name in ("prose", "task", "cost") if (out / f"{name}.csv").exists() for row in read_csv(out / f"{name}.csv")
    ]
    draw(rows, out / "picture.png")
    (out / "report.md").write_text(table(rows))
    typer.echo(str(out / "report.md"))


def _write(rows: Iterable[Row], path: Path) -> None:
    torch.set_num_threads(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_csv(rows, path)
    typer.echo(f"{path}: {len(read_csv(path))} rows", err=True)


if __name__ == "__main__":
    app()
