"""Compare weights, models and what a resumed run computes with."""
