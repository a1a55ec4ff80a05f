"""The frozen reference: log-probabilities of completions under the initial model. The door is `scoring`."""
