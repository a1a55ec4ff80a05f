"""Real runs of one machine, to hold predictions against: which (`cells`), how (`runs`), what is read of them (`facts`)."""
