"""Probes of the machine's arithmetic: the order of its sums, its roundings, and lost values."""
