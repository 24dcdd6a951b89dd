"""Optimizers: a rule (which step to take) combined with a storage (in which formats weights and states are stored)."""
