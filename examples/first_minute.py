"""What each recipe costs: three from the same starts on the same text, and one page that says it.

``./dev train`` runs this. It is ``narrowgauge compare`` with settings that show something within
minutes on a laptop; every flag of that command may be given too, and overrules them. Without
``--data`` it trains on the source of Python's standard library, 10 MB of real text that is on every
machine, with a tokenizer of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.cli.main import main
from narrowgauge.errors import DataError
from narrowgauge.spec.models import MODELS
from narrowgauge.torch_support.machine import multiplies
from narrowgauge.trainer.tokens import END_OF_TEXT, open_tokens, pieces, write_tokens

RECIPES = ("bfloat16/master", "bfloat16/word", "bfloat16/naive")
# The model ends about a nat below what token frequencies give (6.33), and the late steps are small
# enough for naive rounding to lose most of them. Higher rates make pairs of runs differ by chance.
# A processor that does not multiply bfloat16 takes twice as long for a step, so it takes fewer,
# which still end below that level.
STEPS = 240 if multiplies("bfloat16") else 140
SETTINGS = {
    "--recipes": ",".join(RECIPES), "--seeds": "3", "--steps": str(STEPS), "--sequence-length": "128", "--lr": "1e-3",
    "--gauges-every": "10",
}  # fmt: skip


SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_texts() -> Iterator[str]:
    """Yield the modules of the standard library, in an order that any machine repeats: by a hash
    of the name, so that the held-out end is like the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = {file: file.relative_to(root) for file in root.rglob("*.py")}
    for file, name in sorted(names.items(), key=lambda pair: hash_of(pair[1])):
        is_hidden = any(part.startswith(".") for part in name.parts)
        # Some files test other encodings.
        if (
            not is_hidden
            and SKIPPED.isdisjoint(name.parts[:-1])
            and (text := file.read_text("utf-8-sig", "replace"))
        ):
            yield text


def hash_of(name: Path) -> bytes:
    return hashlib.blake2b(name.as_posix().encode()).digest()


def stdlib_tokens(model: str) -> Path:
    """Return the folder with the tokens of the standard library for a preset.

    The first use trains its tokenizer: byte-level BPE.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    vocab_size = MODELS.get(model, MODELS["llama-1m"]).vocab_size
    out = (
        Path(__file__).parents[1] / "runs" / f"stdlib-{platform.python_version()}-{vocab_size}-npy"
    )
    with contextlib.suppress(DataError):
        open_tokens(out)
        return out
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(
        (piece for text in stdlib_texts() for piece in pieces(text)), trainer
    )
    return write_tokens(stdlib_texts(), tokenizer, END_OF_TEXT, out)


def words(arguments: list[str]) -> list[str]:
    """The words of the command: the settings above, less those that were given or that would
    gainsay what was.
    """
    flags = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if "--help" in flags:
        return ["compare", *arguments]
    settings = {flag: value for flag, value in SETTINGS.items() if flag not in flags}
    if "--data" not in flags:
        model = (
            arguments[arguments.index("--model") + 1 :] if "--model" in arguments else ["llama-1m"]
        )
        settings["--data"] = str(stdlib_tokens(*model[:1]))
    return ["compare", *(part for flag in settings.items() for part in flag), *arguments]


def where(python: Path) -> str:
    """Where the command is that messages and pages name, beside the Python that runs this; nothing
    if the shell finds one.
    """
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
        if end.code != 2 and (refusal := where(Path(sys.executable))):  # a refusal is one line
            print(refusal, file=sys.stderr)
        raise
