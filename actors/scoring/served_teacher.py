"""A teacher behind a server that gives the log-probabilities of a prompt's tokens, as vLLM does (`/v1/completions` with
`prompt_logprobs`). No torch.

The server is sent token ids: it must have the policy's tokenizer, which shows only where it says its tokens' texts. It gives
probabilities at temperature 1 over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from async_rlhf.actors.rewards import endpoint
from async_rlhf.actors.rewards.answer import shown
from async_rlhf.buffers.record import MAX_LOGPROB, Float32Array

if TYPE_CHECKING:
    from async_rlhf.actors.scoring.incremental import TextSample

# One token takes about 100 bytes of JSON.
_MAX_BYTES = 64 << 20
Told = TypeVar("Told")


def logprobs(path: str, samples: Sequence[TextSample], api_key_env: str) -> list[Float32Array]:
    """float32 [T] of each completion behind its prompt, in one request; the caller limits its time.

    path: the URL up to and without `/completions`, and behind a `#` which of its models. Raises TransientError for what may
    pass, ValueError for every other answer without a number for each token.
    """
    texts = [[*sample.prompt, *sample.completion] for sample in samples]
    told = _told(path, texts, api_key_env, lambda token: float(token["logprob"]))
    found = [np.array(values[-len(sample.completion) :], np.float32) for values, sample in zip(told, samples, strict=True)]
    if bad := [value for own in found for value in own.tolist() if not -np.inf < value <= MAX_LOGPROB]:
        raise ValueError(f"{path} gave a log-probability of {bad[0]}; it must be finite and at most 0")
    return found


def other_texts(path: str, texts: Mapping[int, str], api_key_env: str) -> list[tuple[int, str]]:
    """The ids of which the server says another text than `texts`, and what it says. Raises as `logprobs`.

    What is not compared: white space around a text, a part of a character, and what a server says no text of.
    """
    ids = [*texts]
    (told,) = _told(path, [ids], api_key_env, lambda token: token.get("decoded_token"), endpoint.ANSWERS_S)
    said = zip(ids[1:], told, strict=True)
    whole = [(token, text) for token, text in said if isinstance(text, str) and "\ufffd" not in text + texts[token]]
    return [(token, text) for token, text in whole if text.strip() != texts[token].strip()]


def _told(
    path: str, texts: Sequence[Sequence[int]], api_key_env: str, read: Callable[[Any], Told], limit_s: float | None = None
) -> list[list[Told]]:
    """The values read from the server's answer for each token of each text but the first. Raises as `logprobs`."""
    address, _, model = path.partition("#")
    url = f"{address.rstrip('/')}/completions"
    request = {"prompt": texts, "max_tokens": 1, "prompt_logprobs": 0, **({"model": model} if model else {})}
    answer = endpoint.post(url, request, api_key_env, _MAX_BYTES, limit_s)
    try:
        choices = {choice["index"]: choice["prompt_logprobs"] for choice in answer["choices"]}
        return [
            [read(each[str(token)]) for each, token in zip(choices[at][1:], ids[1:], strict=True)]
            for at, ids in enumerate(texts)
        ]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{url} gave no prompt_logprobs of each token it was sent: {shown(answer)}") from error
