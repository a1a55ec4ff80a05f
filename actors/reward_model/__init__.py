"""A reward model: any Hugging Face directory with a sequence-classification head. The door is `scoring`."""
