"""Narrow matmuls: one Linear, three products, six casts; every format is a row of :mod:`narrowgauge.spec.computes`."""
