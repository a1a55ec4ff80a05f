"""The tables of the documents are what the committed results give."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from async_rlhf.experiments.throughput.__main__ import PARTS
from async_rlhf.experiments.throughput.harness import Row
from async_rlhf.experiments.throughput.results import COMMITTED, merged
from async_rlhf.experiments.throughput.tables import Results, documents, ratio_text

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
    assert ratio_text(row("a", "old", 1.25)) == "1.25"
    assert ratio_text(row("a", "old", 1.25, lowest=1.0, highest=2.0, turns=5)) == "1.25 (1 to 2, 5 turns)"
    assert ratio_text(row("a", "old", None, lowest=1.0, highest=2.0)) == "1 to 2"
    assert ratio_text(row("a", "old", None)) == "unknown"


def test_a_cell_without_its_row_is_refused_with_the_row() -> None:
    with pytest.raises(KeyError, match="no row of engine for 'a'"):
        Results({"runs": {}, "rows": []}).cell("{engine/a/ratio}")


def test_new_rows_replace_old_ones_and_a_run_without_rows_is_dropped() -> None:
    old = {"runs": {"old": {}, "older": {}}, "rows": [row("a", "older", 1.0), row("b", "old", 1.0)]}
    new = {"runs": {"new": {"small": False}}, "rows": [row("a", "new", 2.0)]}
    both = merged(old, new)
    assert both["runs"] == {"old": {}, "new": {"small": False}}
    assert [(each["load"], each["ratio"]) for each in both["rows"]] == [("a", 2.0), ("b", 1.0)]


def test_a_small_run_is_not_taken_over() -> None:
    new = {"runs": {"now": {"small": True}}, "rows": [row("a", "now", 2.0)]}
    with pytest.raises(ValueError, match="now ran with --small"):
        merged({"runs": {}, "rows": []}, new)


def test_conditions_name_the_run_and_what_other_programs_used() -> None:
    machine = {"cores": 2, "cpu": "A CPU", "memory_gib": 8.0}
    run = {
        "conditions": None,
        "machine": machine,
        "commit": "abc",
        "date": "2026-01-01 00:00",
        "versions": {"torch": "2", "trl": None},
    }
    results = Results({"runs": {"new": run}, "rows": [row("a", "new", 2.0, foreign=0.3, turns=5)]})
    found = results.conditions(results.rows_of(["{engine/a/ratio}"]))
    assert (
        found
        == "2 cores (A CPU), 8 GiB, commit abc, 2026-01-01 00:00 UTC, torch 2. Other programs used up to 30% of the cores."
    )
