"""With `queue.exact` and `queue.max_staleness = 0` bits are promised where they can be; elsewhere the run goes on and says
so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from async_rlhf import api
from async_rlhf.push.card import card
from async_rlhf.run.manifest import RecordedBits, continued, manifest
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.supervision.promise import BitsPromise, judged
from tests.conftest import invoke

OTHER = "computes other bits than the actors before it"


@pytest.mark.parametrize(
    ("known", "actors", "expected"),
    [
        (RecordedBits(), [], RecordedBits()),
        (RecordedBits(), [("b", "1", ""), ("a", "1", "")], RecordedBits("1")),
        (RecordedBits("1"), [("a", "1", "")], RecordedBits("1")),
        (RecordedBits("1"), [("a", "2", "")], f"a {OTHER}"),
        (RecordedBits(), [("b", "1", ""), ("a", "2", "")], f"a {OTHER}"),
        (RecordedBits("1"), [("b", "", "its model"), ("a", "1", "")], "b: its model"),
    ],
)
def test_a_promise_holds_while_all_actors_have_the_bits_of_the_first(known: RecordedBits, actors: Any, expected: Any) -> None:
    found = judged(known, actors)
    assert found == expected if isinstance(expected, RecordedBits) else found.obstacle.startswith(expected) and not found.digest


def test_an_actor_with_other_bits_is_said_once_and_written_down(small: Any) -> None:
    run, said, now = RunDir.create(small(**{"queue.max_staleness": 0})), list[str](), [0.0]
    promise = BitsPromise(run, said.append, lambda: now[0])
    for actors, bits in (
        ([], RecordedBits()),
        ([("a", "1", "")], RecordedBits("1")),
        ([("b", "2", "")], RecordedBits(obstacle=f"b {OTHER} (another processor, or other libraries)")),
        ([("a", "1", "")], RecordedBits(obstacle=f"b {OTHER} (another processor, or other libraries)")),
    ):
        run.ledger.write_text(json.dumps({"bits": actors}))
        now[0] += 1
        promise.look()
        assert run.bits() == bits
    assert len(said) == 1 and f"bits are not promised: b {OTHER}" in said[0]
    assert len(said) == 1 and BitsPromise(run, said.append, lambda: 0.0) and len(said) == 2, "of a run that goes on, again"
    run.retire()


def test_a_run_that_goes_on_with_another_processor_promises_nothing(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(**{"queue.exact": True})
    made = manifest(config)
    assert made["bits"] == RecordedBits()._asdict() and "bits" not in manifest(small())
    assert continued({**made, "bits": RecordedBits("1")._asdict()}, config)["bits"] == RecordedBits("1")._asdict()
    monkeypatch.setattr("async_rlhf.run.manifest.processor", lambda: "Another")
    elsewhere = continued(made, config)
    assert elsewhere["bits"]["obstacle"] == f"the run went on with Another, after {made['processor']}"
    monkeypatch.undo()
    assert continued(elsewhere, config)["bits"] == elsewhere["bits"], "once withdrawn it stays so"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"queue.max_staleness": 0, "engine.batch_invariant": False}, "engine.batch_invariant = false"),
        ({"queue.exact": True, "engine.threads": 2}, "engine.threads = 2; only 1 can"),
    ],
)
def test_where_a_setting_stands_in_the_way_the_run_goes_on_and_everything_names_it(
    settings: dict[str, Any], reason: str, small: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(max_steps=2, **settings)
    result = api.train(config)
    assert f"bits are not promised: {reason}" in capsys.readouterr().out
    run = RunDir(config.run_dir)
    assert run.bits() == RecordedBits(obstacle=reason)
    assert f"bits of completions: not promised: {reason}" in invoke("status", run.path)[1]
    assert json.loads(invoke("status", run.path, "--json")[1])["bits"]["obstacle"] == reason
    assert f"| bits of completions | not promised: {reason} |" in card(
        Reading(run), result.checkpoint.parent, "a/b", is_adapter=False, has_picture=False
    )


def test_where_they_are_promised_everything_says_so(small: Any, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(**{"queue.max_staleness": 0, "max_steps": 2})
    api.train(config)
    assert "not promised" not in capsys.readouterr().out
    bits = RunDir(config.run_dir).bits()
    assert bits is not None and bits.digest and not bits.obstacle
    assert "bits of completions: promised\n" in invoke("status", config.run_dir)[1]
