"""TODO: one line: what this package holds."""
