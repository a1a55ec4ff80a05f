"""Trains a reward model from preference pairs and measures how good it is.

    python -m async_rlhf.experiments.reward_model.train --out DIR [--pairs FILE] [--model DIR]

Without `--pairs` it makes pairs from the tiny speller's gold reward. Loss: -log sigmoid(r(chosen) - r(rejected)) (Bradley and
Terry 1952; Ouyang et al. 2022, equation 1), plus a small pull of r(chosen) + r(rejected) to zero (Eisenstein et al. 2023,
arXiv 2312.09244, equation 8), which fixes what the first leaves open. Seeded: the same machine gives the same weights.
The directory is a Hugging Face model; the reward `reward_model` takes it as its `path`.

Pairs are JSONL, one object a line with the texts `prompt`, `chosen` and `rejected`; those of one prompt stay on one side of the
split.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import torch
import typer
from pydantic import TypeAdapter, ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from async_rlhf.buffers.errors import ConfigError
from async_rlhf.experiments.throughput.judges import similarity
from async_rlhf.experiments.warm_start.make_model import WarmStart, descend
from async_rlhf.experiments.warm_start.speller import HABITS, INSTRUCTION, load_words

_BINS = 10
BASE = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-speller"


@dataclass(frozen=True)
class Pair:
    """Two completions of `prompt`, of which `chosen` was preferred."""

    prompt: str
    chosen: str
    rejected: str


_PAIR = TypeAdapter(Pair)


def read_pairs(path: Path) -> list[Pair]:
    """Raises ConfigError naming the line that holds no pair."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"pairs {str(path)!r} cannot be read: {error}") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        try:
            pairs.append(_PAIR.validate_json(line))
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise ConfigError(
                f"{path}, line {number}: no object with the texts 'prompt', 'chosen' and 'rejected': {reason}"
            ) from error
    if not pairs:
        raise ConfigError(f"pairs {str(path)!r} holds none")
    return pairs


def split(pairs: Sequence[Pair], held_out: float, random: Random) -> tuple[list[Pair], list[Pair]]:
    """(training pairs, held-out pairs): about this share of the prompts is held out, with all their pairs."""
    prompts = sorted({pair.prompt for pair in pairs})
    random.shuffle(prompts)
    kept = set(prompts[: max(1, round(held_out * len(prompts)))])
    training = [pair for pair in pairs if pair.prompt not in kept]
    if not training:
        raise ConfigError(f"{len(prompts)} prompts leave none to train on when {held_out:.0%} are held out")
    return training, [pair for pair in pairs if pair.prompt in kept]


def gold_reward(prompt: str, completion: str) -> float:
    """The known reward of the tiny speller's task: share of the reversed word's letters that stand in their place."""
    return similarity(completion, prompt.removeprefix(INSTRUCTION)[::-1])


def gold_pairs(count: int, random: Random, sharpness: float = 6.0) -> list[Pair]:
    """Pairs whose preference is drawn from the gold reward: P(a before b) = sigmoid(sharpness (gold(a) - gold(b))).

    The model of Bradley and Terry (1952): a reward model that learned it is calibrated against these pairs.
    """
    words, _ = load_words(4 * count)
    habits = [write for _, write in HABITS.values()]
    pairs: list[Pair] = []
    while len(pairs) < count:
        word = random.choice(words)
        first, second = (write(word, random) for write in random.sample(habits, 2))
        if first == second:
            continue
        prompt = INSTRUCTION + word
        margin = sharpness * (gold_reward(prompt, first) - gold_reward(prompt, second))
        is_first = random.random() < 1 / (1 + math.exp(-margin))
        pairs.append(Pair(prompt, *((first, second) if is_first else (second, first))))
    return pairs


@dataclass(frozen=True)
class Training:
    """Everything that decides the weights."""

    seed: int = 0
    epochs: int = 2
    batch: int = 64
    """Pairs per update."""
    learning_rate: float = 5e-4
    """Highest; rises over the first tenth of the updates, then falls to zero along a cosine."""
    centre: float = 0.01
    """Weight of the pull to zero."""
    weight_decay: float = 0.01
    held_out: float = 0.1
    """Share of the prompts that are only measured on."""
    threads: int = 1
    saved: Literal["float32", "bfloat16"] = "float32"
    """The type that the weights are rounded to before they are measured and saved."""


@dataclass(frozen=True)
class Quality:
    """accuracy: share of pairs in their order (a tie counts half). loss: mean negative log-likelihood, nats a pair.

    calibration_error: expected calibration error (Guo et al. 2017, equation 3) of the more likely side, in ten bins.
    """

    accuracy: float
    loss: float
    calibration_error: float
    num_pairs: int


def quality(margins: Sequence[float]) -> Quality:
    """margins: the model's score of the chosen minus that of the rejected, for each pair; at least one."""
    sure = [1 / (1 + math.exp(-min(abs(margin), 700.0))) for margin in margins]
    right = [1.0 if margin > 0 else 0.5 if margin == 0 else 0.0 for margin in margins]
    places: dict[int, list[int]] = {}
    for i, probability in enumerate(sure):
        places.setdefault(min(_BINS - 1, int((probability - 0.5) * 2 * _BINS)), []).append(i)
    return Quality(
        accuracy=sum(right) / len(right),
        loss=sum(max(-m, 0.0) + math.log1p(math.exp(-abs(m))) for m in margins) / len(margins),
        calibration_error=sum(abs(sum(sure[i] - right[i] for i in own)) for own in places.values()) / len(margins),
        num_pairs=len(margins),
    )


@dataclass(frozen=True)
class TrainedReward:
    """before, after: on the held-out pairs. gold: share of held-out pairs in the gold reward's order, where there is one."""

    before: Quality
    after: Quality
    gold: float | None
    num_training: int


def train(
    pairs: Sequence[Pair],
    out: Path,
    config: Training | None = None,
    base: Path = BASE,
    gold: Callable[[str, str], float] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> TrainedReward:
    """Train on `pairs` from the weights in `base`, save to `out` (made), measure on what was held out."""
    config = config or Training()
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    random = Random(config.seed)
    training, held_out = split(pairs, config.held_out, random)
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=1, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    before = quality(margins(model, tokenizer, held_out))
    batches = _batches(training, config, random)

    def loss_of(update: int) -> torch.Tensor:
        chosen, rejected = scores(model, tokenizer, batches[update]).chunk(2)
        pull = config.centre * (chosen + rejected).square().mean()
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean() + pull

    rate, decay, warmup = config.learning_rate, config.weight_decay, max(1, len(batches) // 10)
    schedule = WarmStart(updates=len(batches), learning_rate=rate, warmup=warmup, weight_decay=decay)
    for done, loss in descend(model, schedule, loss_of, betas=(0.9, 0.999)):
        if done % 20 == 0 or done == len(batches):
            tell(f"update {done} of {len(batches)}: loss {loss:.4f}")
    saved = getattr(torch, config.saved)
    after = margins(model.to(saved).float(), tokenizer, held_out)
    model.to(saved).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return TrainedReward(before, quality(after), _agreement(held_out, after, gold), len(training))


def scores(model: Any, tokenizer: Any, pairs: Sequence[Pair]) -> torch.Tensor:
    """float32 [2 P]: the scores of all chosen, then of all rejected completions behind their prompts."""
    texts = [pair.prompt + pair.chosen for pair in pairs] + [pair.prompt + pair.rejected for pair in pairs]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    found: torch.Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].float()
    return found


@torch.inference_mode()
def margins(model: Any, tokenizer: Any, pairs: Sequence[Pair]) -> list[float]:
    """Score of the chosen minus that of the rejected, for each pair."""
    model.eval()
    found: list[float] = []
    for start in range(0, len(pairs), 128):
        chosen, rejected = scores(model, tokenizer, pairs[start : start + 128]).chunk(2)
        found += (chosen - rejected).tolist()
    return found


def _batches(pairs: Sequence[Pair], config: Training, random: Random) -> list[list[Pair]]:
    batches = []
    for _ in range(config.epochs):
        order = random.sample(list(pairs), len(pairs))
        batches += [order[start : start + config.batch] for start in range(0, len(order), config.batch)]
    return batches


def _agreement(pairs: Sequence[Pair], found: Sequence[float], gold: Callable[[str, str], float] | None) -> float | None:
    """The share of the pairs that the gold reward tells apart which the model puts in the gold's order."""
    if gold is None:
        return None
    true = [gold(pair.prompt, pair.chosen) - gold(pair.prompt, pair.rejected) for pair in pairs]
    right = [(margin > 0) == (truth > 0) for margin, truth in zip(found, true, strict=True) if truth != 0]
    return sum(right) / len(right) if right else None


def main(
    out: Annotated[Path, typer.Option(help="Directory for the model, made.")],
    pairs: Annotated[Path | None, typer.Option(help="JSONL of prompt, chosen, rejected.")] = None,
    model: Annotated[Path, typer.Option(help="Directory of the model to begin with.")] = BASE,
    count: Annotated[int, typer.Option(min=2, help="Pairs to make where no file is given.")] = 4000,
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    seed: Annotated[int, typer.Option()] = 0,
    half: Annotated[bool, typer.Option(help="Save in bfloat16: half the size.")] = False,
) -> None:
    """Train a reward model; its quality is printed and written beside it as `quality.json`."""
    given = read_pairs(pairs) if pairs is not None else gold_pairs(count, Random(seed))
    gold = gold_reward if pairs is None else None
    config = Training(seed=seed, epochs=epochs, saved="bfloat16" if half else "float32")
    trained = train(given, out, config, model, gold, lambda line: typer.echo(line, err=True))
    (out / "quality.json").write_text(json.dumps(asdict(trained), indent=1) + "\n")
    for name, measured in (("before", trained.before), ("after", trained.after)):
        typer.echo(
            f"{name:<6} accuracy {measured.accuracy:.3f}, loss {measured.loss:.3f} nats, "
            f"calibration error {measured.calibration_error:.3f} ({measured.num_pairs} held-out pairs)"
        )
    if trained.gold is not None:
        typer.echo(f"in the gold reward's order: {trained.gold:.3f}")


if __name__ == "__main__":
    typer.run(main)
