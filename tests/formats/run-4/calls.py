from async_rlhf import Score, environment
from async_rlhf.actors.environments import Call
from async_rlhf.actors.environments.settings import Scores


@environment(calls=True, max_turns=3)
def calls(prompt, answer):
    one = yield Call(0, [{"role": "user", "content": prompt}])
    two = yield Call(1, [{"role": "user", "content": "again"}])
    yield Scores(Score(float(one.text == answer)), (float(len(one.text)), float(len(two.text))))
