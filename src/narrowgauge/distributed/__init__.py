"""Shard parameters over ranks, and sum gradients across ranks."""
