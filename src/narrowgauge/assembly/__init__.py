"""Everything a recipe asks of a model, put together: :func:`narrowgauge.prepare` and what it checks and carries."""
