"""What the model reads before its next turn, and how much it may write. Pure, given a tokenizer."""

from __future__ import annotations

from async_rlhf.actors.environments.yields import Read
from async_rlhf.actors.loop.transcript import Transcript, Turn
from async_rlhf.actors.loop.work import Play
from async_rlhf.buffers.errors import EpisodeError


def next_turn(transcript: Transcript, read: Read, play: Play) -> Turn:
    """The turn that the model is to write. Raises EpisodeError, and ConfigError for tools that the template leaves out."""
    rendering, call = play.rendering, read.call
    number, trained = (0, True) if call is None else (call.chain, call.trained)
    past, anew = transcript.conversation(number), transcript.num_chains
    if not past:
        assert call is not None
        if number != (wanted := transcript.num_conversations):
            raise EpisodeError(f"its call is of chain {number}, and the next one to begin is {wanted}")
        ids = tuple(rendering.given(call.tools).prompt(read.content, is_foreign=True).ids)
        if transcript.first is None:
            check_prompt(len(ids), play, "call")
        return Turn(number, anew, read.content, ids, call.tools, trained)
    first, last = past[0], past[-1]
    if call is not None and call.tools and call.tools != first.tools:
        raise EpisodeError(f"its call gives chain {number} other tools than those that it began with; begin another chain")
    rendering = rendering.given(first.tools)
    if rendering.splits(first.content):
        answers = [*(turn.content for turn in past[1:]), read.content]
        prompt_ids, behind = transcript.row(last.chain)
        said = list(zip((turn.text for turn in past), answers, strict=True))
        _, found, restarts = rendering.whole(first.content, said, [*prompt_ids, *behind])
    else:
        assert last.wrote is not None
        _, found, restarts = rendering.observation(first.content, read.content, last.wrote.token_ids.tolist())
    if not found:
        raise EpisodeError("its observation is empty: the model has nothing to read")
    return Turn(number, anew if restarts else last.chain, read.content, tuple(found), first.tools, trained)


def room_for(transcript: Transcript, turn: Turn, play: Play) -> int:
    """Tokens that this turn may have; 0 or fewer: none."""
    if not transcript.conversation(turn.conversation) and len(turn.ids) > play.max_prompt_length:
        return 0
    return play.max_length - transcript.length - (len(turn.ids) if transcript.turns else 0)


def check_prompt(length: int, play: Play, what: str) -> None:
    """Raises EpisodeError for a first prompt that is too long."""
    if length > play.max_prompt_length:
        raise EpisodeError(f"its first {what} has {length} tokens, the limit is {play.max_prompt_length}")
