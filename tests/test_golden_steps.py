"""The bits of every step, linear layer, sum, rounding and cast are those of
``tests/golden/steps.toml``.

``./dev test --update-golden`` records them again. ``golden_steps.py`` says what is computed.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from golden_steps import read, reproducible, sections, write
from ranks import run_ranks

STEPS = Path(__file__).parent / "golden" / "steps.toml"


def on_two_ranks(rank: int) -> str:
    return reproducible(rank, 2)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    def two_ranks() -> str:
        first, second = run_ranks(on_two_ranks, 2, tmp_path_factory.mktemp("ranks"))
        assert first == second
        return first

    return sections(two_ranks)


def test_the_bits_are_as_recorded(computed: dict[str, dict[str, str]], update_golden: bool) -> None:
    if update_golden:
        write(STEPS, computed)
    recorded = read(STEPS)
    # A kind of processor without a record has two sections that nothing can be compared with.
    comparable = {}
    for name, rows in computed.items():
        if name in recorded or " on " not in name:
            comparable[name] = rows
        else:
            warnings.warn(f"Nothing is recorded for {name}: not compared.", stacklevel=1)
    changed = []
    for section, rows in comparable.items():
        for name in rows.keys() | recorded.get(section, {}).keys():
            if rows.get(name) != recorded.get(section, {}).get(name):
                changed.append(f"{section}: {name}")
    assert len(comparable) >= 5 and not changed, f"other bits than recorded: {sorted(changed)}"
