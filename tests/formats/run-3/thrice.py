from async_rlhf import Score, environment


@environment(max_turns=3)
def thrice(prompt, answer):
    yield prompt
    yield "again"
    text = yield "and again"
    yield Score(float(text == answer) + len(text))
