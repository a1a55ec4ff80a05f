"""Turns, rows, the run of all parts, and the tables of the documents, which are what the committed results give."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from async_rlhf.experiments.throughput import __main__ as bench
from async_rlhf.experiments.throughput.__main__ import PARTS
from async_rlhf.experiments.throughput.harness import Bench, MissingError, Row, alternate, rates
from async_rlhf.experiments.throughput.tables import COMMITTED, documents, field, merged, render


def test_sides_take_turns_in_alternating_order_and_the_first_turn_is_left_out() -> None:
    calls = list[str]()

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, turns=2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4, 5], "b": [3, 6]}


def test_a_ratio_is_the_median_of_the_turns_ratios_with_lowest_and_highest() -> None:
    row = Row.of("load", rates(60.0, {"ours": [1.0, 2.0, 3.0], "other": [2.0, 2.0, 9.0]}), "tok/s", at_least=1.2)
    assert row.sides == {"ours": 30.0, "other": 30.0}
    assert (row.ratio, row.lowest, row.highest, row.turns) == (2.0, 1.0, 3.0, 3)
    assert str(row) == "load: ours 30 tok/s  other 30 tok/s; ratio 2 (1 to 3); turns 3; goal at least 1.2, reached"


def test_a_row_measured_beside_other_programs_names_their_share_and_a_count_does_not() -> None:
    timed = Row("load", {}, "s", 1.0, 1.0, 1.0, turns=3, foreign=0.4)
    assert str(timed).endswith("; not quiet: other programs used 40%, measure again")
    assert "quiet" not in str(replace(timed, turns=None))


def test_what_children_and_orphans_take_is_the_benchmarks_own() -> None:
    script = """
import subprocess, sys
from async_rlhf.experiments.throughput.harness import own_cpu_s
from async_rlhf.launch.forked import adopt_orphans
adopt_orphans()
before = own_cpu_s()
work = "import time; sum(range(20_000_000)); print(time.process_time())"
begins_it = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work!r}])"
took = [subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout for code in (work, begins_it)]
assert own_cpu_s() - before >= 0.9 * sum(map(float, took)), (own_cpu_s() - before, took)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def invoke(part: object, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench.command("mine", part))  # type: ignore[arg-type]
    return CliRunner().invoke(app, list(arguments))


def test_a_part_takes_its_own_options_and_without_its_package_keeps_its_rows_and_ends_with_the_code_for_it() -> None:
    def part(bench: Bench, size: Annotated[int, typer.Option()] = 1) -> Iterator[Row]:
        yield Row.of("load", {"bytes": [size] * bench.num_turns(5)}, "bytes")
        raise MissingError("vLLM is not installed")

    done = invoke(part, "--size", "7", "--turns", "2", "--json")
    row = json.loads(done.stdout)
    assert (row["part"], row["sides"], row["turns"]) == ("mine", {"bytes": 7}, 2)
    assert done.exit_code == bench.MISSING and "mine: vLLM is not installed" in done.output


def test_help_lists_every_part_and_every_part_is_a_generator_function() -> None:
    shown = CliRunner().invoke(bench.app, ["--help"]).stdout
    for part in bench.PARTS:
        assert part in shown
        assert callable(bench.load(part))
    refused = CliRunner().invoke(bench.app, ["--only", "speed"])
    assert refused.exit_code == 2 and "there are engine, vllm_side" in " ".join(refused.output.split())
    assert "--model" in CliRunner().invoke(bench.app, ["engine", "--help"]).stdout


def test_a_part_that_fails_is_named_at_the_end_and_the_others_are_in_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(part: str, options: list[str], quiet: bool) -> bench.Outcome:
        how = {"queue": "failed (1)", "vllm_side": "missing a package"}.get(part, "measured")
        rows = (Row.of("load", {"a": [1.0], "b": [2.0]}, "s"),) if how == "measured" else ()
        return bench.Outcome(how, rows, 1.0)

    monkeypatch.setattr(bench, "measure", measure)
    done = CliRunner().invoke(bench.app, ["--output", str(tmp_path / "all.json"), "--small"])
    assert done.exit_code == 1
    assert "not measured: vllm_side (missing a package), queue (failed (1))" in done.output
    written = json.loads((tmp_path / "all.json").read_text())
    ((_, run),) = written["runs"].items()
    assert run["parts"].keys() == bench.PARTS.keys()
    assert run["machine"]["cores"] and run["versions"]["torch"] and run["commit"]
    assert len(written["rows"]) == len(bench.PARTS) - 2
    assert written["rows"][0].keys() == {"run", *asdict(Row.of("load", {"a": [1.0]}, "s"))}


COMMITTED_RESULTS: dict[str, Any] = json.loads(COMMITTED.read_text())


def test_the_documents_show_the_committed_results() -> None:
    for path, text in documents(COMMITTED_RESULTS).items():
        assert path.read_text() == text, f"run python -m async_rlhf.experiments.throughput.tables: {path.name} is not current"


def test_every_committed_row_is_a_row_of_a_part_and_of_a_run() -> None:
    names = {"run", *(field.name for field in fields(Row))}
    for row in COMMITTED_RESULTS["rows"]:
        assert row.keys() == names and row["part"] in PARTS
        assert row["run"] in COMMITTED_RESULTS["runs"]


def row(load: str, run: str, ratio: float | None, **further: Any) -> dict[str, Any]:
    known = {"lowest": ratio, "highest": ratio, "turns": None, "at_least": None, "at_most": None, "foreign": None}
    return {"run": run, "part": "engine", "load": load, "ratio": ratio, "sides": {}, "figures": {}, **known, **further}


def test_a_cell_shows_the_range_and_turns_where_they_are_known() -> None:
    for ratio, known, shown in (
        (1.25, {}, "1.25"), (1.25, {"lowest": 1.0, "highest": 2.0, "turns": 5}, "1.25 (1 to 2, 5 turns)"),
        (None, {"lowest": 1.0, "highest": 2.0}, "1 to 2"), (None, {}, "unknown"),
    ):  # fmt: skip
        assert field(row("a", "old", ratio, **known), "ratio") == shown


def test_new_rows_replace_old_ones_a_run_without_rows_is_dropped_and_a_small_run_is_not_taken_over() -> None:
    old = {"runs": {"old": {}, "older": {}}, "rows": [row("a", "older", 1.0), row("b", "old", 1.0)]}
    new = {"runs": {"new": {"small": False}}, "rows": [row("a", "new", 2.0)]}
    both = merged(old, new)
    assert both["runs"] == {"old": {}, "new": {"small": False}}
    assert [(each["load"], each["ratio"]) for each in both["rows"]] == [("a", 2.0), ("b", 1.0)]
    with pytest.raises(ValueError, match="now ran with --small"):
        merged(old, {"runs": {"now": {"small": True}}, "rows": [row("a", "now", 2.0)]})


def test_conditions_name_the_run_and_what_other_programs_used() -> None:
    run = {
        "conditions": None, "machine": {"cores": 2, "cpu": "A CPU", "memory_gib": 8.0}, "commit": "abc",
        "date": "2026-01-01 00:00", "versions": {"torch": "2", "trl": None},
    }  # fmt: skip
    content = {"runs": {"new": run}, "rows": [row("a", "new", 2.0, foreign=0.3, turns=5)]}
    assert render({"columns": ["x"], "rows": [["{engine/a/ratio}"]]}, content).endswith(
        "| 2 |\n\nConditions: 2 cores (A CPU), 8 GiB, commit abc, 2026-01-01 00:00 UTC, torch 2. Other programs used up to 30% "
        "of the cores."
    )
    with pytest.raises(KeyError, match="no row of engine for 'b'"):
        render({"columns": ["x"], "rows": [["{engine/b/ratio}"]]}, content)
