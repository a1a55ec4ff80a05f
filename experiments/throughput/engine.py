"""How fast is the built-in engine next to `transformers` generate, and next to vLLM? In turns, on one CPU thread.

Two loads, end tokens disabled so that every length is forced:

- equal: as many sequences as there are slots, of 8 prompt and 32 new tokens, all at once. Nothing to gain from batching.
- mixed: eight requests a slot, new tokens log-normal (median 48, at most 256). `generate` takes them in static batches in
  the same order, each of which runs to its longest.

The model is a tiny Llama with random weights (128 equal sequences, 64 slots for mixed ones): bare overhead. Or any other
(`--model DIRECTORY --dtype bfloat16`, 16 slots), for instance the one that `make train-chat` fetches: a directory, or a
GGUF file, which is converted once.

Others pair the engine that keeps its bits in any batch with the ordinary one, and two calls of an agent: the first token
behind a prefix that the engine holds, and behind one that it computes.

Only requested tokens are counted. `generate` samples without top-k or top-p and returns no log-probabilities; the engines do.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from async_rlhf.actors.engine import Engine, Request, RolloutKey, completed, load_engine
from async_rlhf.actors.engine_config import EngineConfig
from async_rlhf.actors.torch_engine.engine import TorchEngine
from async_rlhf.buffers.sampling import Sampling
from async_rlhf.experiments.throughput.harness import Bench, BenchmarkRow, DType, MissingError, beside, timed
from async_rlhf.learner.model.gguf import model_directory

NUM_PROMPT_TOKENS = 8
# Of the tiny model.
LAYERS, WIDTH = 4, 128
_AS_IS = Sampling()
# Tokens that a call reads behind what the engine holds.
_OBSERVED = 16
# vLLM's processes stop spinning within it.
_SETTLE_S = 1.5


def engine(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare the built-in engine with transformers generate, in useful tokens a second, and with itself: how soon has a call
    that goes on with a conversation its first token?

    The engine lives on between its turns, as it does in an actor; `generate` has nothing that could.
    """
    torch.set_num_threads(1)
    for load in loads_for(bench):
        ours = TorchEngine(make_model(bench.model, bench.dtype), slots=load.batch, max_length=512)
        plain = make_model(bench.model, bench.dtype)
        sides = {"engine": timed(partial(run_engine, ours, load)), "generate": timed(partial(run_generate, plain, load))}
        yield beside(load.title, sides, bench.num_turns(5), "tok/s", sum(load.lengths))
    yield from _invariant(bench)
    for length in bench.size((1024, 4096), (128,)):
        if bench.load in (title := f"continued, {length} tokens and {_OBSERVED} more"):
            model = make_model(bench.model, bench.dtype, 2 * length)
            ours = TorchEngine(model, slots=2, max_length=2 * length)
            sides = {name: partial(_first_token_s, ours, length, name == "held") for name in ("held", "computed")}
            yield beside(title, sides, bench.num_turns(7), "s", at_most=0.1)


def _invariant(bench: Bench) -> Iterator[BenchmarkRow]:
    """The cost of bits that do not depend on the batch: rows of 32 new tokens, and one behind a long prompt."""
    long = bench.size(4096, 128)
    for title, requests in (
        *((f"invariant, {rows} rows", requests_of(_drawn(rows, 8), repeat(32))) for rows in bench.size((8, 64, 128), (8,))),
        (f"invariant, prompt of {long}", requests_of(_drawn(1, long), [1])),
    ):
        if bench.load in title:
            engine_of = partial(
                TorchEngine, make_model(bench.model, bench.dtype, long + 64), slots=len(requests), max_length=long + 64
            )
            sides = {
                name: timed(partial(completed, engine_of(batch_invariant=name == "invariant"), requests))
                for name in ("invariant", "ordinary")
            }
            tokens = sum(len(request.prompt_ids) + request.max_new_tokens for request in requests)
            yield beside(title, sides, bench.num_turns(7), "tok/s", tokens)


def requests_of(prompts: Iterable[Sequence[int]], new: Iterable[int], sampling: Sampling = _AS_IS) -> list[Request]:
    """A request for each prompt, with its number of new tokens and its place as a seed."""
    work = enumerate(zip(prompts, new, strict=False))
    return [Request(RolloutKey(n, 0, 0), tuple(prompt), length, sampling, n) for n, (prompt, length) in work]


def _first_token_s(engine: Engine, length: int, is_held: bool) -> float:
    """Seconds from a request behind so many tokens, and some that were read since, to its first token."""
    key, prompt = RolloutKey(0, 0, 0), (*np.random.default_rng(2).integers(1, 100, length - 1).tolist(),)
    first = Request(key, prompt, 1, Sampling(), 0, hold=is_held)
    (wrote,) = completed(engine, [first]).values()
    following = replace(first, context=(*wrote.token_ids.tolist(), *range(1, _OBSERVED + 1)), hold=False)
    return timed(partial(completed, engine, [following]))()


def vllm_side(bench: Bench) -> Iterator[BenchmarkRow]:
    """Compare the built-in engine with vLLM on a CPU, in useful tokens a second.

    Both are given the same requests with seeds and return log-probabilities. vLLM decodes in two processes of its own, each of
    which spins while it waits for the other; the built-in engine has this process only.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingError("vLLM is not installed (make test installs its CPU build)")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        make_model(bench.model, bench.dtype).save_pretrained(directory)
        for load in loads_for(bench):
            with ExitStack() as stack:
                sides = {}
                for name, own in (("engine", {"batch_invariant": False}), ("vLLM", {"kind": "vllm"})):
                    settings = {"slots": load.batch, "threads": 1, "dtype": bench.dtype, **own}
                    started = load_engine(directory, EngineConfig.model_validate(settings), version=0)
                    side = timed(partial(run_engine, stack.enter_context(closing(started)), load))
                    sides[name] = partial(_settled, side)
                yield beside(load.title, sides, bench.num_turns(3), "tok/s", sum(load.lengths))


def _settled(side: Callable[[], float]) -> float:
    time.sleep(_SETTLE_S)
    return side()


@dataclass(frozen=True)
class EngineLoad:
    """A list of requests (their numbers of new tokens), and how many are decoded together. title: in a row."""

    title: str
    lengths: tuple[int, ...]
    batch: int

    @property
    def prompts(self) -> list[list[int]]:
        return _drawn(len(self.lengths), NUM_PROMPT_TOKENS)


def _drawn(rows: int, length: int) -> list[list[int]]:
    prompts: list[list[int]] = np.random.default_rng(1).integers(1, 100, (rows, length)).tolist()
    return prompts


def loads_for(bench: Bench) -> list[EngineLoad]:
    """Both loads, or those of that name."""
    slots = bench.slots or bench.size(None, 8)
    for_equal, for_mixed = (slots or each for each in ((128, 64) if bench.model is None else (16, 16)))
    lengths = np.random.default_rng(0).lognormal(np.log(48), 0.8, 8 * for_mixed)
    mixed = tuple(np.clip(lengths, 1, 256).astype(int).tolist())
    of_model = f", {bench.model.name} in {bench.dtype}" if bench.model else ""
    loads = [("equal", (32,) * for_equal, for_equal), ("mixed", mixed, for_mixed)]
    return [EngineLoad(f"{name}, {batch} slots{of_model}", new, batch) for name, new, batch in loads if bench.load in name]


def make_model(model: Path | None, dtype: DType, max_length: int = 512) -> PreTrainedModel:
    """That of a directory or GGUF file, or a Llama of 0.87 million random parameters for texts of so many tokens; it never ends
    by itself."""
    if model is not None:
        directory = model_directory(str(model.expanduser()))
        loaded = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), local_files_only=True, trust_remote_code=False
        )
        loaded.config.eos_token_id = loaded.generation_config.eos_token_id = None
        return loaded.eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=max_length, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False).eval()


def run_engine(engine: Engine, load: EngineLoad) -> None:
    ended = completed(engine, requests_of(load.prompts, load.lengths)).values()
    assert sum(len(completion.token_ids) for completion in ended) == sum(load.lengths)


def run_generate(model: PreTrainedModel, load: EngineLoad) -> None:
    prompts = torch.tensor(load.prompts)
    for start in range(0, len(load.lengths), load.batch):
        batch, longest = prompts[start : start + load.batch], max(load.lengths[start : start + load.batch])
        mask = torch.ones_like(batch)
        out = model.generate(batch, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=longest)
        assert out.shape == (len(batch), NUM_PROMPT_TOKENS + longest)
