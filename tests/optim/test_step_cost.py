"""Vector instructions that a step takes for each element, counted in the assembly of its loop.

A regression of speed shows here on any machine with g++. A count depends on g++'s version: of
another version nothing is recorded. Lower a count with each gain.
"""

import re
import subprocess
import sys

import pytest

from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.optim.step import step_cpp
from narrowgauge.spec.storages import STORAGES
from narrowgauge.torch_support import cpp

VERSION = "12.2.0"
COUNTS = {
    "word": (10.62, 4.56),
    "exact": (6.88, 2.81),
    "compact": (12.12, 5.16),
    "states8": (11.00, 4.50),
    "kahan": (12.38, 5.03),
    "collage-light": (24.31, 10.94),
    "collage-plus": (34.25, 15.41),
    "float16/collage-light": (32.50, 15.16),
    "float16/collage-plus": (46.75, 20.88),
    "float32": (4.69, 2.03),
    "float32-states8": (10.38, 4.22),
}
"""With AdamW, for processors with AVX2 and with AVX512, by the g++ of ``VERSION``."""
SLACK = 1.03
LANES = {"x86-64-v3": 8, "x86-64-v4": 16}


def version() -> str:
    """Return the version of g++, or an empty string."""
    try:
        command = ["g++", "-dumpfullversion"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def assembly(storage: str, machine: str) -> list[str]:
    """Return the lines of the usual step: of gradients in the weight's format, without a beta of 0."""
    text = step_cpp.joined_files() + step_cpp.library_text(ADAMW, STORAGES[storage])
    flags = [flag for flag in cpp._FLAGS if flag != "-shared"] + cpp._TUNING
    command = ["g++", *flags, "-fopenmp", f"-march={machine}", "-S", "-o", "-", "-x", "c++", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    is_wide = int(STORAGES[storage].visible == "float32")
    start = re.search(rf"^_ZN\w+11step_groupsILb1ELb{is_wide}[\w.]+:", result.stdout, re.M)
    assert start is not None
    return result.stdout[start.end() : result.stdout.index(".size", start.end())].splitlines()


def loop_of(lines: list[str]) -> list[str]:
    """Return the instructions of the shortest loop that takes square roots."""
    code = []
    labels = {}
    loops = []
    for line in map(str.strip, lines):
        label = re.match(r"(\.L\w+):", line)
        if label:
            labels[label[1]] = len(code)
        elif line and line[0] not in ".#":
            code.append(line)
            jump = re.match(r"j\w+\s+(\.L\w+)", line)
            if jump and jump[1] in labels:
                loops.append(code[labels[jump[1]] :])
    return min((loop for loop in loops if "sqrtp" in " ".join(loop)), key=len)


def count(storage: str, machine: str) -> float:
    """Return vector instructions an element of a loop over two vectors."""
    loop = loop_of(assembly(storage, machine))
    vectors = [line for line in loop if line[0] in "vk" and not line.startswith("vzero")]
    return len(vectors) / (2 * LANES[machine])


@pytest.mark.skipif(sys.platform != "linux" or version() != VERSION, reason="another compiler")
@pytest.mark.parametrize("storage", COUNTS)
def test_a_step_takes_no_more_instructions(storage):
    counted = [round(count(storage, machine), 2) for machine in LANES]
    for now, most in zip(counted, COUNTS[storage], strict=True):
        assert now <= SLACK * most, f"{storage}: {counted} instructions an element"
