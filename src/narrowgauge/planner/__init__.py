"""Estimate the memory and time of a training run from published formulas. Nothing is trained.

A job (``job``) describes an ``architecture``, ``clusters``, ``efficiency``, ``layouts`` and
``program`` with its table of parts. A ``model`` is a preset, or one of ``built_models``. Its memory is in ``model_state``,
``activations`` and ``memory``. Its time is in ``roofline``, ``layer_times``, ``collectives`` and
``step_time``, term by term (``terms``). An ``estimate`` holds both, with the intervals of published
runs. ``search`` tries every layout that some program ``runs_with``. ``plan`` answers a question
with the ``candidates``, ``advice`` says what would fit instead, ``nearest`` names the measured run
beside it, and ``plan_tables`` prints it. ``state`` counts the state alone. ``scaling_laws`` goes
the other way, from measured times to the part that more chips divide. Only a ``config.json`` needs
PyTorch.
"""
