"""A pickled object that shows whether somebody unpickled it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Trap:
    """Unpickled, it would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)
