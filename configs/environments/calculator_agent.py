"""The calculator as an agent plays it: a loop around OpenAI's SDK, whose model is the policy (`pip install openai`)."""

from __future__ import annotations

import re
from typing import Any

import openai

from async_rlhf import Score, environment

# Its connections are shared by all episodes of the process.
CLIENT = openai.AsyncOpenAI(api_key="that of each episode")


@environment(max_turns=3)
async def solve(prompt: str, answer: str, llm: Any) -> Score:
    client = CLIENT.with_options(base_url=llm.base_url, api_key=llm.api_key)
    one, other = re.findall(r"\d+", prompt)[:2]
    said: list[Any] = [{"role": "user", "content": f"{one} * {other} =\n"}]
    products = 0
    while True:
        completion = await client.chat.completions.create(model=llm.model, messages=said)
        text = completion.choices[0].message.content or ""
        if not (call := re.fullmatch(r"<(\d{1,6}) \* (\d{1,6})>", text)):
            return Score(float(text == answer), metrics={"products": products})
        products += 1
        said += [{"role": "assistant", "content": text}, {"role": "user", "content": f"{int(call[1]) * int(call[2])}\n"}]
