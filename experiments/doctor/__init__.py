"""What this machine can do, and whether the parts of the system get their numbers right on its devices."""
