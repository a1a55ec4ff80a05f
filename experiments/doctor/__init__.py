"""The doctor: facts of this machine, and checks that the parts of the system get their numbers right on its devices."""
