"""Signs: what one run's record can show or not show, a table of them, and how each is looked for."""
