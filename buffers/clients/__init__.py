"""The other ends of the hub: what an actor, the learner and the supervisor say, and what they do with the answers.

Every wait has a deadline and a name. One thread only; frames go over a `link`.
"""
