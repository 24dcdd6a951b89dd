"""Estimate the memory and time of a training run from published formulas. Nothing is trained.

A job (``jobs``) joins ``model`` (with ``built_models``), ``clusters``, ``efficiency`` and ``layouts``. Its memory is in
``model_state``, ``activations`` and ``memory``. Its time is in ``roofline``, ``layer_times``, ``collectives`` and
``step_time``, term by term (``terms``). ``search`` tries every layout. ``plan`` answers a question with them. ``plan_tables``
prints the answer. ``state`` counts the state alone. ``scaling_laws`` goes the other way, from measured times to their causes.
``launches`` compares two jobs.
Only a ``config.json`` needs PyTorch.
"""
