"""Which role of a run goes on which devices of a cluster: the question, the step, the search."""
