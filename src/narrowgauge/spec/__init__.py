"""The specification: formats, computes, storages and recipes as tables that need no PyTorch.

Tables: ``formats``, ``computes`` (and their ``variants``), ``codes``, ``storages``, ``accumulations``, ``propagation`` (rules of
scales), ``chips``, ``models``, ``aliases``. ``recipes`` combines them and ``notation`` reads recipes from text. ``show`` and
``details`` print them through ``tables``. ``processor`` says which formats this CPU multiplies, and ``significance`` has
Student's t. The optimizer, trainer, documentation and tests read the same tables.
"""
