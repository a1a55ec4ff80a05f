"""Where prompts come from: files and tasks to rows, which of them are held out, and whether a model can take them. No torch."""
