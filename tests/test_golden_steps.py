"""The bits of every step and linear layer are those of ``tests/golden/steps.toml``.

``./dev test --update-golden`` records them again. ``golden_steps.py`` says what is computed.
"""

import warnings
from pathlib import Path

from golden_steps import read, sections, write

STEPS = Path(__file__).parent / "golden" / "steps.toml"


def test_the_bits_are_as_recorded(update_golden):
    computed = sections()
    if update_golden:
        write(STEPS, computed)
    recorded = read(STEPS)
    # A kind of processor without a record has a section that nothing can be compared with.
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
    assert len(comparable) >= 2 and not changed, f"other bits than recorded: {sorted(changed)}"
