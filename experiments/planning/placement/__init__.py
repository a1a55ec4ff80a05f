"""Which role of a run goes on which devices of a cluster: what is asked, what is tried, and the answer."""
