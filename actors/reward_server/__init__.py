"""A reward in a process of its own, for many actors on many machines: `async-rlhf serve-reward` and the reward `remote`."""
