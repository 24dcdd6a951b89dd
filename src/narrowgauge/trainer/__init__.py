"""Train a language model from a command line, start to end: settings, tokens, model, loop,
checkpoints and comparison.

The loop calls ``prepare`` and ``RunRecorder`` as any user would. The order of the data is a function
of (seed, step), and a checkpoint holds everything else that a step depends on. So a run that goes
on continues bit for bit.
"""
