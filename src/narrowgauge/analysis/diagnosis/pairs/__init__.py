"""Two runs that should have been equal: where they first differ, and why."""
