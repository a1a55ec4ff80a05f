"""Scores completions the moment they end, in processes that can be killed. The door is `async_rlhf.actors.scoring.pool`.

Nothing is imported here, because every worker process passes through this file on its way to its own module.
"""
