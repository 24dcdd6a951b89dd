"""Apply all parts of a recipe to a model: :func:`narrowgauge.prepare`, its checks, and its saved
state.
"""
