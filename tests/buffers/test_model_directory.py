"""Models are loaded one at a time in a process, for transformers replaces functions of its classes while it loads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rlhf.buffers.model_directory import from_pretrained
from tests.learner.making import make_model


def test_models_that_threads_load_at_once_are_whole_and_so_is_the_next_one(tmp_path: Path) -> None:
    saved = make_model("llama-tied")
    saved.save_pretrained(tmp_path)

    def load(_: int) -> PreTrainedModel:
        model: PreTrainedModel = from_pretrained(AutoModelForCausalLM, tmp_path)
        return model

    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(load, range(64)))
    for model in [*loaded, make_model("llama-tied")]:
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for model in loaded:
        for name, tensor in saved.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name
