"""A run is read once, then only what was added, into curves that stay short and lose no spike; what is damaged is named and the
rest is shown, to Prometheus too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from made_runs import BEGAN, HOSTILE, broken_run, group, made_run, records, write_lines
from prometheus_client.parser import text_string_to_metric_families
from serving import serving

from async_rlhf.inspect.trace import TracedSpan
from async_rlhf.run import reading as run_reading
from async_rlhf.run import run_files
from async_rlhf.run.run_dir import RunDir
from async_rlhf.watch import runs as watched_runs
from async_rlhf.watch.completions import MAX_CHARACTERS, decoder, group_lines, pieces, shown
from async_rlhf.watch.events import events, stacked, timeline
from async_rlhf.watch.prometheus import ALERTS, exposition
from async_rlhf.watch.run import WatchedRun
from async_rlhf.watch.runs import Runs
from async_rlhf.watch.series import MAX_BUCKETS, MAX_METRICS, MetricHistory, ages, numbers

TOKENIZER = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller" / "tokenizer.json"


def read(run: Path) -> WatchedRun:
    made = WatchedRun(RunDir.existing(run))
    made.refresh()
    return made


def steps(reading: WatchedRun) -> list[float]:
    return reading.history.after(["reward"])["curves"]["reward"]["step"]


def test_what_was_added_is_read_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 5)
    reading = read(run)
    write_lines(run / "metrics.jsonl", records(9, begin=6))
    write_lines(run / "rollouts.jsonl", [group(9)])
    parsed: list[str] = []
    whole = run_files.json_value
    monkeypatch.setattr(run_files, "json_value", lambda text: (parsed.append(text), whole(text))[1])
    seen = reading.files.samples.num_lines
    reading.refresh()
    assert len(parsed) == 5
    assert steps(reading) == list(range(1, 10)) and reading.files.samples.num_lines > seen
    assert reading.completions()[0]["step"] == 9 and reading.problems == []


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 3)
    line = json.dumps(group(4))
    for part in (line[:40], line[40:] + "\n"):
        with (run / "rollouts.jsonl").open("a") as file:
            file.write(part)
        if part == line[:40]:
            reading = read(run)
    reading.refresh()
    assert [found["step"] for found in reading.completions()][:2] == [4, 3] and reading.problems == []


def test_the_metrics_of_a_long_run_are_read_at_even_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", 3000)
    monkeypatch.setattr(run_reading, "_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(run_reading, "_PLACES", 50)
    monkeypatch.setattr(run_reading, "_WINDOW", 4 << 10)
    reading = read(run)
    found = steps(reading)
    assert reading.files.steps.is_spread and found[0] <= reading.history.width and reading.history.last_step == 3000
    assert max(b - a for a, b in pairwise(found)) <= 3000 / 50 + reading.history.width
    write_lines(run / "metrics.jsonl", records(3001, begin=3001))
    reading.refresh()
    assert reading.history.last_step == 3001


def test_of_a_damaged_run_what_can_be_read_is_shown_and_of_an_empty_one_nothing(tmp_path: Path) -> None:
    empty = read(made_run(tmp_path / "empty", 0))
    assert empty.history.metrics == [] and empty.timeline()["lanes"] == [] and empty.problems == []
    assert empty.completions() == [] and empty.events([]) == []
    reading = read(broken_run(tmp_path / "run"))
    assert steps(reading) == [step for step in range(1, 31) if step not in (11, 12)]
    assert reading.problems == [
        "metrics.jsonl: damaged lines that are left out: 1",
        "rollouts.jsonl: damaged lines that are left out: 1",
    ]
    assert reading.completions()[0]["prompt"] == HOSTILE
    assert [event["text"] for event in reading.events([])] == [f"a {HOSTILE}"]


def test_changes_evaluations_and_refused_steps_stand_in_one_list(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10)
    write_lines(run / "metrics.jsonl", [{"step": 11, "time": BEGAN + 11, "applied": False, "loss": None}])
    write_lines(run / "events.jsonl", [{"time": BEGAN + 12, "event": "stalled", "run_dir": "x", "text": "no step for 900 s"}])
    about = [
        {"step": 8, "time": BEGAN + 8, "mean_reward": 0.5, "accuracy": 0.25},
        {"step": 7, "time": BEGAN + 7, "mean_reward": 1.5, "accuracy": 1.0, "rewards": {"exact": 0.0, "brief": 1.5}},
        {"step": 9, "time": BEGAN + 9, "missing": "killed"},
    ]
    assert [(event["step"], event["kind"], event["text"]) for event in read(run).events(about)] == [
        (None, "stalled", "no step for 900 s"),
        (11, "no update", "loss or gradient not finite, or nothing to learn from"),
        (9, "evaluation", "killed"),
        (8, "evaluation", "accuracy 0.25, reward 0.5"),
        (7, "evaluation", "reward 1.5, rewards/exact 0, rewards/brief 1.5"),
        (5, "change applied", "learner.learning_rate 0.0002 → 0.0001"),
        (None, "change asked", "learner.learning_rate 0.0002 → 0.0001"),
    ]


def test_a_run_that_goes_back_says_so_and_is_changed_no_more_where_it_was_behind_that_step(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 10)
    asked = {"kind": "asked", "number": 2, "values": {"guard.max_kl": [None, 1.0]}, "time": BEGAN + 7}
    write_lines(run / "changes.jsonl", [asked, {"kind": "applied", "number": 2, "step": 8, "time": BEGAN + 8}])
    assert read(run).changed() == [5, 8]
    write_lines(run / "changes.jsonl", [{"kind": "undone", "step": 6, "time": BEGAN + 9}])
    assert read(run).changed() == [5]
    (newest, *_) = read(run).events(())
    assert (newest["kind"], newest["step"]) == ("went back", 6) and "goes on from this step" in newest["text"]


def test_what_is_no_line_of_a_file_of_events_spoils_no_other() -> None:
    wild = [{"kind": ["x"], "step": "1", "time": None, "values": {"a": [1]}}, {"values": 5}, {}]
    found = events(wild, wild, wild, wild, wild)
    assert len(found) == 15 and all(event["step"] is None and isinstance(event["text"], str) for event in found)


def test_the_text_of_a_completion_is_divided_where_the_version_changed_or_stays_whole() -> None:
    decode = decoder(TOKENIZER, 0.0)
    assert pieces("leets", [24, 17, 17, 32, 31, 1], [[7, 3], [8, 3]], decode) == [(7, "lee"), (8, "ts")]
    assert pieces("other", [24, 17, 17], [[7, 1], [8, 2]], decode) == [(8, "other")]
    assert pieces("leets", [24, 17, 10**9], [[7, 1], [8, 2]], decode) == [(8, "leets")]
    assert pieces("leets", [24, 17, 17], [[7, 1], [8, 2]], None) == [(8, "leets")]
    assert decoder(TOKENIZER.with_name("config.json"), 0.0) is None


def test_where_a_row_begins_anew_the_pieces_have_all_that_was_read_there_and_its_text_a_part() -> None:
    decode, tokens, spans = decoder(TOKENIZER, 0.0), [24, 17, 17, 32, 31, 24], [[7, 2], [None, 3], [7, 1]]
    whole = [(7, "le"), (None, "ets"), (7, "l")]
    assert pieces("le\nts\nl", tokens, spans, decode, [1]) == whole
    assert pieces("other", tokens, spans, decode, [1]) == [(7, "other")]
    sample = {"step": 1, "group": 0, "attempt": 0, "actor": "a", "prompt": "p"}
    rollout = {"text": "le\nts\nl", "tokens": tokens, "spans": spans, "restarts": [1], "scores": {}, "finish_reason": "stop"}
    assert group_lines({**sample, "rollouts": [rollout]}, decode).splitlines()[3:] == [
        "    row 1", "      writes  'le'", "    row 2", "      reads   'ets'", "      writes  'l'",
    ]  # fmt: skip
    assert group_lines({**sample, "rollouts": [rollout]}).splitlines()[2].endswith(" v7x2 anew 3 v7x1 stop    'le\\nts\\nl'")
    scored = {"scores": {"reference": {"value": None, "failure": None}}, "turn_scores": [0.5, None]}
    assert group_lines({**sample, "rollouts": [rollout | scored]}).splitlines()[2].startswith("  turns 0.5 - ")
    long = {**rollout, "tokens": [24] * 30_000, "spans": [[7, 1], [None, 29_998], [7, 1]]}
    page = shown({**sample, "rollouts": [rollout, long, {**long, "text": "other"}]}, decode)
    assert page is not None
    one, two, three = page["rollouts"]
    assert (one["pieces"], one["anew"]) == (whole, [1]) and (three["pieces"], three["anew"]) == ([(7, "other")], [])
    assert [len(text) for _, text in two["pieces"]] == [1, MAX_CHARACTERS - 1, 0]


def test_the_time_line_has_what_each_process_did(tmp_path: Path) -> None:
    found = read(made_run(tmp_path / "run", 40)).timeline()
    kinds = {lane["name"]: {span.kind for span in lane["spans"]} for lane in found["lanes"]}
    assert kinds == {"learner": {"wait", "train"}, "actor-0": {"adopt", "idle"}, "actor-0 groups": {"generate", "score"}}
    assert found["ended"] == BEGAN + 40
    assert all(span.ended > found["began"] for lane in found["lanes"] for span in lane["spans"])


def test_groups_at_the_same_time_stand_below_one_another() -> None:
    groups = [[TracedSpan("generate", str(i), began, began + 2.0)] for i, began in enumerate((0.0, 1.0, 2.0, 2.5))]
    assert [[span.label for span in row] for row in stacked(groups)] == [["0", "2"], ["1"], ["3"]]
    assert len(stacked(groups, rows=1)) == 1
    assert timeline([], {}, [])["lanes"] == []


def history(values: Iterable[float], max_buckets: int = 8) -> MetricHistory:
    made = MetricHistory(max_buckets)
    for step, value in enumerate(values, 1):
        made.add(step, {"reward": value})
    return made


def curve(made: MetricHistory) -> dict[str, list[float]]:
    return made.after(["reward"])["curves"]["reward"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_however_long_it_is_a_curve_is_short_and_keeps_its_smallest_and_largest(values: list[float]) -> None:
    made = history(values)
    found = curve(made)
    assert len(found["step"]) <= 8
    assert min(found["min"]) == min(values) and max(found["max"]) == max(values)
    assert all(low <= mean + 1e-6 and mean <= high + 1e-6
               for low, mean, high in zip(found["min"], found["mean"], found["max"], strict=True))  # fmt: skip
    counted = [sum(1 for step in range(1, len(values) + 1) if step // made.width == at // made.width) for at in found["step"]]
    whole = sum(mean * count for mean, count in zip(found["mean"], counted, strict=True))
    assert whole == pytest.approx(sum(values), abs=1e-3)


def test_a_million_steps_have_as_many_points_as_a_picture_has_columns() -> None:
    made = MetricHistory()
    for step in range(0, 1_000_000, 70):
        made.add(step, {"reward": float(step)})
    assert MAX_BUCKETS // 2 <= len(curve(made)["step"]) <= MAX_BUCKETS
    assert curve(made)["max"][-1] == 999_999 // 70 * 70


@given(st.lists(st.integers(1, 12), max_size=60), st.data())
def test_a_reader_who_is_told_only_what_changed_knows_all(back: list[int], data: st.DataObject) -> None:
    """Whatever is restored and made again meanwhile. The reader joins parts as the page does."""
    made, step, known = MetricHistory(8), 0, dict[str, Any](layout="", last=0, curve={"step": [], "mean": []})
    for by in back:
        step = max(1, step + 1 if by < 11 else step - by)
        made.add(step, {"reward": float(data.draw(st.integers(0, 9)))})
        if by % 3 == 0:
            told = made.after(["reward"], known["last"], known["layout"])
            kept = [i for i, at in enumerate(known["curve"]["step"]) if at < told["from"] and told["layout"] == known["layout"]]
            joined = {k: [known["curve"][k][i] for i in kept] + told["curves"]["reward"][k] for k in ("step", "mean")}
            known = {"layout": told["layout"], "last": told["last"], "curve": joined}
            assert joined == {k: curve(made)[k] for k in ("step", "mean")}


def test_a_learner_that_goes_on_from_a_checkpoint_takes_its_later_steps_back() -> None:
    made = MetricHistory()
    for step in (1, 2, 3, 2):
        made.add(step, {"reward": float(step)}, {0: 10})
    assert curve(made) == {"step": [1, 2], "mean": [1, 2], "min": [1, 2], "max": [1, 2]}
    assert made.after([])["ages"] == {"step": [1, 2], "tokens": [{0: 10}, {0: 10}]}


def test_tokens_by_age_are_summed_in_a_bucket_and_the_oldest_are_one() -> None:
    made = MetricHistory(2)
    for step in range(4):
        made.add(step, {}, {0: 3, 10**6: 1})
    assert made.after([])["ages"] == {"step": [0, 2], "tokens": [{0: 6, 32: 2}, {0: 6, 32: 2}]}


def test_only_finite_numbers_are_drawn_and_names_that_a_damaged_file_invents_cost_no_memory() -> None:
    made = MetricHistory()
    for step in range(10):
        made.add(step, {f"{step}/{i}": 0.0 for i in range(100)})
    assert len(made.metrics) == MAX_METRICS
    record = {"a": 1, "b": True, "c": None, "d": float("nan"), "e": float("inf"), "f": "1", "g": 10**400, "h": [1], "i": -2.5}
    assert numbers(record) == {"a": 1.0, "i": -2.5}
    assert ages({"staleness/histogram": {"0": 5, "x": 1, "2": None, "3": 2}}) == {0: 5, 3: 2}
    assert ages({"staleness/histogram": [1, 2]}) == {}


def test_of_many_runs_those_whose_page_was_opened_last_are_read_on_and_the_others_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_runs, "_MAX_OPEN", 2)
    for name in "abc":
        made_run(tmp_path / name, 3)
    runs = Runs(tmp_path)
    assert [runs.curves(name, [])["last"] for name in "abca"] == [3, 3, 3, 3]
    for name in "abc":
        write_lines(tmp_path / name / "metrics.jsonl", records(4, begin=4))
    runs.refresh()
    assert {name: run.history.last_step for name, run in runs._runs.items()} == {"a": 4, "b": -1, "c": 4}
    assert runs.curves("b", [])["last"] == 4 and runs.state("b")["problems"] == []


def samples(runs: Runs) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(exposition(runs).decode())
    return {(s.name, *(value for _, value in sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_scrape_has_the_newest_step_the_ledger_and_the_actors(tmp_path: Path) -> None:
    found = samples(Runs(made_run(tmp_path / "run", 40)))
    assert found["async_rlhf_steps_total", "run"] == 40
    assert found["async_rlhf_trained_tokens_total", "run"] == 32_000
    assert found["async_rlhf_last_step_timestamp_seconds", "run"] == BEGAN + 40
    assert found["async_rlhf_ledger_groups", "trained", "run"] == 640
    assert found["async_rlhf_actor_version", "actor-1", "run"] == 38
    assert found["async_rlhf_ledger_closes", "run"] == 1 and found["async_rlhf_up", "run"] == 0
    assert found["async_rlhf_staleness_bound_steps", "run"] == 1
    restarts = {role: found["async_rlhf_restarts_total", role, "run"] for role in ("actor", "hub", "learner", "scorer")}
    assert restarts == {"actor": 3, "hub": 0, "learner": 0, "scorer": 1}
    assert found["async_rlhf_step", "staleness/violations", "run"] == 0
    assert ("async_rlhf_step", "mismatch/abs_log_ratio", "run") not in found  # null in the newest step
    assert (found["async_rlhf_spool_rows_total", "run"], found["async_rlhf_spool_rejected_lines_total", "run"]) == (160, 2)
    waits = ("spool_problem", "waits_for_prompts", "waits_for_room")
    assert [found[f"async_rlhf_{name}", "run"] for name in waits] == [0, 0, 0]


def test_a_run_says_what_it_waits_for_and_one_without_a_spool_nothing_of_it(tmp_path: Path) -> None:
    made_run(tmp_path / "filed", 3)
    for name in ("starved", "filed"):
        run = tmp_path / name if name == "filed" else made_run(tmp_path / name, 3)
        status = json.loads((run / "ledger.json").read_text())
        problem = {**status["spool"], "problem": "the spool /prompts cannot be used: Read-only file system"}
        status |= {"waits_for_prompts": True, "spool": problem} if name == "starved" else {"spool": None}
        (run / "ledger.json").write_text(json.dumps(status))
    found = samples(Runs(tmp_path))
    assert (found["async_rlhf_waits_for_prompts", "starved"], found["async_rlhf_spool_problem", "starved"]) == (1, 1)
    assert found["async_rlhf_waits_for_prompts", "filed"] == 0
    assert not [key for key in found if "spool" in key[0] and key[-1] == "filed"]


def test_of_several_rewards_none_of_which_is_named_there_is_no_held_out_accuracy(tmp_path: Path) -> None:
    line = {"label": "step", "step": 3, "mean_reward": 1.5, "accuracy": 1.0, "rewards": {"exact": 0.0, "brief": 1.5}}
    for name, more in {"unnamed": {}, "named": {"solved_by": "brief"}}.items():
        (made_run(tmp_path / name, 3) / "evaluations.jsonl").write_text(json.dumps({**line, **more}) + "\n")
    runs = Runs(tmp_path)
    found = samples(runs)
    assert (
        found["async_rlhf_evaluation", "mean_reward", "unnamed"]
        == found["async_rlhf_evaluation", "mean_reward", "named"]
        == 1.5
    )
    assert ("async_rlhf_evaluation", "accuracy", "unnamed") not in found
    assert found["async_rlhf_evaluation", "accuracy", "named"] == 1.0
    [shown] = runs.state("unnamed")["summary"]["evaluations"]
    assert shown["accuracy"] is None and shown["rewards"] == {"exact": 0.0, "brief": 1.5}, "what the page draws"


def test_every_metric_of_an_alert_rule_is_in_the_endpoint_s_output(tmp_path: Path) -> None:
    with serving(Runs(made_run(tmp_path / "run", 40))) as site:
        scraped, rules = site.get("/metrics"), site.get("/alerts.yml").text
    assert scraped.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {line.split("{")[0] for line in scraped.text.splitlines() if not line.startswith("#")}
    assert rules == ALERTS.read_text()
    (group,) = yaml.safe_load(rules)["groups"]
    for rule in group["rules"]:
        used = re.findall(r"async_rlhf_\w+", rule["expr"])
        chosen = [name for each in re.findall(r'metric=~?"(.*?)"', rule["expr"]) for name in each.split("|")]
        assert all(f'metric="{name}"' in scraped.text for name in chosen), chosen
        assert used and set(used) <= names, f"{rule['alert']} uses {used}"
        assert rule["labels"]["severity"] in {"critical", "warning", "info"} and rule["annotations"]["summary"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) > 10


def test_broken_runs_and_one_without_a_step_are_scraped_with_what_they_have(tmp_path: Path) -> None:
    broken_run(tmp_path / "broken")
    made_run(tmp_path / "empty", 0)
    run = made_run(tmp_path / "run", 3)
    status = json.loads((run / "ledger.json").read_text())
    status["actors"] = {'evil"} 1\nasync_rlhf_up{run="x': {"version": 1, "groups": 1, "silent_s": 0.0}}
    (run / "ledger.json").write_text(json.dumps(status))
    write_lines(run / "metrics.jsonl", [{"step": 4, "reward": "much", "step_time": 1e999}])
    found = samples(Runs(tmp_path))
    assert found["async_rlhf_problems", "broken"] > 0 and found["async_rlhf_problems", "empty"] == 0
    assert ("async_rlhf_step", "reward", "empty") not in found and found["async_rlhf_steps_total", "empty"] == 0
    assert found["async_rlhf_actor_version", 'evil"} 1\nasync_rlhf_up{run="x', "run"] == 1
    assert {key[1:] for key in found if key[0] == "async_rlhf_up"} == {("broken",), ("empty",), ("run",)}
    assert ("async_rlhf_step", "reward", "run") not in found and found["async_rlhf_runs",] == 3
