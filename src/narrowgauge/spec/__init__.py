"""The specification: formats, computes, storages and recipes as tables that need no PyTorch.

Tables: ``formats``, ``computes`` (with slots), ``storages`` (with codes), ``reductions``,
``update_rules``, ``matmul_kernels``, ``chips``, ``models``. Their rows are in ``data``, read by
``toml``; ``require`` checks them. ``recipes`` combines them. ``parse`` reads recipes from text.
``show`` prints them through ``tables``. ``significance`` has Student's t and the bound of lost
updates. The optimizer, trainer, documentation and tests read the same tables.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
