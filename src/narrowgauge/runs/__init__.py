"""The run folder: files that a run writes to disk. A crash costs at most the line being written.

``schema`` reads the columns from ``data/columns.toml``. ``record`` reads a run, ``writer`` writes
it. ``events`` are the messages of a run. Nothing here needs torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
