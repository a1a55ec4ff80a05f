"""Two ranks, by plain torch and by ZeRO-1, 2 and 3, are one: real processes, real gloo, the same made-up batches.

The processes are started once for all tests that only look at what came out.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import make_model
from rank_role import ADVANTAGES, GROUPS, control, make
from safetensors.torch import load_file

from async_rlhf.launch.network import LOOPBACK
from async_rlhf.learner.batch.micro_batch import Packing
from async_rlhf.learner.batch.partition import count, partition, partition_rows
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.parallel.ranks import RankLostError, Ranks
from async_rlhf.learner.step.controller import Controller
from tests.conftest import REPOSITORY, kept_port, wait_for

ZERO = {f"zero-{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)}
TENSOR = {"tensor_parallel": 2, "ranks": 2}
# With and without norms over split heads and tied embeddings; at ZeRO-1, 2 and 3.
SPLIT = ("llama", "qwen3", "llama-tied")
CLIPPED = {"max_grad_norm": 1.0}
# With a reference: held by every rank, and shared out.
REFERENCE = {"updates": {}, "updates-zero-3": ZERO["zero-3"], "updates-tensor": ZERO["zero-3"] | TENSOR}
RATES = {"1": 1e-2}  # from the second step on
LORA = {"lora": {"rank": 2, "alpha": 4.0}}
# Sums in another order: far below what one step of AdamW moves a weight by (1e-3).
WEIGHTS, MOMENTS = 1e-6, 1e-6
# Where a product is summed in two halves and the gradient is next to nothing, AdamW divides rounding by rounding.
ODD = 1e-4


@contextmanager
def processes(directory: Path, plan: Sequence[dict[str, Any]], size: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All ranks of a plan; whatever is left of them is ended with the block."""
    (directory / "plan.json").write_text(json.dumps(plan))
    path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    # DS_ACCELERATOR as of a machine with a GPU: what ranks compute on is the configuration's to say
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "DS_ACCELERATOR": "cuda"}
    environment = {**os.environ, **own}
    started = []
    with kept_port() as port:
        role = str(Path(__file__).parent / "rank_role.py")
        for rank in range(size):
            command = [sys.executable, role, str(rank), str(size), f"{LOOPBACK}:{port}", str(directory)]
            with (directory / f"{rank}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT)
                )
        try:
            yield started
        finally:
            for process in started:
                process.kill()
                process.communicate(timeout=300)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one torch rank makes of the same batches, in this process: 2 steps, 3 steps, and 2 of two updates."""
    directory = tmp_path_factory.mktemp("alone")
    make_model("llama").save_pretrained(directory / "model")
    for name in SPLIT:
        make_model(name).save_pretrained(directory / f"{name}-model")
    job = {"model": str(directory / "model")}
    for name, own in {
        "two": {"steps": 2},
        "three": {"steps": 3},
        "rates": {"steps": 3, "rates": RATES},
        "updates": {"steps": 2, "updates": 2, "reference": True},
        "lora": {"steps": 2, "settings": LORA},
        "lora-three": {"steps": 3, "settings": LORA},
        **{name: {"steps": 2, "settings": CLIPPED, "model": str(directory / f"{name}-model")} for name in SPLIT},
    }.items():
        control(Controller(make(job | own, None)), job | own, directory / name)
    return directory


@pytest.fixture(scope="module")
def together(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks make of them."""
    directory = tmp_path_factory.mktemp("together")
    model = str(alone / "model")
    plan = [
        {"name": "torch", "model": model, "steps": 2, "rehearse": True},
        {"name": "rates", "model": model, "steps": 3, "rates": RATES},
        *(
            {"name": name, "model": model, "steps": 2, "updates": 2, "reference": True, "settings": settings}
            for name, settings in REFERENCE.items()
        ),
        {
            "name": "reference-bfloat16",
            "model": model,
            "steps": 1,
            "reference": True,
            "settings": ZERO["zero-3"] | {"reference_dtype": "bfloat16"},
        },
        *({"name": name, "model": model, "steps": 2, "settings": own, "rehearse": True} for name, own in ZERO.items()),
        *(
            {"name": f"{name}-{i}", "model": model, "steps": 3, "first": 2, "settings": ZERO[name], "load": str(source)}
            for i, (name, source) in enumerate(
                [("zero-3", directory / "zero-1"), ("zero-2", alone / "two"), ("zero-1", directory / "zero-3")]
            )
        ),
        {"name": "torch-3", "model": model, "steps": 3, "first": 2, "load": str(directory / "zero-3")},
        {"name": "torch-from-one", "model": model, "steps": 3, "first": 2, "load": str(alone / "two")},
        *(
            {"name": f"{name}-poisoned", "model": model, "steps": 3, "poison": 1, "settings": settings}
            for name, settings in ZERO.items()
        ),
        *({"name": f"lora-{name}", "model": model, "steps": 2, "settings": ZERO[name] | LORA} for name in ZERO),
        *(
            {
                "name": f"sequence-{name}",
                "model": model,
                "steps": 2,
                "settings": ZERO[name] | {"sequence_parallel": 2, "ranks": 2},
            }
            for name in ("zero-2", "zero-3")
        ),
        {
            "name": "lora-on",
            "model": model,
            "steps": 3,
            "first": 2,
            "settings": ZERO["zero-3"] | {"lora": LORA["lora"] | {"publish": "adapter"}},
            "load": str(alone / "lora"),
        },
        *(
            {"name": f"tensor-{name}", "model": str(alone / f"{name}-model"), "steps": 2, "settings": zero | TENSOR | CLIPPED}
            for name, zero in zip(SPLIT, ZERO.values(), strict=True)
        ),
        {"name": "tensor-poisoned", "model": model, "steps": 3, "poison": 1, "settings": ZERO["zero-1"] | TENSOR},
        *(
            {"name": name, "model": model, "steps": 3, "first": 2, "settings": settings, "load": str(source)}
            for name, settings, source in [
                ("tensor-from-zero", ZERO["zero-1"] | TENSOR, directory / "zero-3"),
                ("zero-from-tensor", ZERO["zero-2"], directory / "tensor-poisoned"),
            ]
        ),
    ]
    with processes(directory, plan) as started:
        wait_for(lambda: all(p.poll() == 0 for p in started) or any(p.poll() for p in started), "the ranks", timeout_s=600)
        logs = "".join((directory / f"{rank}.log").read_text() for rank in range(2))
        assert [process.poll() for process in started] == [0, 0], logs
    return directory


def report(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


def assert_same_state(one: Path, other: Path, odd: float = WEIGHTS) -> None:
    """Published weights and both moments of the optimizer. One weight in a thousand may differ by `odd`."""
    ours, theirs = (
        {name: np.frombuffer(bytes.fromhex(text), np.float32) for name, text in report(each)["weights"].items()}
        for each in (one, other)
    )
    assert ours.keys() == theirs.keys()
    moments, expected = (load_file(each / "optimizer.safetensors") for each in (one, other))
    apart = np.abs(np.concatenate([ours[name] - theirs[name] for name in ours]))
    assert np.quantile(apart, 0.999) < WEIGHTS and apart.max() < odd
    assert moments.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(moments[name].reshape(value.shape), value, rtol=1e-4, atol=MOMENTS)


def assert_same_tensors(one: Path, other: Path) -> None:
    """Every safetensors file in the directories."""
    for file in other.glob("*.safetensors"):
        ours, theirs = load_file(one / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all(float((ours[name] - theirs[name]).abs().max()) < WEIGHTS for name in theirs)


def assert_same_reference(one: Path, other: Path, within: float) -> None:
    """Log-probabilities under the reference, after steps of the policy."""
    ours, theirs = report(one)["references"], report(other)["references"]
    assert theirs and ours.keys() == theirs.keys()
    for member, logps in theirs.items():
        assert ours[member] == pytest.approx(logps, abs=within)


@pytest.mark.parametrize("name", ["torch", *ZERO])
def test_two_ranks_make_the_steps_of_one(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / name, alone / "two")
    ours, theirs = report(together / name), report(alone / "two")
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine.keys() == other.keys()
        for metric in ("loss", "grad_norm", "entropy", "is/ess", "is/ratio_max", "kl/behaviour"):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-4, abs=1e-6)
    assert ours["applied"] == [True, True]
    assert ours["canary"] == pytest.approx(theirs["canary"], abs=1e-4)
    assert ours["members"] == [pytest.approx(each, rel=1e-4) for each in theirs["members"]]
    assert ours["observed"].keys() == theirs["observed"].keys()
    for member, logps in theirs["observed"].items():
        assert ours["observed"][member] == pytest.approx(logps, abs=1e-5)


def test_another_learning_rate_reaches_every_rank_with_the_step_it_is_for(alone: Path, together: Path) -> None:
    assert_same_state(together / "rates", alone / "rates", ODD)  # steps ten times as long
    rates, usual = (np.array(report(alone / name)["canary"]) for name in ("rates", "three"))
    assert np.abs(rates - usual).max() > 1e-2


@pytest.mark.parametrize("name", ["zero-2", "zero-3"])
def test_two_ranks_that_share_the_positions_of_every_row_make_the_steps_of_one(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / f"sequence-{name}", alone / "two")
    ours, theirs = report(together / f"sequence-{name}"), report(alone / "two")
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        for metric in ("loss", "grad_norm", "entropy", "is/ess", "kl/behaviour"):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-4, abs=1e-6)
    assert ours["observed"].keys() == theirs["observed"].keys()


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_that_share_every_layer_make_the_clipped_steps_of_one(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / f"tensor-{name}", alone / name, ODD)
    ours, theirs = report(together / f"tensor-{name}"), report(alone / name)
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine["grad_norm"] > CLIPPED["max_grad_norm"]
        for metric in ("loss", "grad_norm", "entropy", "is/ess", "kl/behaviour"):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-4, abs=1e-6)
    assert ours["shapes"] == theirs["shapes"]
    assert ours["canary"] == pytest.approx(theirs["canary"], abs=1e-4)
    assert ours["observed"].keys() == theirs["observed"].keys()
    for member, logps in theirs["observed"].items():
        assert ours["observed"][member] == pytest.approx(logps, abs=1e-5)


@pytest.mark.parametrize("name", REFERENCE)
def test_two_ranks_make_the_updates_of_one_with_a_reference(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / name, alone / "updates", WEIGHTS if name == "updates" else ODD)
    assert_same_reference(together / name, alone / "updates", 1e-5)


def test_under_zero_3_each_rank_holds_its_part_of_the_reference_in_the_type_it_is_to_have(alone: Path, together: Path) -> None:
    assert_same_reference(together / "reference-bfloat16", alone / "updates", 0.2)
    whole = report(alone / "updates")["reference_bytes"]
    held = {name: report(together / name)["reference_bytes"] / whole for name in (*REFERENCE, "reference-bfloat16")}
    expected = {"updates": 1.0, "updates-zero-3": 0.5, "updates-tensor": 0.5, "reference-bfloat16": 0.25}
    assert held == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["zero-3-0", "zero-2-1", "zero-1-2", "torch-3", "torch-from-one"])
def test_what_one_stage_or_number_of_ranks_saved_another_goes_on_from(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / name, alone / "three")


@pytest.mark.parametrize("name", ["tensor-from-zero", "zero-from-tensor"])
def test_ranks_that_share_layers_and_ranks_that_do_not_go_on_from_each_other(alone: Path, together: Path, name: str) -> None:
    """Two steps were made before; those of `tensor-poisoned` with a refused one between them."""
    assert_same_state(together / name, alone / "three", ODD)


@pytest.mark.parametrize("name", ["torch", "zero-3", "tensor-poisoned"])
def test_one_rank_goes_on_from_what_two_saved(alone: Path, together: Path, tmp_path: Path, name: str) -> None:
    job = {"model": str(alone / "model"), "first": 2, "steps": 3, "load": str(together / name)}
    control(Controller(make(job, None)), job, tmp_path / "out")
    assert_same_state(tmp_path / "out", alone / "three", ODD)


def test_a_lone_rank_of_deepspeed_goes_on_from_what_two_saved(alone: Path, together: Path, tmp_path: Path) -> None:
    job = {"model": str(alone / "model"), "first": 2, "steps": 3, "load": str(together / "zero-2")}
    plan = [job | {"name": name, "settings": ZERO[name]} for name in ("zero-1", "zero-3")]
    with processes(tmp_path, plan, size=1) as (lone,):
        assert lone.wait(timeout=300) == 0, (tmp_path / "0.log").read_text()
    for name in ("zero-1", "zero-3"):
        assert_same_state(tmp_path / name, alone / "three")


@pytest.mark.parametrize("name", [*ZERO, "tensor"])
def test_a_gradient_that_is_no_number_is_refused_by_all_ranks_and_leaves_nothing_behind(
    alone: Path, together: Path, name: str
) -> None:
    assert report(together / f"{name}-poisoned")["applied"] == [True, False, True]
    assert_same_state(together / f"{name}-poisoned", alone / "two", ODD)


@pytest.mark.parametrize("name", ZERO)
def test_two_ranks_learn_the_adapters_of_one(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / f"lora-{name}", alone / "lora")
    assert_same_tensors(together / f"lora-{name}" / "model", alone / "lora" / "model")


def test_adapters_go_on_from_a_checkpoint_of_another_backend_and_leave_alone(alone: Path, together: Path) -> None:
    assert_same_tensors(together / "lora-on" / "adapter", alone / "lora-three" / "adapter")
    published, base = report(together / "lora-on")["weights"], load_file(alone / "model" / "model.safetensors")
    assert published and all(name.endswith((".lora_A", ".lora_B")) for name in published)
    whole = load_file(alone / "lora-three" / "model" / "model.safetensors")
    for name in {name.rpartition(".lora_")[0] for name in published}:
        a, b = (np.frombuffer(bytes.fromhex(published[f"{name}.lora_{half}"]), np.float32) for half in "AB")
        merged = base[name].numpy() + b.reshape(len(base[name]), 2) @ a.reshape(2, -1)
        assert np.abs(merged - whole[name].numpy()).max() < WEIGHTS


@pytest.mark.rest
@pytest.mark.parametrize("where", ["between two steps", "wherever it is"])
def test_a_rank_that_hangs_is_named_by_those_who_wait_for_it(alone: Path, tmp_path: Path, where: str) -> None:
    job = {"name": "long", "model": str(alone / "model"), "steps": 10**6, "timeout_s": 30.0, "idle_timeout_s": 600.0}
    job |= {"watch": True, "pause": 3 if where == "between two steps" else None}
    with processes(tmp_path, [job]) as (leader, follower):
        log = tmp_path / "0.log"
        wait_for(lambda: "step 3\n" in log.read_text() or leader.poll() is not None, "the third step")
        assert leader.poll() is None, log.read_text()
        follower.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        assert leader.wait(timeout=300) != 0
    assert "RankLostError" in log.read_text() and "rank 1 did not come" in log.read_text()


def test_a_meeting_that_cannot_be_is_named() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        meeting = f"{LOOPBACK}:{taken.getsockname()[1]}"
        with pytest.raises(RankLostError, match=rf"rank 0 cannot be met at {meeting}: .*in use"):
            Ranks.join(0, 2, meeting, timeout_s=1.0, idle_timeout_s=1.0)
    with pytest.raises(RankLostError, match="the meeting of the ranks: rank 0 did not come"):
        Ranks.join(1, 2, meeting, timeout_s=1.0, idle_timeout_s=1.0)


def test_rows_are_dealt_by_groups_to_the_rank_with_the_least_and_none_is_lost() -> None:
    rows = make_rows(GROUPS, ADVANTAGES, 6)
    parts = partition_rows(rows, 2)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    assert not {row.group.number for row in parts[0]} & {row.group.number for row in parts[1]}
    load = [sum(row.length for row in part) for part in parts]
    assert max(load) - min(load) <= max(row.length for row in rows)


def test_ranks_make_equally_many_passes_and_know_what_all_of_them_count() -> None:
    rows = make_rows(GROUPS[:1], ADVANTAGES[:1], 512)
    first, second = (part[0] for part in partition([rows], 2, Packing(40)))
    assert len(first.batches) == len(second.batches)
    assert [batch.num_tokens for batch in second.batches] == [0] * len(second.batches)
    assert first.counts == second.counts == count(rows)
    assert sum(batch.num_tokens for batch in first.batches) == count(rows).num_tokens
