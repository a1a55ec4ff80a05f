"""Agents: a function of the user that drives any SDK or program against `llm.base_url`, played as an environment.

    the user's function -> SDK -> endpoint -> session -> adapter -> yield Call -> the actor's engine -> Reply -> the way back

asked            what a request asks of the model, whatever the dialect
written          what the model's turn is in answer
chat, messages, responses   the dialects: a body -> Asked; Written -> JSON and events
conversations    which of an episode's chains a request goes on with
turns            from what is asked to a `Call`, and from the `Reply` to what is answered
sessions         the calls of one episode; a retry is no second call
endpoint         the HTTP server of one process
adapter          makes a generator of ours of the function
harness          episodes that a program elsewhere starts, plays and ends
from_verifiers   verifiers' own agents, played the same way
"""
