"""The training data: texts, their tokens, and batches whose order is a function of (seed, step)."""
