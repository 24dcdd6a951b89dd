"""Where the rows and events of a run go besides its folder: TensorBoard, Weights & Biases, MLflow, Aim.

``logger.py`` says what a logger is, lists them, and hands rows on from a thread of its own. Each logger is a file of its own, and
the only one that imports its package.
"""
