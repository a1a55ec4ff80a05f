"""The model card of a checkpoint: Markdown from the files of its run, without folders of this machine (`folders`)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from async_rlhf.learner.checkpoint.store import step_of
from async_rlhf.push.folders import without_folders
from async_rlhf.run.config import Config
from async_rlhf.run.config_keys import without_secrets
from async_rlhf.run.live import effective
from async_rlhf.run.manifest import Published, published
from async_rlhf.run.reading import Reading
from async_rlhf.run.run_data import RunData
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.run_files import is_step, read_object
from async_rlhf.run.tables import in_toml

# About the machine and its user, not about the model.
_LEFT_OUT = {"output_dir", "address", "hooks", "launch", "placement", "security", "tracking", "disk_pause_bytes"}
_Z = 1.959964  # of a normal distribution, for 95 %


def card(reading: Reading, checkpoint: Path, name: str, *, is_adapter: bool, has_picture: bool) -> str:
    """README.md of the repository `name`; its picture is plot.png. Raises DamagedError."""
    from huggingface_hub import ModelCardData

    run, step = reading.run, step_of(checkpoint)
    config = effective(run)
    base, data = published(config.model), [published(each.source) for each in config.data.sources or (config.data,)]
    head = ModelCardData(
        base_model=base.name if base.commit else None,
        base_model_relation=("adapter" if is_adapter else "finetune") if base.commit else None,
        datasets=[each.name for each in data if each.commit] or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["async-rlhf", "reinforcement-learning"],
    )
    made = read_object(run.path / "manifest.json")
    began = (
        f"step {made['origin']['step']} of run {Path(made['origin']['run']).name}"
        if made.get("origin")
        else without_folders(config.model)
    )
    changed = "".join(f"- {line}\n" for line in reading.changes_in_words())
    parts = [
        f"---\n{head.to_yaml()}\n---",
        f"# {name.partition('/')[2]}",
        f"Trained for {step} steps of asynchronous reinforcement learning by async-rlhf, from {began}.",
        f'```python\nfrom transformers import pipeline\n\npipeline("text-generation", "{name}")\n```',
        "![Curves of the run](plot.png)" if has_picture else "",
        f"## Training\n\n{_table(('what', 'value'), _facts(run, config, made, data))}",
        f"## Evaluation\n\n{_table(('step', 'prompts', 'accuracy (95 % interval)', 'mean reward'), _evaluations(run, step))}",
        f"## Staleness\n\n{_staleness(reading, config, step)}",
        "## Settings\n\nThose that are not the default, in config.toml; such a run begins by `async-rlhf train config.toml`.",
        f"```toml\n{_settings(config)}```",
        f"Changed while it went on:\n\n{changed}" if changed else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _facts(run: RunDir, config: Config, made: Mapping[str, Any], data: Sequence[Published]) -> Iterator[tuple[str, object]]:
    yield "data", "; ".join(without_folders([str(each) for each in data]))
    if counts := read_object(run.path / "data" / "summary.json"):
        yield "prompts", f"{counts.get('training')} to train on, {counts.get('held_out')} held out"
        yield "digest of the rows", RunData(run.path, config.data).digest
    judges = [*config.rewards.functions, *(each.function for each in config.environment.all.values())]
    yield "rewards", ", ".join(without_folders(judges))
    if weights := config.rewards.weights:
        yield "weights of rewards", json.dumps(weights)
    yield "loss, advantage", ", ".join(without_folders([config.loss.kind, config.advantage.kind]))
    yield "batch", f"{config.learner.batch_size} completions in groups of {config.generation.group_size}"
    yield "seed", config.seed
    if (bits := run.bits()) is not None:
        yield "bits of completions", f"not promised: {bits.obstacle}" if bits.obstacle else "the same, made again or not"
    for what, code in (("versions", made), *((f"versions since {each['since']}", each) for each in made.get("later", ()))):
        packages = [f"{package} {version}" for package, version in code.get("packages", {}).items()]
        where = [f"processor {code['processor']}"] if "processor" in code else []
        yield what, ", ".join([*packages, f"Python {code.get('python')}", *where, f"sources {code.get('sources')}"])


def _evaluations(run: RunDir, step: int) -> Iterator[tuple[object, ...]]:
    for line in run.read_evaluations():
        if is_step(line) and line["step"] <= step and (count := line.get("num_prompts")):
            yield line["step"], count, _interval(line.get("accuracy"), count), line.get("mean_reward")


def _interval(share: float | None, count: int) -> str:
    """A share of `count` with its score interval (Wilson 1927, doi 10.2307/2276774)."""
    if share is None:
        return "-"
    scale = 1 + _Z**2 / count
    centre = (share + _Z**2 / (2 * count)) / scale
    half = _Z * math.sqrt(share * (1 - share) / count + (_Z / (2 * count)) ** 2) / scale
    return f"{share:.3f} ({max(0.0, centre - half):.3f} to {min(1.0, centre + half):.3f})"


def _staleness(reading: Reading, config: Config, step: int) -> str:
    """The staleness that the learner certified at each step, right before its gradient."""
    lines = {line["step"]: line for line in filter(is_step, reading.steps.whole()) if line["step"] <= step}
    ages = Counter[int]()
    for line in lines.values():
        ages.update({int(age): tokens for age, tokens in line.get("staleness/histogram", {}).items()})
    oldest, over = max(ages, default=0), sum(line.get("staleness/violations", 0) for line in lines.values())
    shares = [(age, f"{tokens:,}", f"{tokens / ages.total():.1%}") for age, tokens in sorted(ages.items())]
    summary = (
        f"Bound: {config.queue.max_staleness} learner steps. Oldest token trained on: {oldest}. Tokens over the bound: {over}."
    )
    return f"{summary}\n\n{_table(('age in steps', 'tokens', 'share'), shares)}"


def _settings(config: Config) -> str:
    values = config.model_dump(mode="json", exclude_defaults=True, exclude=_LEFT_OUT)
    return tomli_w.dumps(in_toml(without_folders(without_secrets(values))))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    shown = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *shown))
