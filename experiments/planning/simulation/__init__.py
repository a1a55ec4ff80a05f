"""A run on virtual time: the real admission of the queue, with actors, judges and a learner that take what stages cost."""
