"""What each recipe costs: three from the same starts on the same text, and one page that says it.

``./dev train`` runs this. It is ``narrowgauge compare`` with settings that show something within
minutes on a laptop; every flag of that command may be given too, and overrules them. Without
``--data`` it trains on the source of Python's standard library, 10 MB of real text that is on every
machine, with a tokenizer of its own.
"""

from __future__ import annotations

import contextlib
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.cli.main import main
from narrowgauge.errors import DataError, RecordError
from narrowgauge.spec.models import MODELS
from narrowgauge.torch_support.machine import multiplies
from narrowgauge.trainer.data.tokens import END_OF_TEXT, Document, pieces, read_tokens, write_tokens

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


def stdlib_documents() -> Iterator[Document]:
    """Yield the modules of the standard library, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {file: file.relative_to(root) for file in root.rglob("*.py")}
    for file, name in sorted(names.items(), key=lambda pair: pair[1].as_posix()):
        is_hidden = any(part.startswith(".") for part in name.parts)
        # Some files test other encodings.
        if (
            not is_hidden
            and SKIPPED.isdisjoint(name.parts[:-1])
            and (text := file.read_text("utf-8-sig", "replace"))
        ):
            yield Document(name.as_posix(), text)


def stdlib_tokens(model: str) -> Path:
    """Return a token map of the standard library for a preset.

    The first use trains its tokenizer: byte-level BPE.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    vocab_size = MODELS.get(model, MODELS["llama-1m"]).vocab_size
    out = Path(__file__).parents[1] / "runs" / f"stdlib-{platform.python_version()}-{vocab_size}"
    with contextlib.suppress(DataError):
        return read_tokens(out).folder
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(
        (text for document in stdlib_documents() for text in pieces(document.text)), trainer
    )
    with contextlib.suppress(RecordError):  # another process was faster
        write_tokens(stdlib_documents(), tokenizer, tokenizer.token_to_id(END_OF_TEXT), out)
    return read_tokens(out).folder


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
