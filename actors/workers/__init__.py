"""How code of users is run and served: what rewards and environments have in common.

process    a worker process, which ends with whatever it started; on Linux behind its `guard`
watchdog   whose code an event loop runs right now, readable from another process
sessions   what runs in a worker process, and what a kind of session is
book       which process runs which session, and what becomes of them when one ends
pool       a pool of worker processes and the thread that looks after them
messages   the protocol of sessions between a client and a server
client     the sessions of one process at a server, in place of a pool
service    the loop of a server for many clients

A kind of session (a call of a reward, an episode) adds what its steps are and how its owner reads what came of them. A further
kind, as an agent behind an endpoint, is a session like these: it is begun, steps, and ends.
"""

CALLER, CALLER_VARIABLE = "caller/", "ASYNC_RLHF_CALLER"
"""Addresses at the process that started the run begin so; the variable of the run's processes has the rest of the way there."""
