"""A training step computed again, piece by piece: where it is the same to rounding, and where and how it departs."""
