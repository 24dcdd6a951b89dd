"""Train a language model from a command line, start to end: data, loop, checkpoints and record.

``data`` yields batches whose order is a function of (seed, step). :mod:`narrowgauge.checkpoints`
saves everything that a step depends on. The loop calls ``prepare`` as any user would. Together they
make a resumed run continue bit for bit.
"""
