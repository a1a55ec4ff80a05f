"""The tiny speller before it knows anything: a character tokenizer and a Llama of 0.9 million random weights.

Knows nothing about demonstrations or training. Called by `make_model` and by tests.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

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
