"""Optimizers: a rule (what step to take) joined with a storage (how what it leaves behind is kept)."""
