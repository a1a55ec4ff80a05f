"""The text of a chat template between two of the model's turns, and whether the template leaves earlier turns unchanged.

An observation is rendered behind a made-up conversation whose last turn is a mark. What follows the mark is the *delta*: the
end of the model's turn, the messages, the beginning of its next turn. Tokens that the model sampled are never rendered again.

    ... assistant: MARK <end of turn> user: observation <end of turn> assistant:
                       `-------------------------- delta ----------------------'

That is right where the template only ever appends. `probe` proves it with made-up conversations; templates that rewrite earlier
turns (Qwen3's drops their reasoning) are refused, unless the user chooses that observations are appended nevertheless, or that
the whole conversation is rendered before each turn (`probe_whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_rlhf.actors.environments.settings import Message
from async_rlhf.buffers.errors import ConfigError, EpisodeError

Render = Callable[[Sequence[Message], bool], str]
"""The template: messages and whether the model's next turn is begun -> text. Raises what the template raises."""

MARK = "0b5erv3d"
_QUESTION: Message = {"role": "user", "content": "a question"}
_OTHER: Message = {"role": "user", "content": "another"}
_TOOL: Message = {"role": "tool", "content": "a result", "name": "tool", "tool_call_id": "abcdefghi"}
_SYSTEM: Message = {"role": "system", "content": "a rule"}
_TURN: Message = {"role": "assistant", "content": MARK}
_EARLIER: Message = {"role": "assistant", "content": "an earlier turn"}
_REASONING: Message = {"role": "assistant", "content": f"<think>\na reason\n</think>\n\n{MARK}"}

_SPLIT = "set environment.render = 'split' to train each turn behind what the template makes of those before it"

_HISTORIES: tuple[tuple[Message, ...], ...] = ((_QUESTION,), (_QUESTION, _EARLIER, _OTHER))


def delta_of(render: Render, messages: Sequence[Message]) -> str:
    """The text between the end of the model's turn and the beginning of its next one.

    Raises EpisodeError for messages that the template refuses or leaves out.
    """
    text = _written(render, (_QUESTION, _TURN), messages)
    before, mark, delta = text.rpartition(MARK)
    if not mark or MARK in before:
        raise EpisodeError(f"the chat template writes the model's turn {text.count(MARK)} times; it must be once")
    _check_content(messages, delta)
    return delta


def probe(render: Render, by_message: bool) -> None:
    """Raises ConfigError for a template that observations cannot be appended to.

    by_message: what it does to earlier turns does not matter, only that the text behind the last one is always the same.
    A role `tool` is tried where the template takes one.
    """
    histories = [*_HISTORIES]
    if _SYSTEM["content"] in (_rendered(render, (_SYSTEM, _QUESTION)) or ""):
        histories += [(_SYSTEM, *history) for history in _HISTORIES]
    for observed in (_OTHER, _TOOL):
        try:
            delta = delta_of(render, [observed])
        except EpisodeError as error:
            if observed is _TOOL:
                return
            raise ConfigError(f"episodes of several turns cannot be rendered: {error}{_otherwise(render)}") from error
        for history in histories:
            for turn in (_TURN, _REASONING):
                _check(render, (*history, turn, observed), delta, by_message)


def probe_whole(render: Render) -> None:
    """Raises ConfigError for a template that does not write a conversation whose last turn was answered."""
    for observed in (_OTHER, _TOOL):
        try:
            text = whole_of(render, (_QUESTION, _TURN), [observed])
        except EpisodeError as error:
            if observed is _TOOL:
                return
            raise ConfigError(f"episodes of several turns cannot be rendered: {error}") from error
        if text == _rendered(render, (_QUESTION, observed)):
            raise ConfigError("episodes of several turns cannot be rendered: the chat template leaves out the model's turn")


def _otherwise(render: Render) -> str:
    """The choice that is left where observations cannot be appended."""
    try:
        probe_whole(render)
    except ConfigError:
        return ""
    return f"; {_SPLIT}"


def whole_of(render: Render, history: Sequence[Message], messages: Sequence[Message]) -> str:
    """The conversation so far, these messages behind it, and the beginning of the model's next turn.

    Raises EpisodeError for messages that the template refuses or leaves out.
    """
    text = _written(render, history, messages)
    _check_content(messages, text)
    return text


def _written(render: Render, history: Sequence[Message], messages: Sequence[Message]) -> str:
    try:
        return render((*history, *messages), True)
    except Exception as error:  # the template is the model's own code
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise EpisodeError(f"the chat template refuses an observation with the roles {roles}: {error}") from error


def _check_content(messages: Sequence[Message], text: str) -> None:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and content.strip() not in text:
            raise EpisodeError(f"the chat template leaves out what a message of role {message['role']!r} says")


def probe_tools(render: Render, names: Sequence[str], whole: bool) -> None:
    """Raises ConfigError for a template that does not show these tools to the model, or does not take what they answer.
    whole: conversations are rendered as a whole."""
    text = _rendered(render, (_QUESTION,)) or ""
    if missing := [name for name in names if name not in text]:
        raise ConfigError(f"the chat template leaves out the tool {missing[0]!r}; give the model a template that takes tools")
    try:
        whole_of(render, (_QUESTION, _TURN), [_TOOL]) if whole else delta_of(render, [_TOOL])
    except EpisodeError as error:
        raise ConfigError(
            f"the answers of tools cannot be rendered: {error}; give the model a template that takes them"
        ) from error


def _check(render: Render, conversation: Sequence[Message], delta: str, by_message: bool) -> None:
    """The text of a conversation that goes on begins with the text that the model has continued, and ends with the delta."""
    *history, turn, _ = conversation
    shown = " ".join(str(message["role"]) for message in conversation)
    before, after = _rendered(render, history), _rendered(render, conversation)
    if before is None or after is None:
        raise ConfigError(f"the chat template refuses the conversation {shown}; give the model another template")
    begun, mark, rest = after.rpartition(MARK if by_message else turn["content"])
    # Some templates put a space before a turn that is over; the model's own tokens stand there.
    if mark and rest == delta and (by_message or begun.rstrip() == before.rstrip()):
        return
    choice = "" if by_message else f"{_SPLIT}, or 'by_message' to append observations nevertheless, or "
    raise ConfigError(
        f"the chat template rewrites what was said before ({shown}): {_around(before, after)}; "
        f"{choice}give the model another template"
    )


def _rendered(render: Render, messages: Sequence[Message]) -> str | None:
    try:
        return render(messages, True)
    except Exception:  # noqa: BLE001  the template is the model's own code, and raises for what it does not take
        return None


def _around(before: str, after: str) -> str:
    """Where the second text leaves the first."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    return f"it wrote {before[max(0, at - 20) : at + 40]!r}, and {after[max(0, at - 20) : at + 40]!r} a turn later"
