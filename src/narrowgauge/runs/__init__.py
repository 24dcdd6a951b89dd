"""The run folder: what a run writes to disk, so that a crash costs at most the line being written.

``schema`` defines the columns, ``record`` reads a run, ``writer`` writes it, ``lines`` is the format of a line,
``events`` the messages of a run, ``finding`` the words of findings, ``atomic_io`` how this
package writes files. Nothing here needs torch.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
