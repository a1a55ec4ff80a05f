"""The model's input before its next turn, and its token budget. Pure, given a tokenizer."""

from __future__ import annotations

from async_rlhf.actors.engine import Prompt
from async_rlhf.actors.environments import Content
from async_rlhf.actors.environments.rendering import as_messages
from async_rlhf.actors.environments.yields import Read
from async_rlhf.actors.loop.context import Environment
from async_rlhf.actors.loop.transcript import Transcript, Turn
from async_rlhf.buffers.errors import EpisodeError
from async_rlhf.buffers.images import images_of


class NoRoomError(EpisodeError):
    """The episode is as long as it may be."""


def first_prompt(content: Content, environment: Environment) -> tuple[str, Prompt]:
    """A first observation as the model reads it. Raises EpisodeError."""
    text, ids, _ = environment.rendering.prompt(content)
    _check_prompt(len(ids), environment, "observation")
    return text, (tuple(ids), images_of(as_messages(content)))


def next_turn(transcript: Transcript, read: Read, environment: Environment, most: int, group_prompt: Prompt) -> Turn | None:
    """The turn that the model is to write; None while turns that are being written may need the room.

    most: tokens that a turn may have. group_prompt: as `Members.prompt`. Raises NoRoomError, EpisodeError, and ConfigError
    for tools that the template leaves out.
    """
    turn, call = _turn(transcript, read, environment), read.call
    begins_row = turn.row == transcript.num_rows
    is_prompt = not transcript.conversation(turn.conversation) or (begins_row and transcript.first is None)
    room = environment.max_length - transcript.length - (len(turn.ids) if transcript.turns else 0)
    if room <= 0 or (is_prompt and len(turn.ids) > environment.max_prompt_length):
        raise NoRoomError("it is as long as it may be")
    turn.most = min(room, most, (call and call.max_tokens) or room)
    if turn.most > room - sum(unfinished.most for unfinished in transcript.unfinished):
        return None
    if turn.trained and transcript.first is None and group_prompt[0]:
        head = turn if begins_row else transcript.turns_of(turn.row)[0]
        is_same, token = (head.ids, head.images) == group_prompt, head.ids[0]
        if not is_same and (token != group_prompt[0][0] or token == environment.rendering.place_id):
            raise EpisodeError("its first prompt shares no token with that of its group: derive it from the row and `seed`")
    return turn


def _turn(transcript: Transcript, read: Read, environment: Environment) -> Turn:
    rendering, call = environment.rendering, read.call
    number, trained = (0, True) if call is None else (call.conversation, call.trained)
    past, anew = transcript.conversation(number), transcript.num_rows
    if not past:
        assert call is not None
        if number != (wanted := transcript.num_conversations):
            raise EpisodeError(f"its call is of conversation {number}, and the next one to begin is {wanted}")
        ids = tuple(rendering.given(call.tools).prompt(read.content, is_foreign=True).ids)
        if transcript.first is None:
            _check_prompt(len(ids), environment, "call")
        return Turn(number, anew, read.content, ids, call.tools, trained, images=images_of(as_messages(read.content)))
    first, last = past[0], past[-1]
    if call is not None and call.tools and call.tools != first.tools:
        raise EpisodeError(f"its call gives conversation {number} other tools than those that it began with; begin another")
    rendering = rendering.given(first.tools)
    answers = [*(turn.content for turn in past[1:]), read.content]
    # A family may prepare an image otherwise beside others, so those that come go before all that is read with them.
    if rendering.splits(first.content) or images_of(as_messages(read.content)):
        prompt_ids, behind = transcript.tokens(last.row)
        said = list(zip((turn.text for turn in past), answers, strict=True))
        _, ids_read, restarts = rendering.whole(first.content, said, [*prompt_ids, *behind])
    else:
        assert last.wrote is not None
        _, ids_read, restarts = rendering.observation(first.content, read.content, last.wrote.token_ids.tolist())
    if not ids_read:
        raise EpisodeError("its observation is empty: the model has nothing to read")
    if not restarts:
        return Turn(number, last.row, read.content, tuple(ids_read), first.tools, trained)
    images = tuple(digest for content in (first.content, *answers) for digest in images_of(as_messages(content)))
    return Turn(number, anew, read.content, tuple(ids_read), first.tools, trained, images=images)


def _check_prompt(length: int, environment: Environment, what: str) -> None:
    if length > environment.max_prompt_length:
        raise EpisodeError(f"its first {what} has {length} tokens, the limit is {environment.max_prompt_length}")
