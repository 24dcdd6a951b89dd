"""Training a language model from a command line, start to end: data, loop, checkpoints and record.

``data`` gives batches whose order is a function of (seed, step), ``checkpoint`` keeps all that a step depends on, and
the loop calls ``prepare`` like any other user would. Together they make a resumed run continue bit for bit.
"""
