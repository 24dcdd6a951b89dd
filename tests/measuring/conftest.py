"""An error of ours in a watched loop ends the watch, and not the loop: tests raise it."""

from collections.abc import Iterator

import pytest

from narrowgauge.measuring.check import check
from narrowgauge.measuring.diagnose import laws
from narrowgauge.measuring.watch import hooks, meter
from trainer.fixtures import place as place


def raise_it(title: str, error: Exception) -> str:
    raise error


def raise_all_but_reasons(error: Exception) -> str:
    """Raise what is an error of ours or of a test's model, and no reason."""
    if isinstance(error, ArithmeticError):
        return str(error)
    raise error


@pytest.fixture(autouse=True)
def loud() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (hooks, laws, meter):
            patch.setattr(module, "failure_of", raise_it)
        patch.setattr(check, "words_of", raise_all_but_reasons)
        yield
