"""The run folder: what a run writes to disk, so that a crash costs at most the line being written.

``schema`` defines the columns, ``record`` reads a run, ``writer`` writes it, ``lines`` is the checksummed line format,
``events`` the messages of a run, ``finding`` what is found wrong in one, ``archive`` runs in a zip file, ``atomic_io`` how this
package writes files. Nothing here needs torch.
"""

from __future__ import annotations

from narrowgauge._public import offer

__getattr__, __dir__ = offer(__name__)
