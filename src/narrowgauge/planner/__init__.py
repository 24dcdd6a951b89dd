"""What a training run needs and how long it takes, from formulas with sources: nothing is trained.

A plan starts from ``model`` (with ``built_models``), ``clusters``, ``efficiency`` and ``layouts``: together a job (``jobs``).
What it needs is in ``model_state``, ``activations`` and ``memory``; how long it takes in ``roofline``, ``layer_times``,
``collectives`` and ``step_time``, term by term (``terms``). ``search`` tries every layout, ``plan`` answers a question with them,
and ``plan_tables`` prints the answer. ``scaling_laws`` and ``launches`` go the other way, from measured times to what is behind
them. Only a ``config.json`` needs PyTorch.
"""
