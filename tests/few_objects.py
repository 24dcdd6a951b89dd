"""A fixture that keeps audited loops quick: each audited step looks at all objects that Python's garbage collector knows.

In a process that has imported frameworks and run other tests these are millions. Import it where it is to hold; it is used by
all tests of that place.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Set the objects of imported packages and of earlier tests aside."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
