"""Prompts that arrive during a run: files are dropped into a directory, and their rows are bound to group numbers for good."""
