"""The published figures of other systems beside what the model of performance predicts for them."""
