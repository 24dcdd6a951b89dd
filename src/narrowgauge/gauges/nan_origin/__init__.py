"""Find the origin of a NaN or infinity: repeat a training step and check every operation."""
