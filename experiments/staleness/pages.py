"""Writes what a sweep found: results.csv, two pictures as PNG and SVG, report.md, and report.html with the pictures inside.

From an archive alone; without matplotlib everything but the pictures. Called by `sweep` and by `async-rlhf report`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from async_rlhf.experiments.page import svg, to_html
from async_rlhf.experiments.staleness.archive import Archive
from async_rlhf.experiments.staleness.report import render, write_csv

_PICTURES = ("results", "trade_offs")


def write(archive: Archive, directory: Path, say: Callable[[str], None], html: Path | None = None) -> list[Path]:
    """Into the directory, which exists; the page into `html` where it is given. What was written, the pages last. Raises
    OSError."""
    table, markdown, page = directory / "results.csv", directory / "report.md", html or directory / "report.html"
    write_csv(archive.results, table)
    drawn = _draw(archive, directory, say)
    names = [f"{name}.png" if drawn else None for name in _PICTURES]
    text = render(archive, *names)
    markdown.write_text(text, encoding="utf-8")
    page.write_text(to_html(text, {f"{name}.png": each for name, each in drawn.items()}), encoding="utf-8")
    pictures = [directory / f"{name}.{kind}" for name in drawn for kind in ("png", "svg")]
    return [table, *pictures, markdown, page]


def _draw(archive: Archive, directory: Path, say: Callable[[str], None]) -> dict[str, str]:
    """The pictures as SVG, by name."""
    try:
        from async_rlhf.experiments.staleness.plot import picture
        from async_rlhf.experiments.staleness.trade_offs import picture as trade_offs
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        say("no picture: matplotlib is not installed. pip install 'async-rlhf[experiments]', then the same command draws it")
        return {}
    drawn = {}
    for name, draw in zip(_PICTURES, (picture, trade_offs), strict=True):
        figure = draw(archive.results, archive.sweep, archive.command)
        figure.savefig(directory / f"{name}.png")
        drawn[name] = svg(figure, name)
        (directory / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
    return drawn
