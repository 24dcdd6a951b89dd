"""Estimate the memory and time of a training run from published formulas. Nothing is trained.

An ``ask`` is an architecture (``shapes``), a recipe, a ``layout``, a ``machine`` and a ``program``
with its table of parts. A ``model`` is a preset, one of ``built_models`` or an ``own_module``. Its
memory is in ``state``, ``activations`` and ``memory``. Its time is in ``roofline``,
``layer_times``, ``exchanges`` and ``step_time``, term by term (``terms``). An ``estimate`` holds
both, with the intervals of published runs (``errors``). ``search`` tries layouts. ``plan`` answers
a question with the ``candidates``, and says what would fit instead. ``nearest`` names the measured
run beside it, and ``words`` prints it. ``scaling`` goes the other way, from measured times to the
part that more chips divide. ``trace`` divides a measured step. Only a ``config.json`` and a module
need PyTorch.
"""
