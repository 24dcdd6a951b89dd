"""A new format, storage, compute, chip or cause is a row and one entry of expectations; a reduction is also an exchange.

One of each is added to a scratch copy of the tree, as CONTRIBUTING.md says, and the tests that read the tables run there. They
fail if another file must be touched too, and without the entries of expectations.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SPEC, EXPECTATIONS = "src/narrowgauge/spec", "tests/expectations.py"


class Edit(NamedTuple):
    """A row, put into a file before the text that begins the next one."""

    file: str
    before: str
    row: str


ADDITIONS = {
    "format": [
        Edit(
            f"{SPEC}/formats.py",
            '    Format("int8", 8,',
            '    Format("float6_e4m1fn", 6, 4, 1, 7, "none", "range in six bits", "this test"),\n',
        ),
        Edit(EXPECTATIONS, '    "float6_e3m2fn": (', '    "float6_e4m1fn": (4, 1, 7, 0),\n'),
    ],
    "storage": [
        Edit(
            f"{SPEC}/storages.py",
            '        Storage(\n            "word",',
            '        Storage(\n            "split12", "bfloat16", TAIL16, MOMENT12, FLOAT32, fallback="split",\n'
            '            loses="18 bits of the first moment, stochastic", source="this test",\n        ),\n',
        ),
        Edit(
            EXPECTATIONS,
            '    "word": Storage(',
            '    "split12": Storage(12, 0.1, tail_bits=16, beside=("tail",), dealt={"exp_avg": (0, 18)}),\n',
        ),
    ],
    "compute": [
        Edit(
            f"{SPEC}/computes.py",
            '    Compute(\n        "mxfp6",',
            '    Compute(\n        "mxfp8-e5m2", *_microscaled("float8_e4m3fn", "float8_e5m2"), fallback="mxfp8",\n'
            '        purpose="mxfp8 with gradients in e5m2", source="this test",\n    ),\n',
        ),
        Edit(EXPECTATIONS, '    "mxfp6": Compute(', '    "mxfp8-e5m2": Compute(2, has=("served",)),\n'),
    ],
    "reduction": [
        Edit(
            f"{SPEC}/sums.py",
            '        Reduction(\n            "reproducible",',
            '        Reduction(\n            "float64", "float64", "float64", error="2^-53 per addition", keeps="nothing",\n'
            '            order_invariant=False, purpose="sums beyond float32", source="this test",\n        ),\n',
        ),
        Edit("src/narrowgauge/distributed/exchanges.py", '    "reproducible": Exact', '    "float64": BackendSum,\n'),
        Edit(EXPECTATIONS, '    "reproducible": Reduction(', '    "float64": Reduction((8, 8)),\n'),
    ],
    "chip": [
        Edit(
            f"{SPEC}/chips.py",
            '    Chip(\n        "L40S",',
            '    Chip(\n        "TEST-96GB", "NVIDIA", "Ada sm89", "PCIe", memory_gb=96, memory_type="GDDR6",\n'
            '        bandwidth_gb_per_second=960, peak_tflops={"float32": 90, "bfloat16": 360}, link="none",\n'
            '        link_gb_per_second=0, peer_gb_per_second=0, host_link="PCIe4 x16", evidence="B", source="a test",\n    ),\n',
        ),
        Edit(EXPECTATIONS, '    "L40S": (', '    "TEST-96GB": (96, 960, 360, 25, 8),\n'),
    ],
    "cause": [
        Edit(
            "src/narrowgauge/analysis/diagnosis/causes.py",
            '    Cause(\n        "gradient-underflow",',
            '    Cause(\n        "test-cause", "a cause that a test adds", "the loss jumps", "Remove the test.", "this test",\n'
            '        {"loss-spikes": 0.2},\n    ),\n',
        ),
        Edit("benchmarks/injections.py", '    "sampler-mismatch": "', '    "test-cause": "it is a test\'s",\n'),
    ],
}
ADDED = ("float6_e4m1fn", "split12", "mxfp8-e5m2", "TEST-96GB", "test-cause")
"""New rows that tests are parametrized by."""
WHOLE = (
    "tests/spec/test_formats.py",
    "tests/spec/test_storages.py",
    "tests/spec/test_computes.py",
    "tests/spec/test_notation.py",
    "tests/spec/test_chips.py",
    "tests/spec/test_show.py::test_each_table_holds_every_row_of_its_words",
    "tests/spec/test_show.py::test_each_compute_and_storage_is_described_once_and_named_elsewhere",
    "tests/test_readme.py::test_the_table_is_the_one_the_words_give",
    "tests/distributed/test_reduction.py::test_every_reduction_has_its_figures",
    "tests/optim/test_codec_packing.py::test_every_kind_of_storage_has_a_representative",
    "tests/optim/test_codec_packing.py::test_scales_and_eight_bit_planes_lie_in_rows_and_nothing_else_does",
    "tests/optim/test_codec_update.py::test_every_stochastic_row_is_listed",
    "tests/optim/test_contracts.py::test_the_page_of_rules_has_the_tables_figures",
    "tests/matmul/test_inference.py::test_what_cannot_be_served_is_refused",
    "tests/matmul/test_narrow_gather.py::test_table",
    "tests/analysis/diagnosis/test_diagnosis.py::test_the_tables_fit_together",
    "tests/test_injected_causes.py::test_each_cause_is_injected_or_says_why_not",
)
"""Tests of whole tables."""
PARAMETRIZED = (
    "tests/numerics/test_casting.py",
    "tests/optim/test_claims.py",
    "tests/optim/test_codec_update.py",
    "tests/matmul/test_linear.py",
    "tests/analysis/monitor/test_alarms.py",
)
"""Tests with a case for each row; of these the cases of the new rows run."""


def scratch_copy(folder: Path, *, without: str = "") -> set[str]:
    """Copy the tree with one row more of each kind; the files that were changed."""
    for name in ("src", "tests", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    for name in ("README.md", "pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, folder / name)
    for edit in (edit for edits in ADDITIONS.values() for edit in edits if edit.file != without):
        text = (folder / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.before) == 1, f"{edit.file} has {text.count(edit.before)} times {edit.before!r}"
        (folder / edit.file).write_text(text.replace(edit.before, edit.row + edit.before), encoding="utf-8")
    return {edit.file for edits in ADDITIONS.values() for edit in edits}


def run_tests(folder: Path, *words: str) -> str:
    """What pytest says in the copy; its last line counts the tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_each_kind_of_row_takes_two_files_and_a_reduction_three() -> None:
    files = {kind: len({edit.file for edit in edits}) for kind, edits in ADDITIONS.items()}
    assert files == {"format": 2, "storage": 2, "compute": 2, "reduction": 3, "chip": 2, "cause": 2}


def test_nothing_else_need_be_touched(tmp_path: Path) -> None:
    scratch_copy(tmp_path)
    said = run_tests(tmp_path, *WHOLE)
    assert " failed" not in said and " error" not in said and " passed" in said, said[-6000:]
    said = run_tests(tmp_path, *PARAMETRIZED, "-k", " or ".join(ADDED))
    assert " failed" not in said and " error" not in said and " passed" in said, said[-6000:]


def test_an_addition_without_its_expectations_fails(tmp_path: Path) -> None:
    scratch_copy(tmp_path, without=EXPECTATIONS)
    said = run_tests(tmp_path, *(f"tests/spec/test_{name}.py" for name in ("formats", "storages", "computes", "chips")))
    for kind in ("format", "storage", "compute", "chip"):
        assert f"tests/expectations.py states each {kind} a second time" in said, said[-6000:]


@pytest.mark.parametrize("kind", ADDITIONS)
def test_contributing_says_how(kind: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(f"### {kind}\n")[2].partition("\n### ")[0]
    assert section and all(Path(edit.file).name in section for edit in ADDITIONS[kind]), section
