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
from narrowgauge.spec.toml import load_toml

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
    file = value_of("--config", given)
    if "--help" in flags:
        return ["compare", *given]
    taken = flags | keys_of(file)
    return ["compare", *(part for flag in SETTINGS.items() if flag[0] not in taken for part in flag), *given]


def value_of(flag: str, given: list[str]) -> str | None:
    """What a flag was given, as ``--out DIR`` or ``--out=DIR``."""
    for place, word in enumerate(given):
        if word == flag:
            return next(iter(given[place + 1 :]), None)
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def keys_of(file: str | None) -> set[str]:
    """The settings of a file, as flags; none of a file that the command itself will complain of."""
    try:
        table = load_toml(Path(file).read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError):
        return set()
    return {f"--{key.replace('_', '-')}" for key in table}


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
