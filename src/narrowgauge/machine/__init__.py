"""The arithmetic of this machine, measured: the order of its sums, its roundings, and the last bits of its functions."""
