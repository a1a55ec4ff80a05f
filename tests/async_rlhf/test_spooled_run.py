"""Prompts that come while a run goes on, and runs without an end: what is refused, what set aside, what used how often."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.images.store import ImageStore
from async_rlhf.buffers.spool.claims import RejectedLine
from async_rlhf.buffers.spool.deposit import end, put
from async_rlhf.buffers.spool.stream import PromptStream
from async_rlhf.inspect.rollouts import records, replay
from async_rlhf.inspect.status import lines, read
from async_rlhf.learner.loop.budget import Budget, Spent
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.checks.spool import RowCheck, check_spool
from async_rlhf.run.display.console import StepPace
from async_rlhf.run.loading import load
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_dir import RunDir, RunEnd
from tests.conftest import QUICK, Train, has_ended, output_of, trained_groups, wait_for


def fed(spool: Path, **more: Any) -> dict[str, Any]:
    """Settings of a run whose prompts come into this spool, with a reward that wants a column `answer`."""
    data = {"data.source": f"spool:{spool}", "data.options": {}, "data.held_out": "none", "data.template": "Spell: {prompt}"}
    return {**data, "rewards.functions": ["exact"], "max_steps": "none", **more}


def prompts(first: int, count: int) -> list[bytes]:
    return [json.dumps({"prompt": f"word {n}", "answer": n, "n": n}).encode() for n in range(first, first + count)]


def test_a_run_is_fed_while_hub_and_learner_are_killed_and_uses_each_row_as_promised(training: Train, tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    settings = fed(spool, **{"data.epochs": 2, "queue.keep_rollouts": True, "queue.max_staleness": 2})
    started = training(**settings)
    run = started.run

    def trained() -> int:
        return len(trained_groups(run.path))

    wait_for(lambda: run.read_ledger().get("waits_for_prompts") is True, "a learner without prompts")
    put(spool, prompts(0, 7))
    bad = spool / "bad.jsonl"  # a name that comes after those of `put`: what is put next would be read before it
    bad.write_bytes(b'{"prompt": "no answer"}\nno JSON\n' + prompts(7, 1)[0])
    wait_for(lambda: not bad.exists(), "a claim of the bad lines")
    wait_for(lambda: trained() >= 8, "the third step")  # 16 groups are four batches
    hub = started.child("hub")
    hub.send_signal(signal.SIGKILL)
    put(spool, prompts(8, 12))
    wait_for(lambda: has_ended(hub) and trained() >= 20, "a step after the hub's end")
    learner = started.child("learner")
    learner.kill()
    put(spool, prompts(20, 9))
    wait_for(lambda: has_ended(learner), "the learner's end")
    end(spool)
    started.ends_with(0, "all data used")

    of_group = {record["group"]: record["columns"] for record in records(Reading(run))}
    assert {group: columns["n"] for group, columns in of_group.items()} == {group: group // 2 for group in range(58)}
    metrics = run.read_metrics()
    assert sorted(trained_groups(run.path)) == list(range(58))
    assert [len(record["groups"]) for record in metrics] == [4] * 14 + [2]
    shown = lines(run, read(Reading(run)))
    assert shown[0] == f"{run.path}: finished, step 15"
    assert any("29 rows have come, 2 lines were set aside" in line and line.endswith("no more will") for line in shown), shown
    set_aside = [
        json.loads(line) for path in (run.path / "data/spool/rejected").iterdir() for line in path.read_text().splitlines()
    ]
    assert [(record["line"], record["row"]) for record in set_aside] == [(1, '{"prompt": "no answer"}'), (2, "no JSON")]
    assert "needs the column 'answer'" in set_aside[0]["reason"] or "answer" in set_aside[0]["reason"]

    again = replay(run, run.config().model_copy(update={"name": "again"}))
    assert [record["groups"] for record in again.read_metrics()] == [record["groups"] for record in metrics]


LINES: list[tuple[bytes, str]] = [
    (b"{", "not JSON"),
    (b"[1]", "is a list, not an object"),
    (b"\xff\xfe", "not JSON"),
    (b'{"question": "a", "answer": 1}', "no column 'prompt'"),
    (b'{"prompt": 3, "answer": 1}', "a prompt is text or a list of messages"),
    (b'{"prompt": "a"}', "answer"),
    (b'{"prompt": "a", "answer": NaN}', "NaN is no number"),
    (b'{"prompt": "a", "answer": %d}' % (1 << 70), "numbers that can be sent"),
    (b'{"prompt": "a", "answer": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
    (b'{"prompt": "\\ud800", "answer": 1}', "sent"),
    (b'{"prompt": "a", "answer": "\\ud800"}', "sent"),
    (b'{"prompt": "%b", "answer": 1}' % (b"x" * 2000), "tokens, the limit is"),
]


def test_a_line_that_is_of_no_use_to_the_run_is_set_aside_with_the_reason(small: Any, tmp_path: Path) -> None:
    check = RowCheck(small(**fed(tmp_path)), ImageStore(tmp_path / "images"))
    good = b'{"prompt": "a", "answer": "\xc3\xa4"}'
    found = check([good, *(line for line, _ in LINES), good])
    assert found[0] == found[-1] == '{"prompt": "a", "answer": "ä"}'
    for (line, says), each in zip(LINES, found[1:-1], strict=True):
        assert isinstance(each, RejectedLine) and says in each.reason, (line[:60], each)


ENVIRONMENT = """
from async_rlhf import Score, environment

@environment
def says(prompt):
    yield prompt
    yield Score(1.0)
"""


def test_a_line_of_a_source_that_nothing_judges_or_teaches_is_set_aside(small: Any, tmp_path: Path) -> None:
    (tmp_path / "says.py").write_text(ENVIRONMENT)
    line = b'{"prompt": "a", "answer": "a", "source": "%b"}'
    teachers = {"loss.kind": "reverse_kl", "scoring.reference.by_source": {"words": "tiny-speller"}}
    played = {"environment.by_source": {"words": f"{tmp_path / 'says.py'}:says"}, "rewards.functions": []}
    for settings, says in ((teachers, "no teacher for rows of the source 'other'"), (played, "no reward judges them")):
        config = small(**fed(tmp_path, **settings))
        preflight(config)
        good, bad = RowCheck(config, ImageStore(tmp_path / "images"))([line % b"words", line % b"other"])
        assert isinstance(good, str) and isinstance(bad, RejectedLine) and says in bad.reason


def test_what_a_spool_cannot_give_is_refused_before_the_run(small: Any, tmp_path: Path) -> None:
    for settings, says in (
        ({"data.held_out": 5}, "name prompts to evaluate on: evaluation.source"),
        ({"data.options": {"min_word_len": 3}}, r"data.options is not for 'spool:"),
        ({"evaluation.every": 2}, "of which none are held out; set evaluation.source"),
        ({"evaluation.source": f"spool:{tmp_path}"}, "an evaluation has the same prompts every time"),
        ({"data.source": f"spool:{QUICK}"}, "is no directory that this user may read and write"),
    ):
        with pytest.raises(ConfigError, match=says):
            preflight(small(**fed(tmp_path, **settings)))
    mixed = {"data.source": "", "data.sources": [{"source": f"spool:{tmp_path}"}]}
    with pytest.raises(ConfigError, match=r"data\.source = it alone"):
        preflight(small(**fed(tmp_path, **mixed)))


def test_a_run_that_failed_before_its_first_step_keeps_the_rows_that_it_has_claimed(small: Any, tmp_path: Path) -> None:
    config = small(**fed(tmp_path))
    run = RunDir.create(config)
    run.record_end(RunEnd(code=4, reason="stalled", finished=False))
    with closing(PromptStream(run.path / "data" / "spool")) as stream:
        stream.append([((1, 1), '{"prompt": "a"}')])
    run.retire()
    with pytest.raises(ConfigError, match="Continue it with --resume, remove it with --overwrite"):
        RunDir.create(config)
    RunDir.create(config, overwrite=True).retire()
    assert not (run.path / "data").exists()


def test_what_waits_in_a_spool_is_its_files_and_an_ended_one_says_so(tmp_path: Path, small: Any) -> None:
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    config = small(**{"data.source": f"spool:{tmp_path}"})
    [remark] = check_spool(config)
    assert remark.endswith("files that wait there: 1")
    end(tmp_path)
    [remark] = check_spool(config)
    assert "files that wait there: 1; it has ended" in remark


def test_rows_are_put_and_the_spool_is_ended_by_the_command(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(prompts(0, 3)))
    spool = tmp_path / "spool"
    spool.mkdir()
    assert output_of(0, "spool", "put", spool, tmp_path / "rows.jsonl").startswith("3 rows, ")
    assert output_of(0, "spool", "put", spool, "-", input='{"prompt": "a"}\n') == "1 rows, 16 bytes\n"
    output_of(0, "spool", "end", spool)
    output_of(3, "spool", "put", spool, "-", input="{}\n")
    assert len(os.listdir(spool)) == 3


def test_a_run_without_an_end_goes_on_until_a_budget_ends_it(small: Any) -> None:
    endless = Budget()
    assert endless.ended(Spent(10**9, 10**12, 1e9)) == "" and endless.num_steps(Spent(5, 5, 5.0)) is None
    assert endless.exceeds(Budget(5)) and not Budget(5).exceeds(endless)
    assert Budget(max_trained_tokens=100).num_steps(Spent(5, 50, 1.0)) == 10
    assert Budget(max_trained_tokens=100).ended(Spent(5, 100, 1.0)) == "max_trained_tokens = 100 reached"
    assert StepPace().left_s(3, None, 1.0) is None
    config = small(max_steps="none")
    assert config.is_endless(config.bound(64)) and not config.is_endless(small().bound(64))
    once = small(**{"max_steps": "none", "data.epochs": 1})
    assert once.bound(64).num_groups == 64 and not once.is_endless(once.bound(64))
    with pytest.raises(ConfigError, match=r"'cosine' falls until max_steps: set that, or learner.schedule = 'constant'"):
        small(**{"max_steps": "none", "learner.schedule": "cosine"})
    assert load(config).max_steps is None
