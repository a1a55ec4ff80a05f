"""Rewards that come with the system: one ordinary function a file, named in `async_rlhf.actors.rewards.loading.BUILTINS`."""
