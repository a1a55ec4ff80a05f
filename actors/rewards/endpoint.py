"""Shared by rewards and teachers behind an OpenAI-compatible HTTP interface: a request, its key, and which errors may pass.

The caller limits the time of a request.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2

from async_rlhf.actors.rewards.settings import TransientError
from async_rlhf.buffers.parsing import json_value

_MAY_PASS = {408, 409, 425, 429}
_LONGEST_WAIT_S, ANSWERS_S = 300.0, 10.0
# What HTTP_PROXY names is asked for other machines only.
_HERE: dict[str, None] = dict.fromkeys(("all://127.0.0.1", "all://localhost"))
_BROKEN = (httpx2.TransportError, httpx2.DecodingError)


async def posted(url: str, request: Mapping[str, Any], api_key_env: str, max_bytes: int) -> Any:
    """The JSON of a good answer; raises TransientError or ValueError for any other. api_key_env: the environment variable with
    the key; "": none is sent."""
    body = bytearray()
    try:
        async with _async_client().stream("POST", url, json=request, headers=_headers(api_key_env)) as response:
            async for part in response.aiter_bytes():
                _add(body, part, url, max_bytes)
    except _BROKEN as error:
        raise _lost(url, error) from error
    return _content(url, response, bytes(body))


def post(url: str, request: Mapping[str, Any], api_key_env: str, max_bytes: int, limit_s: float | None = None) -> Any:
    """The same, waited for: where the caller cannot limit its time, at most twice `limit_s`."""
    body, began = bytearray(), time.monotonic()
    try:
        with _client().stream("POST", url, json=request, headers=_headers(api_key_env), timeout=limit_s) as response:
            for part in response.iter_bytes():
                _add(body, part, url, max_bytes)
                if limit_s is not None and time.monotonic() - began > limit_s:
                    raise TransientError(f"{url} gave no whole answer within {limit_s:g} s")
    except _BROKEN as error:
        raise _lost(url, error) from error
    return _content(url, response, bytes(body))


def unanswered(setting: str, url: str) -> Iterator[str]:
    """A remark where nothing answers; what is answered does not matter."""
    try:
        with httpx2.Client(timeout=ANSWERS_S, mounts=_HERE) as client:
            client.get(url)
    except (*_BROKEN, httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        why, place = error or type(error).__name__, url.rpartition("@")[2]
        what = f"no server answers there within {ANSWERS_S:g} s ({why})"
        yield f"{setting} = {place!r}: {what}. Start it, or correct the address."


# One of each for the process, so that connections are used again.


@functools.cache
def _async_client() -> httpx2.AsyncClient:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx2.AsyncClient(timeout=None, limits=limits, mounts=_HERE)


@functools.cache
def _client() -> httpx2.Client:
    return httpx2.Client(timeout=None, mounts=_HERE)


def _headers(api_key_env: str) -> dict[str, str]:
    if not api_key_env:
        return {}
    key = os.environ.get(api_key_env)
    if not key:
        raise ValueError(f"the server's key is not there: environment variable {api_key_env} is empty")
    return {"Authorization": f"Bearer {key}"}


def _lost(url: str, error: Exception) -> TransientError:
    return TransientError(f"{url}: {type(error).__name__}: {error}")


def _add(body: bytearray, part: bytes, url: str, max_bytes: int) -> None:
    body += part
    if len(body) > max_bytes:
        raise ValueError(f"{url} answered more than {max_bytes} bytes, which is the most that is read")


def _content(url: str, response: httpx2.Response, body: bytes) -> Any:
    if response.status_code in _MAY_PASS or response.status_code >= 500:
        raise TransientError(f"{url} answered {response.status_code}", after_s=_retry_after_s(response))
    if response.status_code != 200:
        raise ValueError(f"{url} answered {response.status_code}: {body[:200].decode(errors='replace')!r}")
    try:
        return json_value(body)
    except ValueError as error:
        raise ValueError(f"{url} answered what is no JSON: {body[:200].decode(errors='replace')!r}") from error


def _retry_after_s(response: httpx2.Response) -> float:
    """Seconds in `Retry-After`; its other form, a date, counts as 0."""
    try:
        return min(_LONGEST_WAIT_S, max(0.0, float(response.headers.get("Retry-After", 0))))
    except ValueError:
        return 0.0
