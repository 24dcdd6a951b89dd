"""Probes of the machine's own arithmetic: the order of its sums, where it rounds, what it drops."""
