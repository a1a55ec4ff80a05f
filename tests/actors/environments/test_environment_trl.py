"""Environments and tools of TRL: played unchanged, with the messages, tokens and scores that its own loop gives."""

from __future__ import annotations

import asyncio
import importlib.resources
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from async_rlhf.actors.environments import EnvironmentSpec, resolve
from async_rlhf.actors.environments.rendering import Renderer
from async_rlhf.actors.environments.tool_calls import read_turn
from async_rlhf.actors.environments.yields import EpisodeEnd
from async_rlhf.buffers.errors import ConfigError
from async_rlhf.buffers.score import Score
from async_rlhf.buffers.user_files import import_file
from async_rlhf.inspect.episodes import configuration
from async_rlhf.run.checks.preflight import preflight
from async_rlhf.run.processes.evaluation import environments_of
from tests.actors.environments.played import Bench, call, walk
from tests.actors.environments.test_environment_rendering import SHOWS_TOOLS, tokenizer

SOURCE = '''
class Counter:
    def __init__(self):
        self.count = 100

    def reset(self, answer, **row):
        self.count, self.answer = 0, answer
        return f" Reach {answer}."

    def add(self, by: int) -> str:
        """Adds to the count.

        Args:
            by: how much
        """
        self.count += by
        return f"count {self.count}"

    async def wait(self) -> str:
        """Waits."""
        return "waited"

    def get_reward(self):
        return float(self.count == int(self.answer))

    def _hidden(self): ...


class Silent:
    made = 0

    def __init__(self): Silent.made += 1
    def reset(self, **row): self.moves = []
    def move(self, where: str) -> str:
        """Moves.

        Args:
            where: to
        """
        self.moves.append(where)
        return where

    @staticmethod
    def look() -> str:
        """Looks."""
        return f"environment {Silent.made}"


def moved(prompts, completions, environments, answer, **kwargs):
    assert completions[0][0]["tool_calls"] and prompts[0][-1]["role"] == "user"
    return [float(env.moves == [truth]) for env, truth in zip(environments, answer)]

def wants_state(prompts, trainer_state): ...

def double(a: int) -> int:
    """Doubles.

    Args:
        a: a number
    """
    return 2 * a

def undescribed(a): return a

def made(): return Silent()
def broken(): raise OSError("no licence")

class Resetless:
    def step(self): ...

class Camera:
    def reset(self, images, told=None, **row):
        self.seen = images
        return told if told is not None else [{"type": "image", "image": images[0]}, {"type": "text", "text": "Look."}]

    def crop(self, left: int) -> list:
        """Crops.

        Args:
            left: from where
        """
        part = self.seen[0].crop((left, 0, *self.seen[0].size))
        return [{"type": "image", "image": part}, {"type": "text", "text": f"from {left}"}]

    def shoot(self):
        """Takes a photo."""
        return self.seen[0]

    def sizes(self):
        """Lists sizes."""
        return [each.size for each in self.seen]

    def get_reward(self):
        return 1.0

TOOLS = [double]
BAD_TOOLS = [undescribed]
MANY = {"counter": Counter}
'''


SCRIPT = (
    call("add", by=1) + "\n" + call("wait") + "\n" + call("add", by=2),
    "<think>\nhm\n</think>\n\nlike so: " + call("nothing_of_that_name"),
    call("add", by="x") + call("add", to=3),
    call("wait"),
    "it is done",
)
QUESTION = [{"role": "user", "content": "Count."}]
ROW = {"prompt": QUESTION, "answer": "3"}


def spec_of(folder: Path, name: str, **options: Any) -> EnvironmentSpec:
    return resolve(f"trl:tasks.py:{name}", folder, options)


async def test_an_environment_of_trl_is_played_with_its_tools_and_scored_by_itself(folder: Path) -> None:
    spec = spec_of(folder, "Counter")
    assert (spec.name, spec.kind, spec.required) == ("Counter", "async", ("answer",))
    assert [tool["function"]["name"] for tool in spec.tools] == ["add", "wait"]
    read, score = await walk(spec, *SCRIPT, **ROW)
    assert read[0] == [{"role": "user", "content": "Count. Reach 3."}]
    assert [message["content"] for message in read[1]] == ["count 1", "count 3", "waited"]
    assert read[2] == [
        {"role": "tool", "name": "nothing_of_that_name", "content": str({"error": "Tool nothing_of_that_name not found."})}
    ]
    assert "error" in read[3][0]["content"] and "unexpected keyword argument 'to'" in read[3][1]["content"]
    assert score == Score(1.0, metrics={"tool_calls": 7, "tool_failures": 3, "unparsed_turns": 0})


async def test_its_loop_gives_the_same_messages_and_tokens(folder: Path) -> None:
    """TRL's own `_tool_call_loop`, with a model that writes the script."""
    with warnings.catch_warnings(action="ignore"):  # of versions of vLLM, which is not used here
        pytest.importorskip("trl")
        from trl.chat_template_utils import parse_response, qwen3_template
        from trl.trainer.grpo_trainer import GRPOTrainer

    template = (importlib.resources.files("trl") / "chat_templates" / "qwen3_training.jinja").read_text()
    model = tokenizer(template)
    model.response_template, model.eos_token = qwen3_template, "<|im_end|>"
    turns = [list(model(f"{text}<|im_end|>")["input_ids"]) for text in SCRIPT]

    spec = spec_of(folder, "Counter")
    renderer = Renderer(model, chat=True, tools=spec.tools, render="by_message")
    read, _ = await walk(spec, *SCRIPT, **ROW)
    ids = [*renderer.prompt(read[0]).ids]
    for turn, observed in zip(turns, [*read[1:], []], strict=True):
        ids += turn + (renderer.observation(read[0], observed, turn).ids if observed else [])

    world = import_file(folder / "tasks.py").Counter()
    prompt = [{**QUESTION[0], "content": QUESTION[0]["content"] + world.reset(prompt=QUESTION, answer="3")}]
    tools = [world.add, world.wait]
    shown = model.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False)
    left = iter(turns[1:])
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    trainer = SimpleNamespace(
        max_tool_calling_iterations=99, _sync_tool_dicts=[{"add": world.add}], _async_tool_dicts=[{"wait": world.wait}],
        async_loop=loop, use_vllm=False, vllm_mode="", _is_vlm=False, max_completion_length=10**6, tools=tools,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)), environment_factories=None,
        processing_class=model, _tokenizer=model, chat_template=None, chat_template_kwargs={},
        _generate_single_turn=lambda *arguments, **more: ([next(left)], None),
    )  # fmt: skip
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    first = parse_response(model, turns[0], prefix=shown, tools=tools)
    try:
        _, completions, completion_ids, _, calls, failures, _ = GRPOTrainer._tool_call_loop(
            trainer, [list(prompt)], [shown], [list(turns[0])], [[first]], None, None, {}
        )
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    ours = []
    for text, observed in zip(SCRIPT, [*read[1:], []], strict=True):
        ours += [read_turn(text, spec.tools).message, *observed]
    assert read[0] == prompt and ours == completions[0] and (calls, failures) == (7, 3)
    assert ids == [*shown, *completion_ids[0]]


async def test_what_reset_and_tools_return_may_have_images(folder: Path) -> None:
    photo = Image.new("RGB", (4, 3), "red")
    spec, row = spec_of(folder, "Camera"), {"prompt": QUESTION, "images": [photo]}
    read, score = await walk(spec, call("crop", left=1) + call("shoot") + call("sizes"), "done", **row)
    look = [{"type": "image", "image": photo}, {"type": "text", "text": "Look."}]
    assert read[0] == [{"role": "user", "content": [{"type": "text", "text": "Count."}, *look]}]
    crop, shot, sizes = (message["content"] for message in read[1])
    assert crop[0]["image"].size == (3, 3) and crop[1] == {"type": "text", "text": "from 1"}
    assert shot == [{"type": "image", "image": photo}] and sizes == "[(4, 3)]", "a list of no parts is text, as it was"
    assert score.value == 1.0
    parts = [{"role": "user", "content": [{"type": "image", "image": photo}]}]
    (told,), _ = await walk(spec, "done", **{**row, "prompt": parts, "told": "Look."})
    assert told == [{"role": "user", "content": [*parts[0]["content"], look[1]]}]
    with pytest.raises(TypeError, match="reset returned int; text, or a list of parts of a message was expected"):
        await walk(spec, "done", **{**row, "told": 7})


async def test_a_call_that_cannot_be_parsed_ends_the_episode_and_is_counted(folder: Path) -> None:
    _, score = await walk(
        spec_of(folder, "Counter"), '<tool_call>{"name": "add", "arguments"</tool_call>', prompt=QUESTION, answer="0"
    )
    assert score == Score(1.0, metrics={"tool_calls": 0, "tool_failures": 0, "unparsed_turns": 1})


async def test_a_model_may_write_its_calls_in_another_form(folder: Path) -> None:
    called = {"open": "[call]", "close": "[end]", "repeats": True, "content": "json"}
    fields = {
        "tool_calls": {**called, "transform": {"type": "function", "function": "{content}"}},
        "content": {"close": "[stop]", "content": "text"},
    }
    spec = spec_of(folder, "TOOLS", response_template={"start_anchor": "[model]", "fields": fields})
    read, _ = await walk(spec, 'so: [call]{"name": "double", "arguments": {"a": 21}}[end]', "42", **ROW)
    assert read[1][0]["content"] == "42"


async def test_rewards_beside_it_get_the_environment(folder: Path) -> None:
    spec = spec_of(folder, "Silent", rewards=["moved"])
    assert spec.kind == "sync" and spec.required == ("answer",)
    read, score = await walk(spec, call("move", where="north") + call("look"), "there", prompt="Walk.", answer="north")
    assert [[(message["role"], message["content"]) for message in each] for each in read] == [
        [("user", "Walk.")],
        [("tool", "north"), ("tool", "environment 1")],
    ]
    assert score.value == 1.0


def test_a_function_may_make_the_environments(folder: Path) -> None:
    spec = spec_of(folder, "made")
    assert [tool["function"]["name"] for tool in spec.tools] == ["look", "move"] and not spec.judges


async def test_without_a_reward_of_its_own_it_leaves_the_judgement_to_others(folder: Path) -> None:
    read, score = await walk(spec_of(folder, "TOOLS"), call("double", a=4), "8", **ROW)
    assert read[1] == [{"role": "tool", "name": "double", "content": "8"}]
    assert score == Score(metrics={"tool_calls": 1, "tool_failures": 0, "unparsed_turns": 0})


def test_an_environment_is_used_again_after_its_episode_in_the_processes_of_a_run(folder: Path) -> None:
    target = f"trl:{folder / 'tasks.py'}:Silent"
    with Bench(folder / "tasks.py", "Silent", function=target, options={"rewards": ["moved"]}) as bench:
        for _ in range(2):
            _, read, end = bench.play(call("move", where="4") + call("look"), "there")
            assert read[1]["content"] == "environment 1"
            assert isinstance(end, EpisodeEnd) and end.score is not None and end.score.value == 1.0


def test_a_run_gives_the_template_the_tools_of_its_environment(folder: Path) -> None:
    (folder / "data.jsonl").write_text('{"prompt": "twice 4", "answer": "8"}\n')
    config = configuration(f"trl:{folder / 'tasks.py'}:TOOLS", str(folder / "data.jsonl"), None, {})
    with environments_of(config, tokenizer(SHOWS_TOOLS)) as plays:
        play = plays.default
        assert play is not None and play.name == "TOOLS"
        assert '"name": "double"' in play.rendering.prompt(QUESTION).text
    with pytest.raises(ConfigError, match="'TOOLS' gives no score, and no reward is named"):
        preflight(config)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Resetless", {}, "Resetless, which has no method 'reset'"),
        ("broken", {}, "'broken' raised OSError: no licence"),
        ("BAD_TOOLS", {}, "tool 'undescribed' cannot be described"),
        ("MANY", {}, "is dict; an environment_factory .* name one"),
        ("Counter", {"reward": ["moved"]}, "environment.options.reward: .* 'rewards'"),
        ("Counter", {"rewards": ["move"]}, "^reward .*: no 'move' at the top level .* 'moved'"),
        ("TOOLS", {"response_template": {"feelds": {}}}, "environment.options.response_template: .*'feelds'"),
        ("Counter", {"rewards": ["wants_state"]}, "'wants_state' asks for 'trainer_state'"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_run(folder: Path, name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(folder, name, **options)


def test_a_column_that_reset_asks_for_must_be_there(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'Counter' asks for 'answer'"):
        resolve("trl:tasks.py:Counter", folder).check({"question"})
