"""Measures what plans and simulations need: this machine, or a run that has ended."""
