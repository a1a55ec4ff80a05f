"""Agents: a function of the user that drives any SDK or program against `llm.base_url`, played as an environment.

    the user's function -> SDK -> endpoint -> session -> adapter -> yield Call -> the actor's engine -> Reply -> the way back

request          a request to the model, whatever the dialect
response         the model's turn in answer
chat, messages, responses   the dialects: a body -> ChatRequest; ChatResponse -> JSON and events
turns            which conversation a ChatRequest goes on with, as a `Call`; from the `Reply` to a ChatResponse
sessions         the calls of one episode; a retry is no second call
endpoint         the HTTP server of one process
adapter          makes a generator of ours of the function
harness          episodes that a program elsewhere starts, plays and ends
from_verifiers   verifiers' own agents, played the same way
"""
