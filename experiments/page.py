"""Pages for people: Markdown with its tables, numbers with their intervals, rows as CSV, and HTML that holds its pictures and
asks nothing of the outside.

HTML is made of the Markdown that reports use: headings, paragraphs, lists, tables, code, emphasis, and images that are given.
Everything else, HTML and links too, stays text. Called by every report.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from markdown_it import MarkdownIt

if TYPE_CHECKING:  # it needs scipy, and the doctor's pages do not
    from async_rlhf.experiments.statistics import Mean

T = TypeVar("T")

_RULES = ("heading", "list", "table", "code", "backticks", "emphasis", "escape", "image")
# No script, no style, font or picture from elsewhere: the browser holds the page to it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
pre, code { font: 0.9em ui-monospace, monospace; background: #f4f4f4 } pre { padding: 0.6rem; white-space: pre-wrap }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; vertical-align: top }
th { border-bottom: 2px solid #555 } svg { max-width: 100%; height: auto }
@page { margin: 1.2cm }
@media print {
  body { font-size: 9pt; max-width: none; margin: 0; padding: 0 } table { display: table; font-size: 6.5pt }
  th, td { padding: 0.15rem 0.3rem } tr, svg, pre { break-inside: avoid } h2 { break-after: avoid }
}
"""


def table(rows: Iterable[Sequence[str]]) -> str:
    """Markdown of a table; the first row is its head."""
    head, *others = [[_in_a_cell(cell) for cell in row] for row in rows]
    return raw_table(head, others)


def raw_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Markdown of a table whose cells are Markdown too."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines))


def by_group(groups: Mapping[str, list[T]], columns: Mapping[str, Callable[[list[T]], str]]) -> str:
    """Markdown of a table with a line for each setting."""
    lines = ([name, *(shown(members) for shown in columns.values())] for name, members in groups.items())
    return table([["setting", *columns], *lines])


def number(value: Mean | None, *, digits: int = 3) -> str:
    """A mean, with its interval, its range, or alone where there is one seed."""
    if value is None:
        return "-"
    mean = f"{round(value.mean, digits) + 0.0:,.{digits}f}"
    if value.half_width is not None:
        return f"{mean} ± {value.half_width:,.{digits}f}"
    if value.count == 1:
        return mean
    return f"{mean} ({value.low:,.{digits}f} to {value.high:,.{digits}f})"


def difference(found: Mean | None) -> str:
    """With its interval."""
    if found is None:
        return "-"
    return f"{found.mean:+.3f}" if found.count == 1 else f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def p_value(found: Mean) -> str:
    """After Holm; a dash where there is none."""
    return "-" if found.adjusted is None else "< 0.001" if found.adjusted < 0.001 else f"{found.adjusted:.3f}"


def comparison(found: Mean | None) -> list[str]:
    """Two cells: the difference and its p value; empty for what was not compared."""
    return ["", ""] if found is None else [difference(found), p_value(found)]


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A line a row, with the columns of all rows in the order in which they first come; None is an empty field."""
    with path.open("w", newline="") as file:
        columns = list(dict.fromkeys(column for row in rows for column in row))
        writer = csv.DictWriter(file, fieldnames=columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_page(
    directory: Path,
    render: Callable[[Mapping[str, str]], str],
    draw: Callable[[], Mapping[str, Any]],
    say: Callable[[str], None],
) -> list[Path]:
    """report.md, the same as HTML (report.html), and each picture as PNG and SVG. Returns the files, the pages last.

    render: the Markdown, of the file names of the pictures by their names; draw: matplotlib figures by name. Without matplotlib
    everything but the pictures. Raises OSError.
    """
    figures: Mapping[str, Any] = {}
    try:
        figures = draw()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        say("no picture: matplotlib is not installed. pip install 'async-rlhf[experiments]', then the same command draws it")
    drawn = dict[str, str]()
    for name, figure in figures.items():
        figure.savefig(directory / f"{name}.png")
        drawn[name] = svg(figure, name)
        (directory / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
    text = render({name: f"{name}.png" for name in drawn})
    markdown, page = directory / "report.md", directory / "report.html"
    markdown.write_text(text, encoding="utf-8")
    page.write_text(to_html(text, {f"{name}.png": picture for name, picture in drawn.items()}), encoding="utf-8")
    return [*(directory / f"{name}.{kind}" for name in drawn for kind in ("png", "svg")), markdown, page]


def plain(text: str) -> str:
    """Foreign text as one line that Markdown shows as it is."""
    return re.sub(r"([\\`*<>\[\]|!#])", r"\\\1", " ".join(text.split()))


def to_html(markdown: str, pictures: Mapping[str, str]) -> str:
    """The whole page. pictures: SVG by the address that an image has in the Markdown; of any other image its text is shown."""

    def image(_: Any, tokens: Sequence[Any], place: int, *__: Any) -> str:
        words = html.escape(tokens[place].content)
        drawn = pictures.get(str(tokens[place].attrs["src"]))
        if drawn is None:
            return words
        # the prologue names the address of a grammar, which HTML needs not
        return drawn[drawn.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{words}"', 1)

    reader = MarkdownIt("zero", {"html": False}).enable(_RULES)
    reader.add_render_rule("image", image)
    first = next((line.removeprefix("# ") for line in markdown.splitlines() if line.startswith("# ")), "Report")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{html.escape(first)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{reader.render(markdown)}</body>\n</html>\n"
    )


def svg(figure: Any, name: str) -> str:
    """A matplotlib figure; the same text for the same figure and name. name: tells apart what two pictures of a page define."""
    import matplotlib

    out = io.StringIO()
    # text stays text, and no date, random name or address makes two equal pictures differ
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return out.getvalue()


def _in_a_cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))
