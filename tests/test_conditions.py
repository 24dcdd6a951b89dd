"""What a run writes beside its figure is what the pages compare with today."""

import pytest

from script_modules import benchmark_module, script_module
from text.refusals import refused

evidence = script_module("docs/evidence.py")


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
def test_a_run_writes_the_digests_that_the_pages_compare():
    conditions = benchmark_module("_conditions")
    for row in ("word random", "float8-row/word", "published/coat", "autocast"):
        for name in conditions.named(row):
            assert conditions.digest(name) == evidence.digest(name) != "gone"


def test_another_text_is_refused():
    starts = benchmark_module("_starts")
    starts.expect_pinned("llama-8m", starts.PINNED["llama-8m"])
    with refused("another text"):
        starts.expect_pinned("llama-8m", "another")
