"""Where the rows and events of a run go besides its folder: TensorBoard, Weights & Biases, MLflow, Aim.

``available.py`` is the table of them, ``delivery.py`` hands rows on from a thread of its own, ``tagged.py`` turns a row into
named numbers. Each logger is a file of its own, and the only one that imports its package.
"""
