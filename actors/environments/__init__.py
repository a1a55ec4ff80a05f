"""Environments: a user's code for episodes of several turns, and the processes that run it.

An environment is a generator. It yields what the model reads and gets back what the model wrote:

    @environment(max_turns=4, timeout_s=20)
    async def calculator(question, answer):
        text = yield question                                   # the prompt
        while found := re.search(r"<calc>(.+?)</calc>", text):
            text = yield await compute(found[1])                # an observation: read by the model, never trained on
        yield Score(float(text.strip().endswith(answer)))       # the end; `return` leaves the judgement to rewards

Its parameters are columns of the row, `prompt` and `seed`. A yield is text, a list of chat messages, `Feedback` (either with a
score for the turn just made) or `Score`. What it raises, and a step that hangs or ends its process, is failed(reason), never 0.
Its state is local variables, its cleanup `finally`. Successive steps of a plain `def` may run in different threads.
"""

from async_rlhf.actors.environments.config import EnvironmentConfig
from async_rlhf.actors.environments.loading import ADAPTERS, FIELDS, EnvironmentSpec, load, resolve
from async_rlhf.actors.environments.settings import (
    Call,
    Content,
    EnvironmentFunction,
    EnvironmentSettings,
    Feedback,
    Message,
    Reply,
    environment,
    settings_of,
)
from async_rlhf.actors.rewards import spec_of

__all__ = [
    "ADAPTERS",
    "FIELDS",
    "Call",
    "Content",
    "EnvironmentConfig",
    "EnvironmentFunction",
    "EnvironmentSettings",
    "EnvironmentSpec",
    "Feedback",
    "Message",
    "Reply",
    "environment",
    "load",
    "resolve",
    "settings_of",
    "spec_of",
]
