"""What a run would take on given devices: pure models of schedules, costs and times, without torch and without I/O."""
