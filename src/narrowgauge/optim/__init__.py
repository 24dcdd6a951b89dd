"""Optimizers: a rule (which step to take) combined with a storage (in which formats weights and
states are stored).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
