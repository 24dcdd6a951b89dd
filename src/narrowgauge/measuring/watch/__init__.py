"""``ng.watch`` and ``ng.RunRecorder``: read a loop by its hooks, and write a row for each step.

``hooks`` calls two listeners: ``meter`` measures each step, with ``rank_sums`` on several ranks, and
``fingerprints`` hashes tensors. ``recorder`` adds ``optimizer_columns``, writes the row, and lets the laws
of :mod:`narrowgauge.measuring.diagnose` read it.
"""
