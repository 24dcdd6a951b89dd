"""Find the origin of a NaN or infinity: replay a training step and check every operation."""
