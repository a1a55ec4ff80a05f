"""Which prompt a group number has where that is chosen by how often prompts have been solved."""
