"""Prompts that come while a run goes on: files are dropped into a directory, their rows are bound to group numbers for good."""
