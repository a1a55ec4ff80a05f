"""One learner step on real models: what changes, what must not, and what comes back from disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import making
import numpy as np
import oracles
import pytest
import torch
from making import ADVANTAGES, CONFIGS, GROUPS, TINY_SPELLER, make_group, make_model, make_updates, save, weights, with_returns
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rlhf.actors.engine import Request, RolloutKey
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.errors import ConfigError, NonFiniteError
from async_rlhf.buffers.record import Group, Rollout
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.buffers.weights.weight_set import WeightSet
from async_rlhf.learner.config import CriticConfig, LearnerConfig, LossConfig
from async_rlhf.learner.step import controller
from async_rlhf.learner.step.controller import Controller
from async_rlhf.learner.step.report import STEP_METRICS, StepReport
from async_rlhf.learner.step.torch_machine import learning_rate

make_backend = partial(making.make_backend, weight_decay=0.1, warmup_steps=4, micro_batch_tokens=40)


def optimizer_state(backend: Controller) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value.clone()
        for name, p in backend.machine.policy.model.named_parameters()
        for key, value in backend.machine._optimizer.state.get(p, {}).items()
    }


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_changes_every_weight_and_is_the_same_each_time(model_dir: Path) -> None:
    one, other = make_backend(model_dir), make_backend(model_dir)
    before = weights(one)
    for step in range(3):
        assert one.step(make_updates(), step) == other.step(make_updates(), step)
    assert all(weights(one)[name] != before[name] for name in before)
    assert weights(one) == weights(other)
    assert_equal(optimizer_state(one), optimizer_state(other))


def test_a_gradient_is_what_a_step_would_be_made_from_and_asking_for_it_changes_nothing(model_dir: Path) -> None:
    one, other = make_backend(model_dir, max_grad_norm=1e-3), make_backend(model_dir, max_grad_norm=1e-3)
    (rows,) = make_updates()
    found = one.gradient(rows, 0)
    learning = [p for p in one.machine.policy.parameters() if p.requires_grad]
    assert found.shape == (sum(p.numel() for p in learning),) and found.dtype == torch.float32
    report = one.step([rows], 0)
    assert float(found.norm()) == pytest.approx(report.metrics["grad_norm"], rel=1e-5)  # before it is clipped
    assert report == other.step([rows], 0) and weights(one) == weights(other)


def test_a_gradient_that_is_not_a_number_is_refused(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    (rows,) = make_updates(1, GROUPS, [[float("nan"), -1.5, 0.5]] * 4)
    with pytest.raises(NonFiniteError, match="step 3: the loss is nan"):
        backend.gradient(rows, 3)


def test_a_step_makes_the_praised_likelier_and_the_blamed_less_likely(model_dir: Path) -> None:
    backend = make_backend(model_dir, warmup_steps=0)

    def logps() -> list[float]:
        rollouts = [(group, rollout) for group in GROUPS[:1] for rollout in group.rollouts[:2]]
        with torch.no_grad():
            return [float(logprobs(backend, group, rollout).sum()) for group, rollout in rollouts]

    praised, blamed = logps()
    backend.step(make_updates(1, GROUPS[:1], [[1.0, -1.0, None]]), 0)
    assert logps()[0] > praised and logps()[1] < blamed


def logprobs(backend: Controller, group: Group, rollout: Rollout) -> Tensor:
    return oracles.completion_logprobs(
        backend.machine.policy.model, group.prompt_ids.tolist(), rollout.completion_ids.tolist(), group.sampling.temperature
    )


def test_a_report_has_the_metrics_a_backend_owes_and_they_are_the_twins(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    ratios: list[list[float]] = []
    with torch.no_grad():
        for group in GROUPS:
            for rollout in group.rollouts:
                pairs = zip(logprobs(backend, group, rollout).tolist(), rollout.logprobs.tolist(), strict=True)
                ratios.append([oracles.ratio(logp, behaviour) for logp, behaviour in pairs])
    loss = float(oracles.loss(backend.machine.policy.model, GROUPS, ADVANTAGES, LossConfig(is_cap=2.0)).detach())
    report = backend.step(make_updates(), 0)
    flat = [r for each in ratios for r in each]
    assert set(report.metrics) == set(STEP_METRICS) == set(StepReport.of_nothing().metrics)
    assert report.metrics["loss"] == pytest.approx(loss, rel=1e-4)
    assert report.metrics["is/ratio_max"] == pytest.approx(max(flat), rel=1e-3)
    assert report.metrics["is/ratio_mean"] == pytest.approx(sum(flat) / len(flat), rel=1e-3)
    assert report.metrics["is/ess"] == pytest.approx(oracles.effective_sample_size(flat), rel=1e-3)
    assert report.metrics["clip_ratio/region_mean"] == 0.0  # the first update is on the policy it clips around
    assert report.metrics["kl/behaviour"] == pytest.approx(-sum(np.log(flat)) / len(flat), rel=1e-3)
    assert report.weight_of_member == {n: pytest.approx(sum(each) / len(each), rel=1e-3) for n, each in enumerate(ratios)}


def test_the_proximal_policy_is_the_one_before_the_first_update(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make_backend(model_dir, warmup_steps=0, learning_rate=1e-2)
    seen: list[tuple[Tensor, Tensor]] = []
    loss = controller.objective

    def spy(inputs: Any, config: LossConfig) -> Any:
        seen.append((inputs.logp_current_N.detach(), inputs.logp_proximal_N))
        return loss(inputs, config)

    monkeypatch.setattr(controller, "objective", spy)
    with torch.no_grad():
        before = [logprobs(backend, group, rollout) for group in GROUPS for rollout in group.rollouts]
    report = backend.step(make_updates(2), 0)
    first, second = [torch.cat([pair[i] for pair in seen]) for i in (0, 1)]
    torch.testing.assert_close(second, torch.cat(before), rtol=0, atol=1e-5)
    half = len(second) // 2
    torch.testing.assert_close(first[:half], second[:half])
    assert (first[half:] - second[half:]).abs().max() > 1e-2  # the first update moved the policy
    clipped = report.metrics["clip_ratio/region_mean"]
    assert clipped is not None and clipped > 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_optimizer(model_dir: Path, poison: float) -> None:
    backend = make_backend(model_dir)
    assert backend.step(make_updates(), 0).applied
    before, state = weights(backend), optimizer_state(backend)
    report = backend.step(make_updates(1, GROUPS, [[1.0, poison, 0.5], *ADVANTAGES[1:]]), 1)
    assert not report.applied
    assert weights(backend) == before
    assert_equal(optimizer_state(backend), state)
    # and it leaves nothing behind: the next step is the one that would have been made without it
    undisturbed = make_backend(model_dir)
    undisturbed.step(make_updates(), 0)
    assert backend.step(make_updates(), 1) == undisturbed.step(make_updates(), 1)
    assert weights(backend) == weights(undisturbed)


def test_behaviour_log_probabilities_that_are_not_numbers_are_refused_too(model_dir: Path) -> None:
    backend, group = make_backend(model_dir), make_group(0, [3])
    group.rollouts[0].logprobs[1] = np.nan  # past the door, which would have refused it
    before = weights(backend)
    assert not backend.step(make_updates(1, [group], [[1.0]]), 0).applied
    assert weights(backend) == before and not optimizer_state(backend)


def test_after_a_refused_update_the_later_ones_of_the_step_are_not_tried(model_dir: Path) -> None:
    backend, alone = make_backend(model_dir), make_backend(model_dir)
    updates = make_updates(4, GROUPS, [*ADVANTAGES[:1], [float("nan")] * 3, *ADVANTAGES[2:]])
    assert len(updates) == 4
    assert not backend.step(updates, 0).applied
    assert alone.step(updates[:1], 0).applied
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
    ours, theirs = (dict(each.machine.policy.named_parameters()) for each in (resumed, straight))
    assert_equal(ours, theirs)
    assert_equal(optimizer_state(resumed), optimizer_state(straight))
    assert any("critic" in each for each in theirs) == ("critic" in settings)


def test_what_is_saved_is_a_model_directory_like_the_one_it_began_with(tmp_path: Path) -> None:
    backend = make_backend(TINY_SPELLER)
    backend.step(make_updates(), 0)
    backend.snapshot()(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    trained = {name: bytes(p.detach().numpy().tobytes()) for name, p in model.named_parameters()}
    assert trained == weights(backend)
    text = "Spell this word backward: cab"
    tokenizers = [AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (TINY_SPELLER, tmp_path / "model")]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert tokenizers[0].eos_token_id == tokenizers[1].eos_token_id == model.generation_config.eos_token_id
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in TINY_SPELLER.iterdir()}


def test_a_model_of_bfloat16_goes_on_from_float32_and_loads_as_bfloat16_with_all_its_chat_templates(tmp_path: Path) -> None:
    start = tmp_path / "start"
    AutoModelForCausalLM.from_pretrained(TINY_SPELLER, dtype=torch.bfloat16).save_pretrained(start)
    AutoTokenizer.from_pretrained(TINY_SPELLER).save_pretrained(start)
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    backend = make_backend(start)
    backend.step(make_updates(), 0)
    save(backend, tmp_path / "saved")
    model = tmp_path / "saved" / "model"
    assert AutoModelForCausalLM.from_pretrained(model).dtype == torch.bfloat16
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert {name: bytes(p.detach().numpy().tobytes()) for name, p in exact.named_parameters()} == weights(backend)
    assert AutoTokenizer.from_pretrained(model).chat_template == {"tools": "{{ messages }}"}


def test_a_generation_config_that_cannot_be_saved_is_copied(tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(TINY_SPELLER, start)
    odd = {"do_sample": False, "temperature": 0.6, "eos_token_id": 1}  # as many published models have it
    (start / "generation_config.json").write_text(json.dumps(odd))
    save(make_backend(start), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "model" / "generation_config.json").read_text()) == odd


def test_tied_parameters_are_published_once(tmp_path: Path) -> None:
    for name in ("llama", "llama-tied"):
        make_model(name).save_pretrained(tmp_path / name)
    tied, untied = (set(make_backend(tmp_path / name).tensors()) for name in ("llama-tied", "llama"))
    assert untied - tied == {"lm_head.weight"} and tied < untied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_leave_as_a_copy_in_memory_that_is_used_again(model_dir: Path, dtype: str) -> None:
    backend = make_backend(model_dir, publish_dtype=dtype)
    left: list[dict[str, bytes]] = []
    for step in range(2):
        tensors = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in backend.tensors().items()}
        left.append({name: data.tobytes() for name, data in tensors.items()})
        for name, parameter in backend.machine.policy.model.named_parameters():
            own = parameter.detach().to(getattr(torch, dtype))
            assert left[step][name] == own.view(torch.uint8).numpy().tobytes()
        backend.step(make_updates(), step)
        assert {name: data.tobytes() for name, data in tensors.items()} == left[step], "a step does not change what has left"
        again = {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in backend.tensors().items()}
        assert all(np.shares_memory(tensors[name], again[name]) for name in tensors)
    assert left[0] != left[1]


def test_scalars_and_empty_parameters_can_be_published(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    backend.machine.policy.model.register_parameter("scale", torch.nn.Parameter(torch.tensor(2.0)))
    backend.machine.policy.model.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
    tensors = backend.tensors()
    assert np.frombuffer(tensors["scale"].data, np.float32).tolist() == [2.0] and tensors["scale"].shape == ()
    assert len(tensors["nothing"].data) == 0 and tensors["nothing"].shape == (0, 3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_learner_agree_on_what_was_sampled(tmp_path: Path, name: str, temperature: float) -> None:
    """At staleness 0 the importance weight is 1: the engine adopts what was published and samples, the learner recomputes."""
    make_model(name).save_pretrained(tmp_path)
    backend = make_backend(tmp_path, warmup_steps=0)
    backend.step(make_updates(), 0)  # weights the engine was not started with
    engine = TorchEngine(make_model(name), slots=4, stop_ids=(), version=0, max_length=128)
    engine.load_weights(1, WeightSet.of(1, 1, backend.tensors()).tensors())
    prompts = [group.prompt_ids for group in GROUPS]
    for n, prompt in enumerate(prompts):
        engine.submit(
            [
                Request(RolloutKey(n, 0, m), tuple(prompt.tolist()), 4 + 3 * m, Sampling(temperature=temperature), 10 * n + m)
                for m in (0, 1, 2)
            ]
        )
    done: dict[RolloutKey, Rollout] = {}
    while engine.num_unfinished:
        for each in engine.step():
            done[each.key] = Rollout(each.token_ids, each.logprobs, each.spans, each.finish_reason)
    groups = [
        Group(n, 0, prompt, tuple(done[RolloutKey(n, 0, m)] for m in (0, 1, 2)), Sampling(temperature=temperature))
        for n, prompt in enumerate(prompts)
    ]
    for group in groups:
        for rollout in group.rollouts:
            with torch.no_grad():
                found = logprobs(backend, group, rollout)
            np.testing.assert_allclose(found.numpy(), rollout.logprobs, rtol=0, atol=1e-4)
    report = backend.step(make_updates(1, groups), 1)
    assert report.metrics["is/ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert report.metrics["is/ess"] == pytest.approx(1.0, abs=1e-6)
    assert report.metrics["kl/behaviour"] == pytest.approx(0.0, abs=1e-5)


def test_the_learning_rate_rises_from_the_first_step_on(model_dir: Path) -> None:
    backend = make_backend(model_dir, learning_rate=1e-3, warmup_steps=4)
    rates = []
    for step in range(6):
        backend.step(make_updates(), step)
        rates.append(backend.machine._optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


TARGETS = {name: {"lora": {"rank": 2, "targets": ("q_proj", name)}} for name in ("embed_tokens", "lm_head")}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a device that is not there": ("llama", {"device": "cuda:99"}, r"learner.device = 'cuda:99' cannot be used: .*; use 'cpu'"),
    "a device without a meaning": (
        "llama",
        {"device": "nonsense"},
        r"learner.device = 'nonsense' cannot be used: .*; use 'cpu'",
    ),
    "a directory without a model": ("", {}, "is no Hugging Face causal language model"),
    "an adapter of no layer": (
        "llama",
        {"lora": {"rank": 2, "targets": ("nowhere",)}},
        r"\['nowhere'\].*Layers here: .*q_proj",
    ),
    "one of the embeddings": ("llama", TARGETS["embed_tokens"], "has the input embeddings, and adapters are for linear layers"),
    "one of a tied weight": (
        "llama-tied",
        TARGETS["lm_head"],
        r"lm_head\.weight and model\.embed_tokens\.weight are one tensor, .*leave it out",
    ),
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("name", "settings", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path: Path, name: str, settings: dict[str, Any], says: str) -> None:
    if name:
        make_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=says):
        make_backend(tmp_path, **settings)


RATES = {
    "constant": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    "linear": [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2],
    "cosine": [0.5, 1.0, 1.0, 0.2 + 0.8 * (1 + 2**-0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2, 0.2, 0.2],
}


@pytest.mark.parametrize("schedule", RATES)
def test_it_rises_over_the_warm_up_and_falls_to_the_final_one(schedule: str) -> None:
    config = LearnerConfig(
        learning_rate=1.0,
        warmup_steps=2,
        schedule=schedule,  # type: ignore[arg-type]
        schedule_steps=6,
        final_learning_rate=0.2,
    )
    assert [learning_rate(config, step) for step in range(8)] == pytest.approx(RATES[schedule])


def test_the_critics_follows_the_same_curve_from_its_own_peak() -> None:
    config = LearnerConfig(learning_rate=1e-4, schedule="linear", schedule_steps=4, final_learning_rate=1e-5)
    config = config.model_copy(update={"critic": CriticConfig(kind="head", learning_rate=1e-2)})
    for step in range(6):
        assert learning_rate(config, step, 1e-2) == pytest.approx(100 * learning_rate(config, step))
