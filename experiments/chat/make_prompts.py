"""Makes the prompts of the chat run: every form of question with every topic, as chat messages, shuffled.

python -m async_rlhf.experiments.chat.make_prompts FILE.jsonl
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

FORMS = (
    "In one sentence, what is {topic} like?",
    "Write one or two sentences about {topic}.",
    "A friend asks you about {topic}. What do you say, briefly?",
    "Describe {topic} in a sentence.",
    "What should people know about {topic}? Answer in one sentence.",
)
TOPICS = (
    "a rainy Monday", "the dentist", "learning to cook", "a long train ride", "the first snow", "an old bicycle",
    "a crowded market", "doing the laundry", "a lost umbrella", "the night shift", "a broken window", "spring cleaning",
    "a neighbour's dog", "the city library", "a traffic jam", "cold coffee", "a school play", "the tax office",
    "a camping trip", "moving house", "the local bakery", "a power cut", "an empty fridge", "a chess club",
    "the morning news", "a garden in winter", "a bus driver", "the supermarket on Saturday", "a flat tyre", "an exam",
    "growing tomatoes", "a museum on a Sunday", "the flu", "a job interview", "a borrowed book", "the sea in autumn",
    "a noisy office", "a birthday party", "waiting in line", "a mountain hut", "an alarm clock", "a piano lesson",
    "the harbour at night", "a used car", "fixing a shirt", "a football match", "the last day of a holiday", "a cat",
    "an early flight", "a village fair", "a wet tent", "the family kitchen", "a fire drill", "a quiet park",
    "a software update", "a letter from the bank", "a walk in fog", "the swimming pool", "an apple tree", "a new haircut",
)  # fmt: skip


def rows(seed: int = 0) -> list[dict[str, list[dict[str, str]]]]:
    """All prompts, in an order that depends on nothing but `seed`."""
    made = [{"prompt": [{"role": "user", "content": form.format(topic=topic)}]} for form in FORMS for topic in TOPICS]
    random.Random(seed).shuffle(made)
    return made


def main(path: Annotated[Path, typer.Argument(help="JSONL file to write.")]) -> None:
    """Write the prompts, one object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))


if __name__ == "__main__":
    typer.run(main)
