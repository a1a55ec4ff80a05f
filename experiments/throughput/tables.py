"""Results files, and the tables of the documents that are generated from the committed one:
`python -m async_rlhf.experiments.throughput.tables`.

A file holds rows, and for each the run that measured it (date, machine, commit, versions). `results.json` beside this file may
hold rows of several runs: a row keeps its run until a later one replaces it.

`tables.toml` names each table's document, columns and cells; a cell holds places `{PART/LOAD/FIELD}` or
`{PART/LOAD/FIELD:FORMAT}`, where FIELD is `ratio`, `lowest`, `highest`, `turns`, `goal`, a side or a figure of that row, and
FORMAT is Python's. A table stands in its document between `<!-- bench: NAME -->` and `<!-- end -->`, with the conditions of
the runs that its rows come from below it. `--from FILE` takes the rows of a results file over first.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from async_rlhf.experiments import page
from async_rlhf.experiments.throughput.harness import QUIET, ROOT, shown

COMMITTED = Path(__file__).with_name("results.json")
SPECIFICATION = Path(__file__).with_name("tables.toml")
_PLACE = re.compile(r"\{([^/{}]+)/([^/{}]+)/([^:{}]+)(?::([^{}]+))?\}")


def save(path: Path, content: Mapping[str, Any]) -> None:
    """Rows one a line, so that a changed number is one changed line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    runs = json.dumps(content["runs"], indent=1, ensure_ascii=False)
    path.write_text(f'{{"runs": {runs},\n"rows": [\n{rows}\n]}}\n')


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Rows of `new` replace those of the same part and load; runs without rows left are dropped.

    Raises ValueError when `new` holds a small run.
    """
    if small := [name for name, run in new["runs"].items() if run["small"]]:
        raise ValueError(f"{', '.join(small)} ran with --small: that measures nothing")
    rows = {(row["part"], row["load"]): row for row in [*old["rows"], *new["rows"]]}
    used = {row["run"] for row in rows.values()}
    runs = {name: run for name, run in {**old["runs"], **new["runs"]}.items() if name in used}
    return {"runs": runs, "rows": list(rows.values())}


def render(table: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """One table in Markdown, with the conditions of its runs below. content: of a results file. Raises KeyError with the row or
    the field that does not exist."""
    known, used = {(row["part"], row["load"]): row for row in content["rows"]}, list[Mapping[str, Any]]()

    def filled(place: re.Match[str]) -> str:
        part, load, name, form = place.groups()
        if (part, load) not in known:
            raise KeyError(f"{COMMITTED.name} has no row of {part} for {load!r}")
        used.append(row := known[part, load])
        return field(row, name, form)

    lines = [[_PLACE.sub(filled, cell) for cell in cells] for cells in table["rows"]]
    names = list(dict.fromkeys(row["run"] for row in used))
    parts = {name: ", ".join(dict.fromkeys(f"`{row['part']}`" for row in used if row["run"] == name)) for name in names}
    runs = [(f"{parts[name]}: " if len(names) > 1 else "") + run_text(content["runs"][name]) for name in names]
    foreign = max((row["foreign"] or 0.0 for row in used if row["turns"]), default=0.0)
    loud = [f"Other programs used up to {foreign:.0%} of the cores."] if foreign > QUIET else []
    return f"{page.raw_table(table['columns'], lines)}\n\nConditions: {' '.join([*runs, *loud])}"


def field(row: Mapping[str, Any], name: str, form: str | None = None) -> str:
    """Of a ratio the median, and in brackets the range and the number of turns, as far as they are known."""
    if name == "goal":
        goals = (("at least", row["at_least"]), ("at most", row["at_most"]))
        return next((f"{words} {bound:g}" for words, bound in goals if bound is not None), "")
    if name == "ratio" and form is None:
        spread = f"{row['lowest']:.3g} to {row['highest']:.3g}" if row["lowest"] != row["highest"] else ""
        if row["ratio"] is None:
            return spread or "unknown"
        further = ", ".join(filter(None, (spread, f"{row['turns']} turns" if spread and row["turns"] else "")))
        return f"{row['ratio']:.3g}" + (f" ({further})" if further else "")
    value = {**row, **row["sides"], **row["figures"]}[name]
    if isinstance(value, list):  # a range, where no more is known
        return " to ".join(shown(each) for each in value)
    return format(value, form) if form and value is not None else shown(value)


def run_text(run: Mapping[str, Any]) -> str:
    """Where and when a run was made; its stated conditions where these were written down by hand."""
    if run["conditions"]:
        return str(run["conditions"])
    machine, versions = run["machine"], run["versions"]
    known = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']:g} GiB, commit {run['commit']}, "
        f"{run['date']} UTC, {known}."
    )


def documents(content: Mapping[str, Any]) -> dict[Path, str]:
    """Every document with a table, as it must read. Raises ConfigError where its markers are missing."""
    texts = dict[Path, str]()
    for table in tomllib.loads(SPECIFICATION.read_text())["table"]:
        path = ROOT / table["document"]
        texts[path] = page.filled(texts.get(path, path.read_text()), {table["name"]: render(table, content)})
    return texts


def main(
    source: Annotated[Path | None, typer.Option("--from", help="A results file whose rows are taken over first.")] = None,
) -> None:
    """Write the tables of README.md, docs and experiments/throughput/README.md from results.json."""
    content = json.loads(COMMITTED.read_text())
    if source is not None:
        content = merged(content, json.loads(source.read_text()))
        save(COMMITTED, content)
    for path, text in documents(content).items():
        if text != path.read_text():
            path.write_text(text)
            typer.echo(path.relative_to(ROOT))


if __name__ == "__main__":
    typer.run(main)
