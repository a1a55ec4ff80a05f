"""Two ranks, by plain torch and by ZeRO-1, 2 and 3, are one: real processes, real gloo, the same made-up batches.

The processes are started once for all tests that only look at what came out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making import make_group, make_model
from rank_role import ADVANTAGES, GROUPS, control, make
from safetensors.torch import load_file

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.launch.sockets import LOOPBACK
from async_rlhf.learner.batch.packing import Packing, count, make_micro_batches, partition, partition_rows
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.model.sequence import Share
from async_rlhf.learner.step.deepspeed_machine import autotp_settings
from async_rlhf.learner.step.ranks import RankLostError, Ranks
from tests.conftest import REPOSITORY, kept_port, wait_for

ZERO = {f"zero-{stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)}
TENSOR = {"tensor_parallel": 2, "ranks": 2}
SEQUENCE = {"sequence_parallel": 2, "ranks": 2}
# With and without norms over split heads and tied embeddings; at ZeRO-1, 2 and 3.
SPLIT = ("llama", "qwen3", "llama-tied")
CLIPPED = {"max_grad_norm": 1.0}
RATES = {"1": 1e-2, "2": 1e-2}
LORA = {"lora": {"rank": 2, "alpha": 4.0}}
# The policy rests for two of three steps.
CRITIC = {"critic": {"kind": "model", "warmup_steps": 2, "learning_rate": 1e-2}}
# Sums in another order: far below what one step of AdamW moves a weight by (1e-3).
WEIGHTS, MOMENTS = 1e-6, 1e-6
# Where a product is summed in two halves and the gradient is next to nothing, AdamW divides rounding by rounding.
ODD = 1e-4
# Jobs that `make test` has others like.
FURTHER = {
    "zero-2", "zero-2-on", "zero-1-on", "torch-from-one", "zero-1-poisoned", "zero-2-poisoned", "lora-zero-1", "lora-zero-2",
    "lora-on", "sequence-zero-2", "tensor-qwen3", "tensor-llama-tied", "tensor-poisoned", "tensor-from-zero",
    "zero-from-tensor", "updates-zero-3", "updates-tensor", "reference-bfloat16",
    "taught-sequence", "taught-tensor", "critic-zero-2", "critic-bfloat16",
}  # fmt: skip


def each(*names: str) -> Any:
    """Of the further ones a test is made by `make test-all`."""
    marked = [pytest.param(name, marks=pytest.mark.rest) if name in FURTHER else name for name in names]
    return pytest.mark.parametrize("name", marked)


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
        "critic": {"steps": 3, "settings": CRITIC},
        "critic-warm": {"steps": 2, "settings": CRITIC},
        "critic-on": {"steps": 3, "first": 2, "settings": CRITIC, "load": str(directory / "critic-warm")},
        "taught": {"steps": 2, "teacher": str(directory / "llama-tied-model")},
        **{name: {"steps": 2, "settings": CLIPPED, "model": str(directory / f"{name}-model")} for name in SPLIT},
    }.items():
        control(make(job | own, None), job | own, directory / name)
    return directory


def jobs(alone: Path, directory: Path) -> dict[str, dict[str, Any]]:
    """What two ranks are asked for, in order: some go on from what others before them have saved."""
    zero_3 = ZERO["zero-3"]
    loaded = {"steps": 3, "first": 2}
    return {
        "torch": {"dry_run": True},
        "rates": {"steps": 3, "rates": RATES},
        # with a reference: held by every rank, and shared out
        "updates": {"updates": 2, "reference": True},
        "updates-zero-3": {"updates": 2, "reference": True, "settings": zero_3},
        "updates-tensor": {"updates": 2, "reference": True, "settings": zero_3 | TENSOR},
        "reference-bfloat16": {"steps": 1, "reference": True, "settings": zero_3 | {"reference_dtype": "bfloat16"}},
        **{
            f"taught-{name}": {"settings": zero_3 | shared, "teacher": str(alone / "llama-tied-model")}
            for name, shared in (("sequence", SEQUENCE), ("tensor", TENSOR))
        },
        **{name: {"settings": own, "dry_run": True} for name, own in ZERO.items()},
        "zero-3-on": loaded | {"settings": zero_3, "load": str(directory / "zero-1")},
        "zero-2-on": loaded | {"settings": ZERO["zero-2"], "load": str(alone / "two")},
        "zero-1-on": loaded | {"settings": ZERO["zero-1"], "load": str(directory / "zero-3")},
        "torch-3": loaded | {"load": str(directory / "zero-3")},
        "torch-from-one": loaded | {"load": str(alone / "two")},
        **{f"{name}-poisoned": {"steps": 3, "poison": 1, "settings": own} for name, own in ZERO.items()},
        **{f"lora-{name}": {"settings": own | LORA} for name, own in ZERO.items()},
        "lora-on": loaded | {"settings": zero_3 | {"lora": LORA["lora"] | {"publish": "adapter"}}, "load": str(alone / "lora")},
        "critic-torch": {"steps": 3, "settings": CRITIC},
        **{f"critic-{name}": {"steps": 3, "settings": own | CRITIC} for name, own in ZERO.items()},
        "critic-bfloat16": {"steps": 3, "settings": ZERO["zero-2"] | CRITIC | {"dtype": "bfloat16"}},
        "critic-warm": {"settings": ZERO["zero-1"] | CRITIC},
        "critic-on": loaded | {"settings": zero_3 | CRITIC, "load": str(directory / "critic-warm")},
        **{f"sequence-{name}": {"settings": ZERO[name] | SEQUENCE} for name in ("zero-2", "zero-3")},
        **{
            f"tensor-{name}": {"model": str(alone / f"{name}-model"), "settings": zero | TENSOR | CLIPPED}
            for name, zero in zip(SPLIT, ZERO.values(), strict=True)
        },
        "tensor-poisoned": {"steps": 3, "poison": 1, "settings": ZERO["zero-1"] | TENSOR},
        "tensor-from-zero": loaded | {"settings": ZERO["zero-1"] | TENSOR, "load": str(directory / "zero-3")},
        "zero-from-tensor": loaded | {"settings": ZERO["zero-2"], "load": str(directory / "tensor-poisoned")},
    }


def made(alone: Path, directory: Path, *, further: bool) -> None:
    """Those jobs, or the others, in two processes."""
    default = {"model": str(alone / "model"), "steps": 2}
    plan = [{"name": name, **default, **job} for name, job in jobs(alone, directory).items() if (name in FURTHER) == further]
    with processes(directory, plan) as started:
        wait_for(lambda: all(p.poll() == 0 for p in started) or any(p.poll() for p in started), "the ranks", timeout_s=600)
        logs = "".join((directory / f"{rank}.log").read_text() for rank in range(2))
        assert [process.poll() for process in started] == [0, 0], logs


@pytest.fixture(scope="module")
def usual(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("together")
    made(alone, directory, further=False)
    return directory


@pytest.fixture(scope="module")
def further(alone: Path, usual: Path) -> Path:
    made(alone, usual, further=True)
    return usual


@pytest.fixture
def together(request: pytest.FixtureRequest, usual: Path) -> Path:
    """What two ranks have made; for a test of `make test-all` the further jobs too."""
    if request.node.get_closest_marker("rest") is not None:
        request.getfixturevalue("further")
    return usual


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
    moments, expected = (load_file(each / "optimizer-00001.safetensors") for each in (one, other))
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


@each("torch", *ZERO, "sequence-zero-2", "sequence-zero-3", *(f"tensor-{name}" for name in SPLIT))
def test_two_ranks_make_the_steps_of_one(alone: Path, together: Path, name: str) -> None:
    """Also where they share the positions of every row, and where they share every layer and the step is clipped."""
    one, odd = (alone / name.removeprefix("tensor-"), ODD) if name.startswith("tensor-") else (alone / "two", WEIGHTS)
    assert_same_state(together / name, one, odd)
    ours, theirs = report(together / name), report(one)
    for mine, other in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert mine.keys() == other.keys()
        assert (mine["grad_norm"] > CLIPPED["max_grad_norm"]) or odd == WEIGHTS
        for metric in ("loss", "grad_norm", "entropy", "is/ess", "is/ratio_max", "kl/behaviour"):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-4, abs=1e-6)
    assert ours["applied"] == [True, True] and ours["shapes"] == theirs["shapes"]
    assert ours["canary"] == pytest.approx(theirs["canary"], abs=1e-4)
    assert ours["members"] == [pytest.approx(each, rel=1e-4) for each in theirs["members"]]
    assert ours["observed"].keys() == theirs["observed"].keys()
    for member, logps in theirs["observed"].items():
        assert ours["observed"][member] == pytest.approx(logps, abs=1e-5)


def test_another_learning_rate_reaches_every_rank_with_the_step_it_is_for(alone: Path, together: Path) -> None:
    assert_same_state(together / "rates", alone / "rates", ODD)  # steps ten times as long
    rates, usual = (np.array(report(alone / name)["canary"]) for name in ("rates", "three"))
    assert np.abs(rates - usual).max() > 1e-2


@each("updates", "updates-zero-3", "updates-tensor")
def test_two_ranks_make_the_updates_of_one_with_a_reference(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / name, alone / "updates", WEIGHTS if name == "updates" else ODD)
    assert_same_reference(together / name, alone / "updates", 1e-5)


@each("taught-sequence", "taught-tensor")
def test_two_ranks_learn_from_a_teacher_that_they_share_what_one_learns(alone: Path, together: Path, name: str) -> None:
    """At the likeliest tokens of each place, which ranks that share a row find for their own positions."""
    assert_same_state(together / name, alone / "taught", ODD)
    ours, theirs = (report(each)["metrics"][-1] for each in (together / name, alone / "taught"))
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4) and ours["top_k/mass"] == pytest.approx(theirs["top_k/mass"])
    assert 0 < ours["top_k/mass"] < 1 and ours["kl/reference"] == pytest.approx(theirs["kl/reference"], rel=1e-4)


@each("critic-torch", *(f"critic-{name}" for name in ZERO), "critic-on")
def test_two_ranks_warm_up_a_critic_as_one_does_while_the_policy_rests(alone: Path, together: Path, name: str) -> None:
    """It neither decays nor are its updates counted; nor by a learner that goes on from a checkpoint of the warm-up."""
    one = alone / (name if name == "critic-on" else "critic")
    assert_same_state(together / name, one, ODD)
    ours, theirs = (load_file(each / "critic.safetensors") for each in (together / name, one))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-3, atol=ODD)


@pytest.mark.rest
def test_a_critic_of_sixteen_bits_learns_what_one_in_float32_does(alone: Path, together: Path) -> None:
    losses, expected = (
        [m["critic/loss"] for m in report(each / name)["metrics"]]
        for each, name in ((together, "critic-bfloat16"), (alone, "critic"))
    )
    assert losses == pytest.approx(expected, rel=0.1) and losses[-1] < losses[0]


@pytest.mark.rest
def test_under_zero_3_each_rank_holds_its_part_of_the_reference_in_the_type_it_is_to_have(alone: Path, together: Path) -> None:
    assert_same_reference(together / "reference-bfloat16", alone / "updates", 0.2)
    parts = {"updates": 1.0, "updates-zero-3": 0.5, "updates-tensor": 0.5, "reference-bfloat16": 0.25}
    whole = report(alone / "updates")["reference_bytes"]
    assert {name: report(together / name)["reference_bytes"] / whole for name in parts} == pytest.approx(parts, rel=0.01)


@each("zero-3-on", "zero-2-on", "zero-1-on", "torch-3", "torch-from-one", "tensor-from-zero", "zero-from-tensor")
def test_what_one_stage_or_number_of_ranks_saved_another_goes_on_from(alone: Path, together: Path, name: str) -> None:
    """Those of `tensor-poisoned` were made with a refused step between them."""
    assert_same_state(together / name, alone / "three", ODD if "tensor" in name else WEIGHTS)


@each("torch", "zero-3", "tensor-poisoned")
def test_one_rank_goes_on_from_what_two_saved(alone: Path, together: Path, tmp_path: Path, name: str) -> None:
    job = {"model": str(alone / "model"), "first": 2, "steps": 3, "load": str(together / name)}
    control(make(job, None), job, tmp_path / "out")
    assert_same_state(tmp_path / "out", alone / "three", ODD)


@pytest.mark.rest
def test_a_lone_rank_of_deepspeed_goes_on_from_what_two_saved(alone: Path, together: Path, tmp_path: Path) -> None:
    job = {"model": str(alone / "model"), "first": 2, "steps": 3, "load": str(together / "zero-2")}
    plan = [job | {"name": name, "settings": ZERO[name]} for name in ("zero-1", "zero-3")]
    with processes(tmp_path, plan, size=1) as (lone,):
        assert lone.wait(timeout=300) == 0, (tmp_path / "0.log").read_text()
    for name in ("zero-1", "zero-3"):
        assert_same_state(tmp_path / name, alone / "three")


@each("zero-1-poisoned", "zero-2-poisoned", "zero-3-poisoned", "tensor-poisoned")
def test_a_gradient_that_is_no_number_is_refused_by_all_ranks_without_a_trace(alone: Path, together: Path, name: str) -> None:
    assert report(together / name)["applied"] == [True, False, True]
    assert_same_state(together / name, alone / "two", ODD)


@each("lora-zero-1", "lora-zero-2", "lora-zero-3")
def test_two_ranks_learn_the_adapters_of_one(alone: Path, together: Path, name: str) -> None:
    assert_same_state(together / name, alone / "lora")
    assert_same_tensors(together / name / "model", alone / "lora" / "model")


@pytest.mark.rest
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


def test_rows_go_by_groups_to_the_rank_with_the_least_none_is_lost_and_all_make_equally_many_passes() -> None:
    rows = make_rows(GROUPS, ADVANTAGES)
    parts = partition_rows(rows, 2)
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    assert not {row.group.number for row in parts[0]} & {row.group.number for row in parts[1]}
    load = [sum(row.length for row in part) for part in parts]
    assert max(load) - min(load) <= max(row.length for row in rows)
    one = make_rows(GROUPS[:1], ADVANTAGES[:1])
    first, second = (part[0] for part in partition([one], 2, Packing(40)))
    assert len(first.batches) == len(second.batches) and first.counts == second.counts == count(one)
    assert [batch.num_tokens for batch in second.batches] == [0] * len(second.batches)
    assert sum(batch.num_tokens for batch in first.batches) == count(one).num_tokens


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_token_is_of_one_rank_which_has_its_position_and_its_support(size: int) -> None:
    rows = make_rows([make_group(n, [3, 1, 6]) for n in range(2)], [[1.0, -1.0, 0.5]] * 2)
    (plain,) = make_micro_batches(rows, Packing(512, "rows"))
    sizes = torch.arange(plain.num_tokens) % 3
    batch = replace(plain, sizes_N=sizes, ids_K=torch.arange(int(sizes.sum())))
    assert batch.sampling_masks is not None
    sampling_masks = batch.sampling_masks.chunks(1)
    shares = [Share.of(batch, rank, size) for rank in range(size)]
    assert torch.cat([share.index_M for share in shares]).sort().values.tolist() == list(range(batch.num_tokens))
    for share in shares:
        assert share.own.ids_RL.shape[1] * size == share.positions_RL.shape[1]
        assert share.own.target_N.equal(batch.target_N[share.index_M])
        read = share.own.ids_RL.flatten()[share.own.source_N]
        assert read.equal(batch.ids_RL.flatten()[batch.source_N[share.index_M]])
        assert share.own.sampling_masks is not None
        wanted = [sampling_masks[token].ids_K for token in share.index_M.tolist()]
        assert share.own.sampling_masks.ids_K.equal(torch.cat([*wanted, torch.empty(0, dtype=torch.int64)]))


LAYERS = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}
LAYERS |= {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3"])
def test_all_products_of_a_layer_are_split_and_nothing_else(name: str) -> None:
    model = make_model(name)
    specs = autotp_settings(model, 2)["partition_config"]["layer_specs"]
    kinds = {spec["patterns"][0]: spec["partition_type"] for spec in specs if spec["partition_type"] != "skip"}
    names = [f"model.{parameter}" for parameter, _ in model.named_parameters()]
    split = {each: kind for each in names for pattern, kind in kinds.items() if re.match(pattern, each)}
    assert len(split) == 2 * len(LAYERS) and all(kind == LAYERS[each.split(".")[-2]] for each, kind in split.items())


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("gpt2", None, "GPT2LMHeadModel has no plan how to be split; set learner.tensor_parallel = 1"),
        ("llama", {"layers.*.mlp.experts": "moe_experts"}, "LlamaForCausalLM splits layers as moe_experts, which is not"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(name: str, plan: dict[str, str] | None, message: str) -> None:
    model = make_model(name)
    model.config.base_model_tp_plan = plan
    with pytest.raises(ConfigError, match=message):
        autotp_settings(model, 2)
