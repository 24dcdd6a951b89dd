"""The specification: tables of formats, computes, storages, accumulations, chips and models, and recipes made of them.

Nothing here needs PyTorch. Documentation, ``narrowgauge show``, the optimizer, the trainer and the tests read the same tables.
"""
