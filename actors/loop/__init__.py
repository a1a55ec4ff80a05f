"""What an actor does: it makes groups by the hub's credits; and held-out prompts, which are evaluated in the same way."""
