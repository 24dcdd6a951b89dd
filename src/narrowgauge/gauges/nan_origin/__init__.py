"""The origin of a NaN or infinity: a training step is replayed and every operation of it is checked."""
