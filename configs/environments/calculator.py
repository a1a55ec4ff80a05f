"""A model that cannot multiply is given a calculator: it writes `<12 * 34>` as a turn and reads the product."""

from __future__ import annotations

import re
from collections.abc import Generator

from async_rlhf import Score, environment


@environment(max_turns=3)
def calculator(prompt: str, answer: str, answers: bool = True) -> Generator[str | Score, str, None]:
    """answers: False for a tool that says nothing, by which it is seen whether the tool is what helps."""
    one, other = re.findall(r"\d+", prompt)[:2]
    text, calls = (yield f"{one} * {other} =\n"), 0
    while call := re.fullmatch(r"<(\d{1,6}) \* (\d{1,6})>", text):
        calls += 1
        text = yield f"{int(call[1]) * int(call[2])}\n" if answers else "\n"
    yield Score(float(text == answer), metrics={"calls": calls})
