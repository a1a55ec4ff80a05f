"""A teacher behind a server that gives the log-probabilities of a prompt's tokens, as vLLM does (`/v1/completions` with
`prompt_logprobs`). No torch.

The server is sent token ids: it must have the policy's tokenizer, which shows only where it says its tokens' texts. It gives
probabilities at temperature 1 over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rlhf.actors.rewards import endpoint
from async_rlhf.actors.rewards.answer import shown
from async_rlhf.buffers.record import MAX_LOGPROB, Float32Array

if TYPE_CHECKING:
    from async_rlhf.actors.scoring.incremental import TextSample

# One token takes about 100 bytes of JSON.
_MAX_BYTES = 64 << 20


def logprobs(path: str, samples: Sequence[TextSample], api_key_env: str) -> list[Float32Array]:
    """float32 [T] of each completion behind its prompt, in one request; the caller limits its time.

    path: the URL up to and without `/completions`, and behind a `#` which of its models. Raises TransientError for what may
    pass, ValueError for every other answer without a number for each token.
    """
    texts = [[*sample.prompt, *sample.completion] for sample in samples]
    url, answer = _ask(path, texts, api_key_env)
    try:
        choices = {choice["index"]: choice["prompt_logprobs"] for choice in answer["choices"]}
        found = [_read(choices[at], text)[-len(samples[at].completion) :] for at, text in enumerate(texts)]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{url} gave no prompt_logprobs of each token it was sent: {shown(answer)}") from error
    if bad := [value for own in found for value in own.tolist() if not -np.inf < value <= MAX_LOGPROB]:
        raise ValueError(f"{url} gave a log-probability of {bad[0]}; it must be finite and at most 0")
    return found


def other_texts(path: str, texts: Mapping[int, str], api_key_env: str) -> list[tuple[int, str]]:
    """The ids of which the server says another text than `texts`, and what it says. Raises as `logprobs`.

    What is not compared: white space around a text, a part of a character, and what a server says no text of.
    """
    ids = [*texts]
    _, answer = _ask(path, [ids], api_key_env, endpoint.ANSWERS_S)
    try:
        told = answer["choices"][0]["prompt_logprobs"][1:]
        said = [(token, each[str(token)].get("decoded_token")) for token, each in zip(ids[1:], told, strict=True)]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} gave no prompt_logprobs of each token it was sent: {shown(answer)}") from error
    whole = [(token, text) for token, text in said if isinstance(text, str) and "\ufffd" not in text + texts[token]]
    return [(token, text) for token, text in whole if text.strip() != texts[token].strip()]


def _ask(path: str, texts: Sequence[Sequence[int]], api_key_env: str, limit_s: float | None = None) -> tuple[str, Any]:
    """The URL, and its answer."""
    address, _, model = path.partition("#")
    url = f"{address.rstrip('/')}/completions"
    request = {"prompt": texts, "max_tokens": 1, "prompt_logprobs": 0, **({"model": model} if model else {})}
    return url, endpoint.post(url, request, api_key_env, _MAX_BYTES, limit_s)


def _read(of_tokens: Sequence[Any], ids: Sequence[int]) -> Float32Array:
    """float32 [tokens but the first]."""
    if len(of_tokens) != len(ids):
        raise IndexError(f"{len(of_tokens)} for {len(ids)} tokens")
    return np.array([each[str(token)]["logprob"] for each, token in zip(of_tokens[1:], ids[1:], strict=True)], np.float32)
