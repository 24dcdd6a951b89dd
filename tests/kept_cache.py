"""What tests compile is kept between sessions, in a folder of bounded size, unless everything is to be compiled from nothing.

Kernels of the optimizer are named after what they were compiled from, and PyTorch's compiler names what it keeps likewise: what
an edit does not change is found, and nothing else is. All else that a cache holds (measurements of this machine, calibrations)
is of one session, so that no test finds what an earlier one left.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

FOLDER = "NARROWGAUGE_TEST_CACHE"
"""The variable that names the folder; ``.cache/narrowgauge-tests`` in the checkout without it."""
MAX_BYTES = {"kernels": 2 << 30, "inductor": 2 << 30, "cuda": 1 << 28}
"""Of what is kept: kernels of the optimizer, what PyTorch's compiler keeps, machine code of GPUs (``cuda/lowering.py``)."""


def kept_folder() -> Path:
    """Where compiled code is kept between sessions."""
    chosen = os.environ.get(FOLDER)
    return Path(chosen).absolute() if chosen else Path(__file__).parents[1] / ".cache" / "narrowgauge-tests"


def open_cache(*, cold: bool) -> Path:
    """Make the cache of a session, and set the variables that name it, for this process and all that it starts.

    Args:
        cold: begin with nothing.
    Returns:
        The session's own folder, for :func:`close_cache`.
    """
    session = Path(tempfile.mkdtemp(prefix="narrowgauge-tests-"))
    kept = session / "kept" if cold else kept_folder()
    for name in MAX_BYTES:
        (kept / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in ("kernels", "cuda"):
        (session / name).symlink_to(kept / name, target_is_directory=True)
    os.environ["NARROWGAUGE_CACHE"] = str(session)
    if cold:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kept / "inductor")
    else:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept / "inductor"))
    return session


def close_cache(session: Path) -> None:
    """Remove a session's own folder, and what was used least recently of a kept one that has become too large."""
    kernels = (session / "kernels").resolve()
    shutil.rmtree(session, ignore_errors=True)
    if kernels.is_dir():
        for name, max_bytes in MAX_BYTES.items():
            keep_newest(kernels.parent / name, max_bytes)


def keep_newest(folder: Path, max_bytes: int) -> None:
    """Remove files, those that were read least recently first, until the others fit."""
    files = []
    for path in folder.rglob("*"):
        try:
            found = path.lstat()
        except OSError:  # another session removed it
            continue
        if path.is_file():
            files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
