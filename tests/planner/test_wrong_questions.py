"""Wrong questions: each is refused in one line with an advice, and none is half done in silence."""

import math

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.plan import plan
from narrowgauge.planner.program import read_program

WRONG = {
    "model": ("./nowhere", "nowhere/there", "a--b/c", "..", "", 5),
    "tokens": (math.nan, 0.5, math.inf, "1e9"),
    "lora": (-1, 1.5, math.nan, "16", 99_999_999),
    "chips": (1.5, 0, -8, math.nan, True),
    "sequence_length": (0, 512.5, math.nan),
    "tokens_per_step": (0, math.nan, math.inf, 100),
    "base": ("nf5", "float8", "nf4"),
    "layout": ("tensr=2", 5),
    "program": ("torchtitn", "los=whole", "loss=none"),
    "experts": ("nf5", "nf4"),
    "recipes": (5, [5], "no/such"),
    "foo": (3,),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_values_that_no_question_has_are_refused(name):
    for value in WRONG[name]:
        with pytest.raises(NarrowgaugeError) as error:
            plan(**{"model": "llama-8b", "chip": "H100-SXM", name: value})
        text = str(error.value)
        assert "\n" not in text and (error.value.advice or "must be" in text), text


def test_a_program_is_read_with_its_fields():
    program = read_program("torchtitan, loss=chunked, release=true")
    assert (program.name, program.loss, program.release) == ("torchtitan", "chunked", True)
