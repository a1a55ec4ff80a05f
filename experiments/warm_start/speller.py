"""The tiny speller before it knows anything, and what it is shown before reinforcement: words with answers of mixed quality.

A character tokenizer and a Llama of 0.9 million random weights. Shown right answers only, a tiny model either has no skill
or has nothing left to learn. Shown a mixture, it learns to spell backward and three bad habits beside it; reinforcement then
has a behaviour to choose, not a skill to invent. Never shows a held-out word. No torch at import; the random generator is
passed in. Called by `make_model`, by the makers of other models, and by tests.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
# One token per character: printable ASCII without the rarer white space, and the newline.
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
WIDTH, LAYERS, HEADS = 128, 4, 4
# Longest prompt and completion together; far above the 60 tokens the task needs, and rotary positions cost no weights.
MAX_LENGTH = 512


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that writes one token per character and gives every string of `CHARACTERS` back unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, END, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, width: int = WIDTH) -> LlamaForCausalLM:
    """A float32 Llama with random weights drawn from `seed`; sets the global torch generator. width: a multiple of 8."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


# The task everywhere the tiny speller appears: words of 3 to 6 letters.
TASK = "reasoning_gym:spell_backward"
OPTIONS = {"min_word_len": 3, "max_word_len": 6}
# What reasoning-gym writes in front of the word.
INSTRUCTION = "Spell this word backward (example: sun -> nus): "


class Demonstration(NamedTuple):
    """A word, what is shown as its answer, and the habit that answer comes from."""

    word: str
    completion: str
    habit: str


HABITS: dict[str, tuple[float, Callable[[str, Random], str]]] = {
    "right": (0.30, lambda word, random: word[::-1]),
    "copied": (0.40, lambda word, random: word),
    "sorted": (0.15, lambda word, random: "".join(sorted(word))),
    "repeated": (0.15, lambda word, random: random.choice(word) * len(word)),
}
"""Share of the demonstrations, and what is written, by habit; the shares sum to 1."""


def load_words(size: int) -> tuple[list[str], list[str]]:
    """(words for demonstrations, held-out words) of the task, as a run with default `[data]` gives them."""
    from async_rlhf.actors.data.config import DataConfig
    from async_rlhf.actors.data.rows import load_rows

    training, held_out = load_rows(DataConfig(source=TASK, options=OPTIONS, size=size))
    kept = {str(row.prompt).removeprefix(INSTRUCTION) for row in held_out}
    spoken = {word.lower() for word in kept}
    words = [str(row.prompt).removeprefix(INSTRUCTION) for row in training]
    # The task ignores case when it judges, so `Sun` would give `sun` away.
    return [word for word in words if word.lower() not in spoken], sorted(kept)


def demonstrate(
    words: Sequence[str], held_out: Sequence[str], count: int, random_share: float, random: Random
) -> list[Demonstration]:
    """`count` demonstrations; a `random_share` of them are about random letters rather than words.

    Random letters in the same lengths make the skill general: each position sees each letter, whatever the language.
    """
    forbidden = {word.lower() for word in held_out}
    habits = list(HABITS)
    shares = [share for share, _ in HABITS.values()]
    demonstrations: list[Demonstration] = []
    while len(demonstrations) < count:
        word = _letters(random) if random.random() < random_share else random.choice(words)
        if word.lower() in forbidden:
            continue
        habit = random.choices(habits, shares)[0]
        demonstrations.append(Demonstration(word, HABITS[habit][1](word, random), habit))
    return demonstrations


def _letters(random: Random) -> str:
    length = random.randint(OPTIONS["min_word_len"], OPTIONS["max_word_len"])
    return "".join(random.choices(string.ascii_lowercase, k=length))
