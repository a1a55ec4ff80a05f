"""A game of four turns: guess a letter from a to p; each wrong guess is answered by the side on which the right one lies."""

from async_rlhf import Score, environment


@environment(max_turns=4, timeout_s=10)
def guessing(prompt, answer):
    guess = yield f"{prompt}\n"
    while guess != answer:
        guess = yield "<\n" if answer < guess else ">\n"
    yield Score(1.0)
