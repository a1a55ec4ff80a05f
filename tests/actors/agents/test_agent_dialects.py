"""Each dialect, pure: what it reads, what it refuses, and that its events and its whole answer say the same."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rlhf.actors.agents import chat, messages, responses
from async_rlhf.actors.agents.request import ChatRequest, RequestError, digests
from async_rlhf.actors.agents.response import ChatResponse, Dialect, read_reply
from async_rlhf.actors.data.images import ImageLoader
from async_rlhf.actors.environments.settings import Message, Reply
from async_rlhf.actors.environments.tool_calls import TEMPLATE
from async_rlhf.buffers.images import images_of
from async_rlhf.buffers.images.decoding import decoded, digest_of
from async_rlhf.buffers.images.store import ImageStore
from tests.actors.environments.played import call
from tests.image_models import drawn

DIALECTS = {name: cast(Dialect, each) for name, each in (("chat", chat), ("messages", messages), ("responses", responses))}
PRICE = {"name": "price", "description": "of an item", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": PRICE}
HI = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "responses": {"input": "hi"}}
HI["messages"] = HI["chat"]

# -- the way in

WORDS = ["messages", "input", "role", "content", "type", "text", "tools", "function", "name", "user", "assistant", "tool"]
WORDS += ["tool_calls", "tool_result", "function_call", "message", "reasoning", "stop", "system", "tool_choice", "arguments"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=2), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize("name", DIALECTS)
@given(st.dictionaries(st.sampled_from(WORDS), JSON, max_size=6))
def test_any_json_is_read_as_a_conversation_that_a_template_takes_or_refused(name: str, body: Any) -> None:
    try:
        request = DIALECTS[name].read(body)
    except RequestError as error:
        assert error.status == 400 and str(error)
        return
    assert request.messages and request.messages[-1]["role"] != "assistant"
    assert all(isinstance(message["content"], str) for message in request.messages)
    assert len(request.prefixes) == len(request.messages)


REFUSED = [
    ("chat", {"n": 2}, "n=2 cannot be kept: the answer is what the model samples as it is trained; leave it out"),
    ("chat", {"logprobs": True}, "logprobs=True"),
    ("chat", {"logit_bias": {"7": 100}}, "logit_bias"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice='required'"),
    ("chat", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "price"}}}, "tool_choice"),
    ("chat", {"parallel_tool_calls": False}, "parallel_tool_calls=False"),
    ("chat", {"tools": [{"type": "custom", "custom": {}}]}, "only functions"),
    ("chat", {"max_tokens": 0}, "max_tokens=0: a whole number of 1 or more"),
    ("chat", {"max_completion_tokens": True}, "max_completion_tokens=True"),
    ("chat", {"stop": ["a", ""]}, "none of them empty"),
    ("chat", {"stream_options": [1]}, "stream_options: an object was expected"),
    ("chat", {"stop": ["x"] * 17}, "at most 16 texts"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "image 1: this run takes"),
    ("chat", {"messages": [{"role": "user", "content": "\ud800"}]}, "surrogates not allowed"),
    ("chat", {"messages": [{"role": "stranger", "content": "x"}]}, "choose one of: system, user, assistant, tool"),
    ("chat", {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "I"}]}, "its turns itself"),
    ("chat", {"messages": []}, "at least one message"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "run by Anthropic"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image 1: this run takes"),
    ("responses", {"previous_response_id": "resp_1"}, "nothing is kept between requests here; send the whole input"),
    ("responses", {"background": True}, "background"),
    ("responses", {"tools": [{"type": "web_search"}]}, "only functions"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' are not read"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "reason"), REFUSED)
def test_what_cannot_be_kept_or_read_is_refused_by_name(name: str, body: Any, reason: str) -> None:
    with pytest.raises(RequestError) as refused:
        DIALECTS[name].read({**HI[name], **body})
    assert reason in str(refused.value)


@pytest.mark.parametrize("name", DIALECTS)
def test_sampling_is_the_trainers_and_what_asks_for_nothing_is_no_promise(name: str) -> None:
    plain = {"n": 1, "logprobs": False, "tool_choice": None, "parallel_tool_calls": True, "response_format": {"type": "text"}}
    sampling = {"temperature": 0.0, "top_p": 0.1, "top_k": 1, "seed": 3, "presence_penalty": 1.0, "metadata": {}, "user": "me"}
    assert DIALECTS[name].read({**HI[name], **plain, **sampling}) == DIALECTS[name].read(HI[name])


def test_one_history_is_the_same_conversation_in_each_dialect() -> None:
    arguments = '{"item": "tea", "n": null}'
    in_chat = chat.read({
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "tea?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "so",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "price", "arguments": arguments}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [TOOL],
        "max_tokens": 9,
        "stop": "END",
    })  # fmt: skip
    in_messages = messages.read({
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "text", "text": "tea?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "so", "signature": ""},
                    {"type": "tool_use", "id": "c1", "name": "price", "input": json.loads(arguments)},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "3"}]},
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        "tools": [{"name": "price", "description": "of an item", "input_schema": PRICE["parameters"]}],
        "max_tokens": 9,
        "stop_sequences": ["END"],
    })  # fmt: skip
    in_responses = responses.read({
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "what is tea?"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
            {"type": "function_call", "call_id": "c1", "name": "price", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
            {"type": "message", "role": "user", "content": "and?"},
        ],
        "tools": [{"type": "function", "strict": True, **PRICE}],
        "max_output_tokens": 9,
    })  # fmt: skip
    assert in_chat.messages == in_messages.messages == in_responses.messages
    assert in_chat.messages[2]["tool_calls"][0]["function"]["arguments"] == {"item": "tea", "n": None}
    assert in_chat.messages[3] == {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "price"}
    assert in_chat.tools == in_messages.tools == in_responses.tools == (TOOL,)
    assert in_chat.stop == in_messages.stop == ("END",) and in_responses.max_tokens == in_chat.max_tokens == 9


def test_images_are_the_same_in_each_dialect_also_as_the_answer_of_a_tool(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    read = ImageLoader(None, store.add, store)
    one, other = (base64.b64encode(drawn(30, 20, seed)).decode() for seed in (1, 2))
    urls = [f"data:image/png;base64,{each}" for each in (one, other)]
    sources = [{"type": "base64", "media_type": "image/png", "data": each} for each in (one, other)]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    in_chat = chat.read({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": urls[0]}}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url", "image_url": {"url": urls[1]}, "detail": ""}]},
    ]}, read)  # fmt: skip
    in_messages = messages.read({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "source": sources[0]}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "image", "source": sources[1]}]}
        ]},
    ]}, read)  # fmt: skip
    in_responses = responses.read({"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": urls[0]}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": urls[1]}]},
    ]}, read)  # fmt: skip
    digests = [digest_of(decoded(drawn(30, 20, seed))) for seed in (1, 2)]
    assert in_chat.messages == in_messages.messages == in_responses.messages
    assert [*images_of(in_chat.messages)] == digests and set(store) == set(digests)
    assert in_chat.prefixes == in_messages.prefixes == in_responses.prefixes


def test_another_image_is_another_conversation_and_the_same_in_another_file_is_not(tmp_path: Path) -> None:
    store, file = ImageStore(tmp_path), io.BytesIO()
    decoded(drawn(30, 20, 1)).save(file, "BMP")
    read = ImageLoader(None, store.add, store)

    def prefixes(data: bytes, **more: str) -> list[bytes]:
        url = f"data:image/x;base64,{base64.b64encode(data).decode()}"
        parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]
        return chat.read({"messages": [{"role": "user", "content": parts, **more}]}, read).prefixes

    assert prefixes(drawn(30, 20, 1)) == prefixes(file.getvalue()) == prefixes(drawn(30, 20, 1), name="Ann")
    others = [chat.read({"messages": [{"role": "user", "content": "see"}]}).prefixes, prefixes(drawn(30, 20, 2))]
    assert prefixes(drawn(30, 20, 1)) not in others and others[0] != others[1]


def test_no_tools_are_shown_where_the_client_says_none() -> None:
    assert chat.read({**HI["chat"], "tools": [TOOL], "tool_choice": "none"}).tools == ()
    assert messages.read({**HI["chat"], "tools": [PRICE], "tool_choice": {"type": "none"}}).tools == ()


# -- the way out

TEXTS = {
    "text": "It is 3.",
    "nothing": "",
    "calls": "I ask." + call("price", item="tea") + call("price", item="cake", n=1.0),
    "call alone": call("price"),
    "reasoning": "<think>so</think>3",
}


def response_of(
    text: str, finish_reason: Any = "stop", tools: tuple[Any, ...] = (TOOL,), stop: tuple[str, ...] = ()
) -> ChatResponse:
    request = ChatRequest([{"role": "user", "content": "?"}], tools, stop=stop)
    return read_reply(Reply(text, finish_reason, 5, 7), request, TEMPLATE, 3, "one")


def in_chat(found: ChatResponse, answer: Any) -> list[Message]:
    return [answer["choices"][0]["message"]]


def in_messages(found: ChatResponse, answer: Any) -> list[Message]:
    return [{"role": "assistant", "content": answer["content"]}]


ECHOES: dict[str, tuple[str, Callable[[ChatResponse, Any], list[Any]]]] = {
    "chat": ("messages", in_chat),
    "messages": ("messages", in_messages),
    "responses": ("input", lambda found, answer: answer["output"]),
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", DIALECTS)
def test_an_answer_that_comes_back_is_the_turn_that_was_written(name: str, text: str) -> None:
    found = response_of(TEXTS[text])
    key, echoed = ECHOES[name]
    user = {"role": "user", "content": "and?"}
    body = {key: [*echoed(found, json.loads(json.dumps(DIALECTS[name].whole(found)))), user]}
    request = DIALECTS[name].read(body)
    assert digests((), request.messages[:1]) == digests((), [found.message])
    assert request.messages[0].get("reasoning_content", "") == found.reasoning


def test_calls_have_ids_and_ends_have_reasons_and_usage_is_the_engines() -> None:
    found = response_of(TEXTS["calls"])
    assert [(each.id, each.name, each.arguments) for each in found.calls] == [
        ("call00300", "price", {"item": "tea"}),
        ("call00301", "price", {"item": "cake", "n": 1.0}),
    ]
    assert chat.whole(found)["choices"][0]["finish_reason"] == "tool_calls"
    assert chat.whole(found)["usage"] == {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    assert messages.whole(found)["stop_reason"] == "tool_use"
    cut = response_of("It i", "length")
    assert chat.whole(cut)["choices"][0]["finish_reason"] == "length"
    assert messages.whole(cut)["stop_reason"] == "max_tokens"
    assert responses.whole(cut)["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_text_of_the_clients_that_ends_the_turn_is_not_in_the_answer() -> None:
    found = response_of("one END two", stop=("two", "END", "EN"))
    assert (found.text, found.stopped_by) == ("one ", "END")
    assert messages.whole(found)["stop_sequence"] == "END" and messages.whole(found)["stop_reason"] == "stop_sequence"


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken</tool_call>", call("price").replace("{}", "7"), call("price", n=float("nan"))]
)
def test_a_call_that_cannot_be_read_or_given_is_text_and_is_counted(text: str) -> None:
    found = response_of(text)
    assert found.is_unparsed and found.text == text and not found.calls and found.finish_reason == "stop"


def test_without_tools_nothing_is_a_call_but_reasoning_is_apart() -> None:
    found = response_of("<think>so</think>" + call("price"), tools=())
    assert (found.reasoning, found.calls, found.text, found.is_unparsed) == ("so", (), call("price"), False)
