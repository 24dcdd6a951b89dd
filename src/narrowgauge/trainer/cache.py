"""A cache of tokens that many runs on a machine share.

Training a tokenizer on the standard library and encoding it takes seconds at every start. The token map is therefore cached
in the user's cache folder, under a name with a hash of everything it depends on: the text, the vocabulary size, the version
of ``tokenizers``. Concurrent processes wait for each other; damaged entries are rebuilt. Old entries are not removed; the
folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from narrowgauge.errors import DataError
from narrowgauge.machine.cache_folder import cache_folder
from narrowgauge.runs.atomic_io import AGAIN, TEMPORARY, disk_errors, lock
from narrowgauge.trainer.tokenization import SCHEMA_VERSION, Tokens, read_tokens, write_tokens


def cached_tokens(name: str, key: list[str | int], make: Callable[[], Tokens]) -> tuple[Tokens, list[str]]:
    """Get a token map from the cache, building it if necessary.

    Args:
        name: readable part of the entry's name.
        key: everything else the tokens depend on.
        make: builds the tokens if the entry is missing or damaged.

    Returns:
        The tokens, and notes for the user: none, or that the cache cannot be used.

    Raises:
        RecordError: the disk is full.
    """
    dependencies = json.dumps([SCHEMA_VERSION, version("tokenizers"), *key])
    name = f"{name}-{hashlib.blake2b(dependencies.encode(), digest_size=8).hexdigest()}"
    final = cache_folder() / "data" / name
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(final.with_name(f"{name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        return make(), [f"The cache {final.parent} cannot be written ({error.strerror}): tokens are rebuilt each time."]
    try:
        lock(descriptor, wait=True)
        try:
            return read_tokens(final), []
        except DataError:
            _fill(final, make())
            return read_tokens(final), []
    finally:
        os.close(descriptor)


def _fill(final: Path, tokens: Tokens) -> None:
    temporary = final.with_name(f"{TEMPORARY}{final.name}")
    with disk_errors(final, AGAIN):
        for stale in (temporary, final):
            if stale.exists():
                shutil.rmtree(stale)
        temporary.mkdir()
        try:
            write_tokens(temporary, tokens)
            os.rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
