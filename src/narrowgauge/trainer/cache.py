"""Tokens that many runs share, made once per machine.

Training a tokenizer on the standard library and encoding it takes seconds, which a user trying things out would pay at
every start. So the token map is kept in the user's cache folder, under a name that holds a hash of all it depends on:
the text, the vocabulary size, the version of ``tokenizers``. Two processes that need it at once wait for each other;
an entry that is damaged is made again. Old entries are not removed: the folder may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from narrowgauge.caching import cache_folder
from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import AGAIN, TEMPORARY, disk_errors, lock
from narrowgauge.trainer.tokenization import SCHEMA_VERSION, Tokens, read_tokens, write_tokens


def cached_tokens(name: str, key: list[str | int], make: Callable[[], Tokens]) -> tuple[Tokens, list[str]]:
    """A token map from the cache, made by whichever process comes first.

    Args:
        name: what the entry is, for people who look into the folder.
        key: everything else the tokens depend on.
        make: gives the tokens if the cache has none, or damaged ones.

    Returns:
        The tokens, and what the user should be told: nothing, or that the cache cannot be used.

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
        return make(), [
            f"The cache {final.parent} cannot be written ({error.strerror}): tokens are made anew each time."
        ]
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
