"""Narrow matmuls: one Linear, three matmuls, six casts; each compute is a value of :mod:`narrowgauge.spec.computes`."""
