from async_rlhf import Feedback, Score, environment


@environment(max_turns=2)
def twice(prompt, answer):
    text = yield prompt
    text = yield Feedback(f"{answer}\n", float(text == answer))
    yield Score(float(text == answer) + len(text))
