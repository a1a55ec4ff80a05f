"""A language model that judges, behind an OpenAI-compatible HTTP interface (`/chat/completions`).

Answers that may be otherwise next time (408, 409, 425, 429, 5xx, a broken connection) are tried again, after as long as
the server demands; every other answer without a score is a failure that quotes it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import httpx2

from async_rlhf.actors.rewards.answer import as_text, shown
from async_rlhf.actors.rewards.settings import TransientError, reward
from async_rlhf.buffers.score import Score

TEMPLATE = """Judge the answer to a task.

Task:
{prompt}

Answer:
{completion}

Say in one sentence what is good and bad about the answer. Then write, alone on the last line, a score from 0 to 10."""
_MAY_PASS = {408, 409, 425, 429}
_MAX_BYTES = 1 << 20
_LONGEST_WAIT_S = 300.0


@reward(retries=4, timeout_s=60.0, max_concurrency=32)
async def judge(
    completion: str,
    prompt: Any,
    url: str,
    model: str,
    template: str = TEMPLATE,
    pattern: str = r"(-?\d+(?:\.\d+)?)\D*$",
    lowest: float = 0.0,
    highest: float = 10.0,
    max_tokens: int = 256,
    api_key_env: str = "",
    **columns: Any,
) -> Score:
    """A judge's score, moved to 0.0 .. 1.0. Metrics: `tokens` (used by the call), `raw` (as the judge gave it).

    url: up to and without `/chat/completions`. template: what the judge reads; `{prompt}`, `{completion}` and every column
    may appear. pattern: its first group is the score; by default the last number. lowest, highest: the judge's scale.
    api_key_env: name of the environment variable that holds the key.
    """
    text = template.format_map({**columns, "prompt": as_text(prompt), "completion": completion})
    request = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
    }
    answer = await _post(f"{url.rstrip('/')}/chat/completions", request, _headers(api_key_env))
    text = _text(answer)
    found = re.search(pattern, text, re.DOTALL)
    if found is None:
        raise ValueError(f"the judge gave no score: {text[-200:]!r}")
    raw = float(found[1])
    if not lowest <= raw <= highest:
        raise ValueError(f"the judge gave {raw:g}, its scale goes from {lowest:g} to {highest:g}")
    return Score((raw - lowest) / (highest - lowest), metrics={"raw": raw, **_usage(answer)})


async def _post(url: str, request: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
    """The JSON of a good answer; raises TransientError or ValueError for any other."""
    try:
        response = await _client().post(url, json=request, headers=dict(headers))
    except (httpx2.TransportError, httpx2.DecodingError) as error:
        raise TransientError(f"{url}: {type(error).__name__}: {error}") from error
    if response.status_code in _MAY_PASS or response.status_code >= 500:
        raise TransientError(f"{url} answered {response.status_code}", after_s=_retry_after_s(response))
    if response.status_code != 200:
        raise ValueError(f"{url} answered {response.status_code}: {response.text[:200]!r}")
    if len(response.content) > _MAX_BYTES:
        raise ValueError(f"{url} answered {len(response.content)} bytes; at most {_MAX_BYTES} are read")
    try:
        return response.json()
    except ValueError as error:
        raise ValueError(f"{url} answered what is no JSON: {response.text[:200]!r}") from error


@functools.cache
def _client() -> httpx2.AsyncClient:
    """One for the process, so that connections are used again; the caller's time-out is the only one."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    here = dict.fromkeys(("all://127.0.0.1", "all://localhost"))  # what HTTP_PROXY names is asked for other machines only
    return httpx2.AsyncClient(timeout=None, limits=limits, mounts=here)


def _headers(api_key_env: str) -> dict[str, str]:
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ValueError(f"the judge's key is not there: environment variable {api_key_env} is empty")
    return {"Authorization": f"Bearer {key}"}


def _retry_after_s(response: httpx2.Response) -> float:
    """Seconds in `Retry-After`; its other form, a date, counts as 0."""
    try:
        return min(_LONGEST_WAIT_S, max(0.0, float(response.headers.get("Retry-After", 0))))
    except ValueError:
        return 0.0


def _text(answer: Any) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"the judge's answer has no choices[0].message.content: {shown(answer)}") from error
    if not isinstance(text, str):
        raise ValueError(f"the judge returned {shown(text)}; text was expected")
    return text


def _usage(answer: Any) -> dict[str, float]:
    usage = answer.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, Mapping) else None
    return {"tokens": float(total)} if isinstance(total, int) else {}
