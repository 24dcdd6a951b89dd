"""What several ranks tell each other of an audited step, since each alone cannot tell a mean from its own gradient."""
