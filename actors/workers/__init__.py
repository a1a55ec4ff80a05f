"""How code of users is run and served: what rewards and environments have in common.

process    a worker process, which ends with whatever it started; on Linux behind its `guard`
watchdog   whose code an event loop runs right now, readable from another process
pool       a pool of worker processes and the thread that looks after them
service    the loop of a server for many clients

A kind of session (a call of a reward, an episode) adds its messages, what runs in the process, and what becomes of the
sessions of a process that has ended.
"""
