"""What each recipe costs: three from the same starts on the same text, and one page that says it.

``./dev train`` runs this. It is ``narrowgauge compare`` with settings that show something within minutes on a laptop; every
flag of that command may be given too, and overrules them.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

from narrowgauge.cli.main import main

RECIPES = ("bfloat16/master", "bfloat16/word", "bfloat16/naive")
# The model ends about a nat below what token frequencies give (6.33), and the late steps are small enough for naive rounding to
# lose most of them. Higher rates make pairs of runs differ by chance. Short sequences keep processors without bfloat16 quick.
SETTINGS = {
    "--recipes": ",".join(RECIPES), "--seeds": "3", "--steps": "240", "--sequence-length": "128", "--lr": "1e-3",
    "--gauges-every": "10",
}  # fmt: skip


def words(given: list[str]) -> list[str]:
    """The words of the command: the settings above, less those that were given or that would gainsay what was."""
    flags = {word.partition("=")[0] for word in given if word.startswith("--")}
    if "--help" in flags:
        return ["compare", *given]
    return ["compare", *(part for flag in SETTINGS.items() if flag[0] not in flags for part in flag), *given]


def where(python: Path) -> str:
    """Where the command is that messages and pages name, beside the Python that runs this; nothing if the shell finds one."""
    folder = python.parent
    if shutil.which("narrowgauge") or not (folder / "narrowgauge").exists():
        return ""
    with contextlib.suppress(ValueError):
        folder = folder.relative_to(Path.cwd())
    return f"The command is {folder / 'narrowgauge'}; 'source {folder / 'activate'}' lets you call it narrowgauge."


if __name__ == "__main__":
    try:
        main.main(words(sys.argv[1:]), prog_name="narrowgauge")
    except SystemExit as end:
        if end.code != 2 and (said := where(Path(sys.executable))):  # a refusal is one line
            print(said, file=sys.stderr)
        raise
