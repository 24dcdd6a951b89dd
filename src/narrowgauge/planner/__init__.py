"""What a training run needs and how long it takes, from formulas with sources: nothing is trained, and nothing needs PyTorch.

``inputs`` are what a plan starts from: the shape of a model, the machines and what they reach of their printed rates, and a
layout of the one over the other. ``memory`` and ``time`` say what a layout costs, term by term (``terms``); ``search`` finds
the layouts worth naming, ``plan`` answers a question with them, and ``plan_report`` tells the answer. ``measured`` goes the
other way, from measured times to what is behind them.
"""
