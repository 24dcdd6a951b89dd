"""What each recipe costs: three from the same starts on the same text, and one page that says it.

``./dev train`` runs this. It is ``narrowgauge compare`` with settings that show something within
minutes on a laptop; every flag of that command may be given too, and overrules them. Without
``--data`` it trains on the source of Python's standard library, 10 MB of real text that is on every
machine, with a tokenizer of its own.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from narrowgauge.cli.main import main
from narrowgauge.spec.models import MODELS
from narrowgauge.trainer.tokens import END_OF_TEXT, write_tokens

# The model ends 0.4 nats below what token frequencies give (6.33), and the late steps are
# small enough for naive rounding to lose most of them. Higher rates make pairs of runs differ by
# chance.
SETTINGS = (
    "--recipes bfloat16/master,bfloat16/word,bfloat16/naive --seeds 3 --sequence-length 128 "
    "--lr 1e-3 --steps 120"
)
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def texts_of(root: Path, skipped: Set[str]) -> Iterator[str]:
    """Yield Python's modules in a folder, by the hashes of their names.

    So the held-out text, which is the last, is like the rest on any machine.
    """
    names = []
    for file in root.rglob("*.py"):
        place = file.relative_to(root)
        if skipped.isdisjoint(place.parts):
            names.append(place.as_posix())
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if text := (root / name).read_bytes().decode("utf-8-sig", "replace"):
            yield text


def trained_coder(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a byte-level BPE with so many tokens, trained on texts."""
    coder = Tokenizer(models.BPE())
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    coder.train_from_iterator(texts, trainer)
    return coder


def stdlib_tokens() -> Path:
    """Return the folder with the tokens of the standard library.

    The first use trains its tokenizer.
    """
    size = MODELS["llama-1m"].vocab_size
    out = Path(__file__).parents[1] / "runs" / f"stdlib-{platform.python_version()}-{size}"
    if (out / "tokens.npy").exists():
        return out
    root = Path(sysconfig.get_path("stdlib"))
    coder = trained_coder(texts_of(root, SKIPPED), size)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=coder, eos_token=END_OF_TEXT)
    return write_tokens(texts_of(root, SKIPPED), tokenizer, out)


if __name__ == "__main__":
    words = ["compare", *SETTINGS.split(), *sys.argv[1:]]  # of a flag given twice the last counts
    if "--data" not in words and "--help" not in words:
        words += ["--data", str(stdlib_tokens())]
    main.main(words, prog_name="narrowgauge")
