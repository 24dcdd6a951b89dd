"""An error of ours in a watched loop ends the watch, and not the loop: tests raise it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from narrowgauge.measuring import hooks, laws, meter
from trainer.fixtures import place as place


def raise_it(title: str, error: Exception) -> str:
    raise error


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (hooks, laws, meter):
            patch.setattr(module, "failure_of", raise_it)
        yield
