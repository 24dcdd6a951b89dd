"""The header of a run's data, ``data.json``: the meaning of the tokens and the checksums of their files.

It holds the dtype of the tokens, the size of the vocabulary and the end-of-text token. Reading the same bytes in another dtype
would train on other tokens, so the fingerprint of the data covers all of these.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from narrowgauge.runs.atomic_io import digest, load_json
from narrowgauge.runs.schema import is_whole, short
from narrowgauge.trainer.tokenization import Tokens

SCHEMA_VERSION = 2
"""Version of ``data.json``. Since 2 the fingerprint covers the meaning of the tokens, not only their bytes."""

_COVERED = ("files", "dtype", "vocab_size", "end_of_text")
_KINDS = {"request": dict, "dtype": str, "vocab_size": int, "end_of_text": int, "notes": list, "files": dict}
_DTYPES = ("uint16", "uint32")


def fingerprints(head: dict[str, Any]) -> tuple[str, str]:
    """The fingerprints of data with a header: the current one, and that of older versions, which covered the files only."""
    files = _hashed(head["files"])
    return files if head["schema_version"] < 2 else _hashed({name: head[name] for name in _COVERED}), files


def read_head(folder: Path) -> dict[str, Any]:
    """Read and check the ``data.json`` of a folder.

    Raises:
        ValueError, KeyError, TypeError: an entry is wrong or missing.
        OSError: it cannot be read.
    """
    head = load_json((folder / "data.json").read_bytes())
    if not isinstance(head, dict):
        raise ValueError("data.json is not an object")
    if not is_whole(head["schema_version"]):
        raise ValueError(f"its schema_version = {short(head['schema_version'])} is not an integer")
    if head["schema_version"] > SCHEMA_VERSION:
        raise ValueError(f"it has schema {head['schema_version']}; this version reads up to {SCHEMA_VERSION}")
    for name, kind in _KINDS.items():
        if type(head[name]) is not kind:
            raise ValueError(f"data.json has {name} = {short(head[name])}")
    if head["dtype"] not in _DTYPES:
        raise ValueError(f"data.json has dtype = {short(head['dtype'])}; tokens are {' or '.join(_DTYPES)}")
    for name in ("train.bin", "valid.bin"):
        head["files"][name]  # raises KeyError if it is missing
    for name in ("held_out", "seed"):
        head["request"][name]
    return head


def write_head(folder: Path, tokens: Tokens, request: dict[str, Any], notes: list[str]) -> None:
    """Write the tokenizer and ``data.json`` next to the tokens."""
    if tokens.tokenizer_json is not None:
        (folder / "tokenizer.json").write_text(tokens.tokenizer_json, encoding="utf-8")
    files = sorted(folder.iterdir())
    head = {
        "schema_version": SCHEMA_VERSION,
        "request": request,
        "dtype": tokens.dtype.name,
        "vocab_size": tokens.vocab_size,
        "end_of_text": tokens.end_of_text,
        "notes": notes,
        "files": {file.name: {"bytes": file.stat().st_size, "blake2b": digest(file)} for file in files},
    }
    (folder / "data.json").write_text(json.dumps(head, indent=1), encoding="utf-8")


def _hashed(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()
