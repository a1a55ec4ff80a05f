"""Rewards that come with the system: one ordinary function a file, named in `actors.rewards.loading.BUILTINS`."""
