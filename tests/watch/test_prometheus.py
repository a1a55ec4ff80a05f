"""What Prometheus scrapes: names that the shipped rules rest on, values of the run, and nothing that breaks the format."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from made_runs import BEGAN, broken_run, made_run, write_lines
from prometheus_client.parser import text_string_to_metric_families
from serving import serving

from async_rlhf.watch.prometheus import ALERTS, exposition
from async_rlhf.watch.runs import Runs


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
        status |= {"lacks_prompts": True, "spool": problem} if name == "starved" else {"spool": None}
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
