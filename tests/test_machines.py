"""The arithmetic of each kind of processor that ran the tests is in ``tests/golden/arithmetic.toml``.

``docs/distributed.md`` prints what differs. ``./dev test --update-golden`` adds this machine.
"""

import json
import re
import warnings
from pathlib import Path

import pytest
from click.testing import CliRunner

from narrowgauge.cli.main import main
from narrowgauge.measuring.arithmetic import PROBES
from narrowgauge.spec.toml import load_toml
from processors import machine_key

MACHINES = Path(__file__).parent / "golden" / "arithmetic.toml"
HEAD = "# Hashes of what operations give on fixed numbers, with one thread, by kind of processor.\n"


@pytest.mark.usefixtures("one_thread")
def test_a_kind_of_processor_has_the_recorded_arithmetic(update_golden):
    results = json.loads(CliRunner().invoke(main, ["show", "arithmetic"]).stdout)["arithmetic"]
    key = re.sub(r", transformers .*", "", machine_key())
    recorded = load_toml(MACHINES.read_text(encoding="utf-8"))
    if update_golden:
        recorded[key] = results
        text = HEAD
        for name, row in sorted(recorded.items()):
            lines = [f"{json.dumps(probe)} = {json.dumps(bits)}" for probe, bits in row.items()]
            text += "\n" + "\n".join([f"[{json.dumps(name)}]", *lines]) + "\n"
        MACHINES.write_text(text, encoding="utf-8")
    if key not in recorded:
        warnings.warn(f"Nothing is recorded for {key}. Add {results}", stacklevel=1)
    assert recorded.get(key, results) == results
    assert len(recorded) >= 2 and all(list(row) == list(PROBES) for row in recorded.values())
