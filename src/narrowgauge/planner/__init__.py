"""What a training run needs and how long it takes, from formulas with sources: nothing is trained, and nothing needs PyTorch.

``architectures`` is the shape of a model, ``clusters`` the machines, ``layouts`` how a model is spread over them; ``memory`` and
``step_time`` say what a layout costs, term by term (``terms``), and ``search`` finds the layouts worth naming. ``scaling_law``
reads measured times, ``attribution`` run folders; ``calibration`` fits the measured shares of peak rates to a machine.
"""
