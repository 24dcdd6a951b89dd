"""Estimate the memory and time of a training run: operations over a fraction of the chip's peak, and
bytes by parts. Nothing is trained.

A ``job`` is an architecture (``shapes``, read by ``model`` and ``built_models``), a recipe, a layout
(``layouts``), a ``cluster`` and a ``program``. ``memory`` and ``step_time`` are its bytes and seconds
by group; an ``estimate`` holds both, with the intervals of published runs. ``search`` tries layouts.
``plan`` answers a question, and says what would fit instead; ``plan_result`` prints it.
``measured_run`` plans a run from one that was measured, which ``measured_logs`` reads. ``scaling``
goes the other way, from measured times to the part that more chips divide. ``trace`` divides a
measured step. Only a ``config.json``, or a model of transformers, needs PyTorch.
"""
