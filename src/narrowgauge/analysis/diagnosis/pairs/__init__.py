"""Two runs that should have been equal: where they part first, and why."""
