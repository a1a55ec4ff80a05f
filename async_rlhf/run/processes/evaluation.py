"""One evaluation: a model directory, the prompts, the rewards; its result is a line in `evaluations.jsonl`.

A process of its own makes it beside a run (`evaluator`); alone the calling one (`evaluate_alone`). Each line has a `label`,
which is `start`, `step`, `end` or `alone`, and the `step` whose weights were evaluated: the number of steps they had been
trained for. An evaluation that could not be made has a line with `missing`, the reason.
"""

from __future__ import annotations

import gc
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rlhf.actors.data.config import HELD_OUT_SEED
from async_rlhf.actors.data.rows import load_rows
from async_rlhf.actors.prompts import Row, Template
from async_rlhf.buffers.lines import LineFile
from async_rlhf.buffers.model_directory import from_pretrained
from async_rlhf.buffers.sampling import GREEDY
from async_rlhf.launch.heap import keep_freed_memory
from async_rlhf.run.checks.model import longest_prompt
from async_rlhf.run.checks.preflight import Prepared
from async_rlhf.run.config import Config
from async_rlhf.run.run_data import RunData, keep_images
from async_rlhf.run.run_dir import RunDir
from async_rlhf.run.scoring import environment_specs, group_rewards, reward_specs, score_names, solved_by

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from async_rlhf.actors.loop.context import Environments
    from async_rlhf.buffers.images.processor import ImageProcessor

_log = logging.getLogger(__name__)


def run_evaluation(
    run: RunDir,
    config: Config,
    model: str,
    label: str,
    step: str,
    *,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Evaluate the weights in a model directory; a line in `evaluations.jsonl`. progress: as for `evaluate`."""
    import_models()
    from transformers import AutoTokenizer

    from async_rlhf.actors.engine import RolloutKey, load_engine
    from async_rlhf.actors.loop.context import RunContext
    from async_rlhf.actors.loop.evaluation import Judging, evaluate
    from async_rlhf.actors.scoring.pool import ScoringPool

    rows, template = evaluated_rows(run, config)
    tokenizer = from_pretrained(AutoTokenizer, Path(model))
    asked = config.evaluation
    data = RunData(run.path, config.data)
    images = data.image_processor(model)
    scoring = ScoringPool[RolloutKey](
        reward_specs(config), config.scoring, by_source=config.rewards.by_source, images=data.images.directory
    )
    engine = load_engine(model, config.served_engine.plain, version=int(step), images=images)
    try:
        with environments_of(config, tokenizer, images=images) as environments:
            sampling = config.generation.sampling
            sampled = sampling.model_copy(update={"temperature": 1.0})
            judging = Judging(
                composition=config.rewards.composition,
                judged=[sampling] * config.generation.group_size if group_rewards(config) else (GREEDY,),
                sampled=[sampled] * asked.samples,
                solved_by=solved_by(config, score_names(config, environments.all)),
                solved_at=asked.solved_at,
            )
            context = RunContext(
                HELD_OUT_SEED, rows, config.generation, tokenizer, template, environments=environments, images=images
            )
            result = evaluate(engine, scoring, context, judging, progress)
    finally:
        scoring.close()
        engine.close()
    record_evaluation(run, {"label": label, "step": int(step), "time": time.time(), "model": model, **result})


@contextmanager
def environments_of(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    wake: Callable[[], None] = lambda: None,
    images: ImageProcessor | None = None,
) -> Iterator[Environments]:
    """The environments in a process that plays episodes. Their own processes run until the end of the block. wake: called from
    another thread when one has answered. images: prepares those of the run, where it has some."""
    from async_rlhf.actors.engine import RolloutKey
    from async_rlhf.actors.environments.pool import EpisodePool
    from async_rlhf.actors.environments.rendering import Renderer
    from async_rlhf.actors.environments.worker import NO_IMAGES, EpisodeImages
    from async_rlhf.actors.loop.context import Environment, Environments

    seen = NO_IMAGES if images is None else EpisodeImages.of(images.store.directory, config.data.images)
    with ExitStack() as stack:
        environments = dict[str, Environment]()
        for source, spec in environment_specs(config).items():
            section = config.environment.all[source]
            pool = EpisodePool[RolloutKey](spec, section, wake, images=seen)
            stack.callback(pool.close)
            environments[source] = Environment(
                spec,
                pool,
                Renderer(tokenizer, config.data.chat, section.render, spec.tools, config.data.chat_template_kwargs, images),
                max_prompt_length=longest_prompt(config)[0],
                max_length=config.generation.longest_completion,
            )
        yield Environments(environments.pop("", None), environments)


def evaluated_rows(run: RunDir, config: Config) -> tuple[list[Row], Template]:
    """The prompts of an evaluation, whose images the run then has, and their template. Raises ConfigError, DamagedError."""
    own = config.evaluation.data(config.data)
    if own is None:
        return list(RunData(run.path, config.data).rows[1]), config.data.row_template
    rows = load_rows(own)[0]
    keep_images(rows, RunData(run.path, config.data).images)
    return rows, own.row_template


def record_evaluation(run: RunDir, record: dict[str, Any]) -> None:
    """Append a line; one that finds no room is lost and logged."""
    file = LineFile(run.evaluations)
    try:
        file.cut()
        file.write(json.dumps(record))
    except OSError as error:
        _log.warning("the evaluation %s is lost: %s cannot be written: %s", record["label"], run.evaluations, error)
    finally:
        file.close()


def forget_evaluations(run: RunDir, after: int) -> None:
    """Cut off the lines of steps after this: the run goes back to it, and those steps are to be done again."""
    LineFile(run.evaluations).cut(lambda line: not (isinstance(line.get("step"), int) and line["step"] > after))


def evaluate_alone(
    config: Config, prepared: Prepared, evaluating: Callable[[str, int], object] = lambda what, percent: None
) -> dict[str, Any]:
    """The evaluation of a configuration's model without a run, in this process; its run directory is gone afterwards.

    prepared: of the configuration. evaluating: called with the percentage that is done. Raises what an evaluation raises.
    """

    def progress(done: int, of: int) -> None:
        evaluating("the model", 100 * done // of)

    with tempfile.TemporaryDirectory(prefix="async-rlhf-") as folder:
        alone = config.model_copy(update={"output_dir": folder, "name": "evaluation"})
        run = RunDir.create(alone, prepared.rows, prepared.dropped)
        try:
            evaluating("the model", 0)
            run_evaluation(run, alone, config.model, "alone", "0", progress=progress)
            return {key: value for key, value in run.read_evaluations()[0].items() if key != "step"}
        finally:
            run.retire()


def import_models() -> None:
    """For processes that compute. Import transformers' models, without the garbage collector, which would take a fifth of the
    time; it never looks at the million objects that this makes and that stay for good."""
    keep_freed_memory()
    gc.disable()
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  both, for these import the rest

    gc.freeze()
    gc.enable()
