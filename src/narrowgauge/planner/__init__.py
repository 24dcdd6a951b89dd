"""What a training run needs and how long it takes, from formulas with sources: nothing is trained, and nothing needs PyTorch.

A plan starts from ``inputs``: the shape of a model, the machines and what they reach of their printed rates, and a layout of
the one over the other. ``memory`` and ``time`` say what a layout costs, term by term (``terms``); ``search`` finds the best
layouts, ``plan`` answers a question with them, and ``plan_report`` puts the answer into words. ``measured`` goes the other
way, from measured times to what is behind them.
"""
