"""Measures what `plan` predicts with: this machine, or a run that has ended."""
