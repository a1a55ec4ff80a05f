"""One learner step on real models: what changes, what must not, and what comes back from disk."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import making
import numpy as np
import oracles
import pytest
import torch
import transformers
from making import ADVANTAGES, CONFIGS, GROUPS, TINY_SPELLER, make_group, make_model, make_updates, save, weights, with_returns
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.buffers.errors import ConfigError, NonFiniteError, RecordError
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.learner.batch.rows import make_rows
from async_rlhf.learner.config import AdvantageConfig, LearnerConfig, LossConfig
from async_rlhf.learner.model.files import load_model, write_model
from async_rlhf.learner.objective.estimation import estimate_advantages
from async_rlhf.learner.step import controller, torch_machine
from async_rlhf.learner.step.controller import Controller
from async_rlhf.learner.step.report import StepReport
from async_rlhf.learner.step.torch_machine import learning_rate, make_adamw, set_learning_rate

make_backend = partial(making.make_backend, weight_decay=0.1, warmup_steps=4, micro_batch_tokens=40)
NAN = float("nan")


def state(backend: Controller) -> dict[str, bytes]:
    """Weights, adapters and critic, and what the optimizer keeps of each."""
    policy, optimizer = backend.machine.policy, backend.machine._optimizer
    kept = {f"{n}.{key}": value for n, p in policy.named_parameters() for key, value in optimizer.state.get(p, {}).items()}
    return {name: tensor.detach().numpy().tobytes() for name, tensor in {**dict(policy.named_parameters()), **kept}.items()}


def logprobs(backend: Controller, group: Group, rollout: Rollout) -> Tensor:
    with torch.no_grad():
        return oracles.completion_logprobs(
            backend.machine.policy.model, group.prompt_ids.tolist(), rollout.completion_ids.tolist(), group.sampling.temperature
        )


def of_all(backend: Controller) -> list[Tensor]:
    return [logprobs(backend, group, rollout) for group in GROUPS for rollout in group.rollouts]


def test_a_step_changes_every_weight_is_the_same_each_time_and_made_from_the_gradient(model_dir: Path) -> None:
    one, other = (make_backend(model_dir, max_grad_norm=1e-3) for _ in range(2))
    before = weights(one)
    (rows,) = make_updates()
    for step in range(3):
        gradient = one.gradient(rows, step)  # before it is clipped; asking for it changes nothing
        assert gradient.dtype == torch.float32 and gradient.numel() == sum(p.numel() for p in one.machine._learning())
        report = one.step([rows], step)
        assert report == other.step([rows], step)
        assert float(gradient.norm()) == pytest.approx(report.metrics["grad_norm"], rel=1e-5)
    assert all(weights(one)[name] != before[name] for name in before)
    assert state(one) == state(other)
    (poisoned,) = make_updates(1, GROUPS, [[NAN, -1.5, 0.5]] * 4)
    with pytest.raises(NonFiniteError, match="step 3: the loss is nan"):
        one.gradient(poisoned, 3)


def test_a_report_has_the_metrics_a_backend_owes_and_they_are_the_twins(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    behaviours = [rollout.logprobs.tolist() for group in GROUPS for rollout in group.rollouts]
    pairs = zip(of_all(backend), behaviours, strict=True)
    ratios = [[oracles.ratio(*pair) for pair in zip(own.tolist(), behaviour, strict=True)] for own, behaviour in pairs]
    loss = float(oracles.loss(backend.machine.policy.model, GROUPS, ADVANTAGES, LossConfig(is_cap=2.0)).detach())
    report = backend.step(make_updates(), 0)
    flat = [r for each in ratios for r in each]
    assert set(report.metrics) == set(StepReport.of_nothing().metrics)
    expected = {
        "loss": loss,
        "is/ratio_max": max(flat),
        "is/ratio_mean": sum(flat) / len(flat),
        "is/ess": oracles.effective_sample_size(flat),
        "clip_ratio/region_mean": 0.0,  # the first update is on the policy it clips around
        "kl/behaviour": -sum(np.log(flat)) / len(flat),
    }
    assert {name: report.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert report.weight_of_member == {n: pytest.approx(sum(each) / len(each), rel=1e-3) for n, each in enumerate(ratios)}


def test_the_proximal_policy_is_the_one_before_the_first_update(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(model_dir, warmup_steps=0, learning_rate=1e-2)
    seen: list[tuple[Tensor, Tensor]] = []
    loss = controller.objective

    def spy(inputs: Any, config: LossConfig) -> Any:
        seen.append((inputs.logp_current_N.detach(), inputs.logp_proximal_N))
        return loss(inputs, config)

    monkeypatch.setattr(controller, "objective", spy)
    before = of_all(backend)
    report = backend.step(make_updates(2), 0)
    first, second = [torch.cat([pair[i] for pair in seen]) for i in (0, 1)]
    torch.testing.assert_close(second, torch.cat(before), rtol=0, atol=1e-4)
    half = len(second) // 2
    torch.testing.assert_close(first[:half], second[:half], rtol=0, atol=1e-4)
    assert (first[half:] - second[half:]).abs().max() > 1e-2  # the first update moved the policy
    assert report.metrics["clip_ratio/region_mean"] > 0


@pytest.mark.parametrize("poison", [NAN, float("inf"), "behaviour"])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_optimizer(model_dir: Path, poison: Any) -> None:
    backend, undisturbed = make_backend(model_dir), make_backend(model_dir)
    assert backend.step(make_updates(), 0).applied and undisturbed.step(make_updates(), 0).applied
    if poison == "behaviour":
        group = make_group(0, [3])
        group.rollouts[0].logprobs[1] = np.nan  # past the door, which would have refused it
        refused = make_updates(1, [group], [[1.0]])
    else:
        refused = make_updates(1, GROUPS, [[1.0, poison, 0.5], *ADVANTAGES[1:]])
    assert not backend.step(refused, 1).applied
    assert state(backend) == state(undisturbed)
    # and it leaves nothing behind: the next step is the one that would have been made without it
    assert backend.step(make_updates(), 1) == undisturbed.step(make_updates(), 1)
    assert state(backend) == state(undisturbed)


def test_after_a_refused_update_the_later_ones_of_the_step_are_not_tried(model_dir: Path) -> None:
    backend, alone = make_backend(model_dir), make_backend(model_dir)
    updates = make_updates(4, GROUPS, [*ADVANTAGES[:1], [NAN] * 3, *ADVANTAGES[2:]])
    assert not backend.step(updates, 0).applied and alone.step(updates[:1], 0).applied
    assert weights(backend) == weights(alone)


LORA = {"lora": {"rank": 2, "alpha": 4.0}}
RESUMED: dict[str, tuple[str, dict[str, Any], int]] = {
    **{name: (name, {}, 2) for name in CONFIGS},
    "before the first step": ("llama", {}, 0),
    **{f"a critic of kind {kind}": ("llama", {"critic": {"kind": kind}}, 2) for kind in ("head", "model")},
    **{f"adapters of {name}": (name, LORA, 2) for name in ("llama", "llama-tied")},
}


@pytest.mark.parametrize(("name", "settings", "at"), RESUMED.values(), ids=RESUMED)
def test_saved_and_loaded_training_goes_on_bit_for_bit(tmp_path: Path, name: str, settings: dict[str, Any], at: int) -> None:
    def train(backend: Controller, step: int) -> None:
        backend.step([with_returns(backend, 1.0)] if "critic" in settings else make_updates(2), step)

    make_model(name).save_pretrained(tmp_path / "start")
    straight, resumed = (make_backend(tmp_path / "start", **settings) for _ in range(2))
    for step in range(4):
        if step == at:
            resumed.load(save(straight, tmp_path / "saved"))
        train(straight, step)
    for step in range(at, 4):
        train(resumed, step)
    assert state(resumed) == state(straight)
    assert any("critic" in each for each in state(straight)) == ("critic" in settings)


@pytest.mark.parametrize("stage", ["nothing", "the model", "all"])
@pytest.mark.parametrize("settings", [{}, LORA, {"critic": {"kind": "model"}}], ids=["plain", "adapters", "critic"])
def test_of_a_checkpoint_only_what_is_not_written_when_weights_change_is_copied(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(backend: Controller, step: int) -> None:
        backend.step([with_returns(backend, 1.0)] if "critic" in settings else make_updates(), step)

    backend, twin = (make_backend(model_dir, **settings) for _ in range(2))
    for each in (backend, twin):
        train(each, 0)
    expected, saved = save(twin, tmp_path / "expected"), tmp_path / "saved"
    saved.mkdir()
    reached, changed = threading.Event(), threading.Event()

    def pause(*_: object) -> None:
        reached.set()
        assert changed.wait(60)

    def paused(before: Any) -> Any:
        return lambda *arguments: (pause(), before(*arguments))

    name = {"nothing": "write_model", "the model": "save_file"}.get(stage)
    if name is not None:
        monkeypatch.setattr(torch_machine, name, paused(getattr(torch_machine, name)))
    write = backend.snapshot()
    writing = threading.Thread(target=lambda: (write(saved), stage == "all" and pause()))
    writing.start()
    assert reached.wait(60)
    learning = {name: p for name, p in backend.machine.policy.model.named_parameters() if p.requires_grad}
    live = {"model": learning, "optimizer": moments(backend)}
    before = {part: {name: tensor.data_ptr() for name, tensor in named.items()} for part, named in live.items()}
    for each in (backend, twin):
        train(each, 1)
    changed.set()
    writing.join()
    files = sorted(path.relative_to(expected) for path in expected.rglob("*") if path.is_file())
    assert [(saved / file).read_bytes() for file in files] == [(expected / file).read_bytes() for file in files]
    assert state(backend) == state(twin)
    moved = {part: {tensor.data_ptr() != before[part][name] for name, tensor in named.items()} for part, named in live.items()}
    after_adapters = "lora" in settings  # they are written last
    assert moved == {"model": {stage == "nothing" or (after_adapters and stage != "all")}, "optimizer": {stage != "all"}}


def moments(backend: Controller) -> dict[str, Tensor]:
    return {f"{name}.{kind}": value for name, kind, value in backend.machine._moments()}


def parameters(path: Path, **settings: Any) -> Mapping[str, bytes]:
    model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **settings)
    return {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}


def test_what_is_saved_is_a_model_directory_like_the_one_it_began_with(tmp_path: Path) -> None:
    start, saved = tmp_path / "start", tmp_path / "saved" / "model"
    shutil.copytree(TINY_SPELLER, start)
    odd = {"do_sample": False, "temperature": 0.6, "eos_token_id": 1}  # as many published models have it
    (start / "generation_config.json").write_text(json.dumps(odd))
    backend = make_backend(start)
    backend.step(make_updates(), 0)
    save(backend, tmp_path / "saved")
    assert parameters(saved) == weights(backend)
    assert {path.name for path in saved.iterdir()} == {path.name for path in start.iterdir()}
    assert json.loads((saved / "generation_config.json").read_text()) == odd
    began, found = (AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (start, saved))
    text = "Spell this word backward: cab"
    assert (began(text).input_ids, began.eos_token_id) == (found(text).input_ids, found.eos_token_id)


def test_a_model_of_bfloat16_goes_on_from_float32_and_loads_as_bfloat16_with_all_its_chat_templates(tmp_path: Path) -> None:
    start, saved = tmp_path / "start", tmp_path / "saved" / "model"
    AutoModelForCausalLM.from_pretrained(TINY_SPELLER, dtype=torch.bfloat16).save_pretrained(start)
    AutoTokenizer.from_pretrained(TINY_SPELLER).save_pretrained(start)
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    backend = make_backend(start)
    backend.step(make_updates(), 0)
    save(backend, tmp_path / "saved")
    assert AutoModelForCausalLM.from_pretrained(saved).dtype == torch.bfloat16
    assert parameters(saved, dtype=torch.float32) == weights(backend)
    assert AutoTokenizer.from_pretrained(saved).chat_template == {"tools": "{{ messages }}"}


OLDER = {
    "llama": ("LlamaConfig", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "gemma3_text": ("Gemma3TextConfig", {"rope_local_base_freq": 500.0}),
}


def test_weights_decay_whatever_they_are_of() -> None:
    policy = {name: torch.nn.Parameter(torch.ones(2)) for name in ("layer.weight", "layer.bias", "norm.weight")}
    config = LearnerConfig(weight_decay=0.5, learning_rate=0.1)
    optimizer = make_adamw(policy, {}, config, torch.device("cpu"))
    for each in policy.values():
        each.grad = torch.zeros(2)
    optimizer.step()
    assert [float(each[0].detach()) for each in policy.values()] == pytest.approx([1 - 0.1 * 0.5] * 3)


@pytest.mark.parametrize("kind", OLDER)
def test_a_checkpoint_says_its_rotations_to_versions_of_transformers_that_saved_the_model(tmp_path: Path, kind: str) -> None:
    name, more = OLDER[kind]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8}
    config = getattr(transformers, name)(**sizes, vocab_size=32, num_key_value_heads=1, max_position_embeddings=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "old")
    said = json.loads((tmp_path / "old" / "config.json").read_text())
    old = {"rope_theta": 500000.0, "torch_dtype": "bfloat16", **more}
    kept = {key: value for key, value in said.items() if key not in ("rope_parameters", "dtype")}
    (tmp_path / "old" / "config.json").write_text(json.dumps({**kept, **old}))
    model = load_model(tmp_path / "old", torch.device("cpu"))
    write_model(tmp_path / "new", model, model.state_dict(), tmp_path / "old")
    written = json.loads((tmp_path / "new" / "config.json").read_text())
    keys = [key for key in old if key.startswith(("rope", "torch"))]
    assert {key: written.get(key) for key in keys} == {key: old[key] for key in keys}
    assert written["rope_parameters"], "and for newer ones"
    tokens = torch.arange(32)[None]
    assert torch.equal(load_model(tmp_path / "new", torch.device("cpu"))(tokens).logits, model(tokens).logits)


def test_tied_parameters_are_published_once_and_scalars_and_empty_ones_can_be(tmp_path: Path) -> None:
    for name in ("llama", "llama-tied"):
        make_model(name).save_pretrained(tmp_path / name)
    backend, tied = make_backend(tmp_path / "llama"), make_backend(tmp_path / "llama-tied")
    assert set(weights(backend)) - set(weights(tied)) == {"lm_head.weight"} and set(weights(tied)) < set(weights(backend))
    backend.machine.policy.model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    backend.machine.policy.model.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
    tensors = backend.tensors()
    assert np.frombuffer(tensors["scale"].data, np.float32).tolist() == [2.0] and tensors["scale"].shape == ()
    assert len(tensors["nothing"].data) == 0 and tensors["nothing"].shape == (0, 3)


def test_weights_leave_from_where_they_lie_and_no_step_changes_them_while_they_are_read(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    policy, optimizer = backend.machine.policy.model, backend.machine._optimizer
    tensors, begun, copied = backend.tensors(), threading.Event(), threading.Event()
    own = {name: p.detach().numpy() for name, p in policy.named_parameters()}
    assert all(np.shares_memory(np.frombuffer(tensors[name].data, np.uint8), each) for name, each in own.items())
    before, left = {name: each.tobytes() for name, each in own.items()}, dict[str, bytes]()

    def read() -> None:
        try:
            assert begun.wait(60)
            left.update({name: bytes(tensor.data) for name, tensor in tensors.items()})
        finally:
            copied.set()

    policy.get_input_embeddings().register_forward_pre_hook(lambda *_: begun.set())
    changed_after = list[bool]()
    optimizer.register_step_pre_hook(lambda *_: changed_after.append(copied.is_set()))
    reading = threading.Thread(target=read)
    reading.start()
    backend.is_read(until=copied)
    backend.step(make_updates(), 0)
    reading.join()
    assert changed_after[0] and left == before and {name: each.tobytes() for name, each in own.items()} != before


def test_weights_of_another_type_leave_as_a_copy_in_memory_that_is_used_again(model_dir: Path) -> None:
    dtype = "bfloat16"
    backend = make_backend(model_dir, publish_dtype=dtype)
    own = dict(backend.machine.policy.model.named_parameters())
    left: list[dict[str, bytes]] = []
    for step in range(2):
        tensors = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in backend.tensors().items()}
        left.append({name: data.tobytes() for name, data in tensors.items()})
        rounded = {name: p.detach().to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes() for name, p in own.items()}
        assert left[step] == rounded
        backend.is_read(until=threading.Event())  # which holds nothing up
        backend.step(make_updates(), step)
        assert {name: data.tobytes() for name, data in tensors.items()} == left[step], "a step does not change what has left"
        again = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in backend.tensors().items()}
        assert all(np.shares_memory(tensors[name], again[name]) for name in tensors)
    assert left[0] != left[1]


def targets(*names: str) -> dict[str, Any]:
    return {"lora": {"rank": 2, "targets": names}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a device that is not there": ("llama", {"device": "cuda:99"}, r"learner.device = 'cuda:99' cannot be used: .*; use 'cpu'"),
    "a device without a meaning": ("llama", {"device": "odd"}, r"learner.device = 'odd' cannot be used: .*; use 'cpu'"),
    "a directory without a model": ("", {}, "is no Hugging Face causal language model"),
    "an adapter of no layer": ("llama", targets("nowhere"), r"\['nowhere'\].*Layers here: .*q_proj"),
    "one of the embeddings": ("llama", targets("q_proj", "embed_tokens"), "has the input embeddings, and adapters are for"),
    "one of a tied weight": (
        "llama-tied", targets("q_proj", "lm_head"), r"lm_head\.weight and model\.embed_tokens\.weight are one tensor, .*out",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("name", "settings", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path, name: str, settings: dict[str, Any], says: str) -> None:
    if name:
        make_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=says):
        make_backend(tmp_path, **settings)


RATES = {
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
    "cosine": [0.5, 1.0, 1.0, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2, 0.0, 0.0],
}


@pytest.mark.parametrize("schedule", RATES)
def test_rates_rise_over_the_warm_up_and_fall_to_0_from_a_peak_of_each_group(model_dir: Path, schedule: str) -> None:
    curve = {"warmup_steps": 2, "schedule": schedule}
    machine = make_backend(model_dir, critic={"kind": "head", "learning_rate": 1e-2}, **curve).machine
    for step, expected in enumerate(RATES[schedule]):
        assert learning_rate(machine.config, step, 6) == pytest.approx(1e-3 * expected, abs=1e-12)
        set_learning_rate(machine._optimizer, machine.config, step, 6)
        rates = [group["lr"] for group in machine._optimizer.param_groups]
        assert rates == pytest.approx([1e-3 * expected, 1e-2 * expected], abs=1e-12)


TEMPERED = [make_group(n, [3, 1, 6], temperature=0.8) for n in range(4)]


def trained_with(path: Path, loss: LossConfig, *, recorded: bool = True) -> Controller:
    config = LearnerConfig(learning_rate=1e-2, micro_batch_tokens=40)
    return controller.make_backend(path, config, loss, reference=None if recorded else path)


def with_reference(path: Path, loss: LossConfig, less: float = 0.0) -> list[Group]:
    """The same groups with what the frozen model says of each token."""
    seen = trained_with(path, loss, recorded=False).evaluate(make_rows(TEMPERED, ADVANTAGES)).values()
    said = iter([each.logp_reference - np.float32(less) for each in seen if each.logp_reference is not None])
    return [replace(g, rollouts=tuple(replace(r, reference=next(said)) for r in g.rollouts)) for g in TEMPERED]


@pytest.mark.parametrize(
    "loss", [{"kl_coef": 0.3}, {"kl_coef": 0.3, "kl_in": "reward"}, {"kind": "online_dpo"}], ids=["loss", "reward", "pairs"]
)
def test_a_step_from_recorded_values_is_the_step_that_computes_them(model_dir: Path, loss: dict[str, Any]) -> None:
    """To the last bit, for they are recorded from the micro-batches of the step; products of other shapes round otherwise."""
    config, plain = LossConfig(**loss), AdvantageConfig()
    told: list[tuple[dict[str, bytes], Any]] = []
    for groups in (TEMPERED, with_reference(model_dir, config)):
        trained = trained_with(model_dir, config, recorded=groups is not TEMPERED)
        for step in range(2):  # in the second the policy is another than the reference
            seen = trained.evaluate(make_rows(groups, ADVANTAGES)) if config.needs_evaluation(plain) else {}
            found = estimate_advantages(groups, ADVANTAGES, ADVANTAGES, seen, plain, config)
            report = trained.step([make_rows(groups, found.advantages, found.targets)], step)
        told.append((weights(trained), report.metrics))
    assert told[0] == told[1]


def test_what_was_recorded_is_used_no_second_model_is_held_and_one_without_is_no_guess(model_dir: Path) -> None:
    loss = LossConfig(kl_coef=0.3)
    groups = with_reference(model_dir, loss)
    one, other = trained_with(model_dir, loss), trained_with(model_dir, loss)
    assert one.machine._reference is None
    lower = other.step([make_rows(with_reference(model_dir, loss, 1.0), ADVANTAGES)], 0).metrics["kl/reference"]
    assert lower == pytest.approx(one.step([make_rows(groups, ADVANTAGES)], 0).metrics["kl/reference"] + 1, abs=1e-4)
    lacking = replace(groups[2].rollouts[0], reference=None)
    groups[2] = replace(groups[2], rollouts=(lacking, *groups[2].rollouts[1:]))
    with pytest.raises(RecordError, match=r'group 2 carries no log-probabilities.*placement = "learner"'):
        one.step([make_rows(groups, ADVANTAGES)], 1)
    without = [[None if (g, m) == (2, 0) else value for m, value in enumerate(row)] for g, row in enumerate(ADVANTAGES)]
    assert one.step([make_rows(groups, without)], 1).applied, "one that failed is left out, the others are trained on"
