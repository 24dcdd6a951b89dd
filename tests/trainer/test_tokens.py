"""Tokens: every byte of a text comes back, epochs hold every window once, and what is no text or no
tokens is refused.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowgauge.trainer.tokens import (
    END_OF_TEXT,
    Tokens,
    load_tokenizer,
    open_tokens,
    order_of_epoch,
    read_texts,
    write_tokens,
)
from text.refusals import refused

TEXTS = ["def one(two):\n\treturn 'ü' 🐦\n", "<|endoftext|> spelled out\n\n" * 9000, "x" * 200_000]


def test_a_text_comes_back_from_its_tokens(tmp_path):
    """Text that spells a special token is text; only the token itself ends a document."""
    tokenizer = load_tokenizer(None)
    write_tokens([*TEXTS, ""], tokenizer, tmp_path)
    ids = np.load(tmp_path / "tokens.npy")
    ends = np.flatnonzero(ids == tokenizer.eos_token_id)
    assert ids.dtype == np.uint16 and len(ends) == len(TEXTS)
    parts = np.split(ids, ends + 1)[:-1]
    assert [tokenizer.decode(part[:-1].tolist()) for part in parts] == TEXTS
    again = load_tokenizer(tmp_path)
    assert again.eos_token == END_OF_TEXT
    assert again(TEXTS[0])["input_ids"] == tokenizer(TEXTS[0])["input_ids"]
    with refused("a folder that is there", name="tokens.npy"):
        write_tokens(["text"], tokenizer, tmp_path)


def test_the_text_files_of_a_folder_are_read_by_name(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_text("second", encoding="utf-8-sig")
    (tmp_path / "a.txt").write_text("first", encoding="utf-8")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    (tmp_path / "d.md").write_text("alone")
    assert [*read_texts(tmp_path)] == ["first", "second"]
    assert [*read_texts(tmp_path / "d.md")] == ["alone"]


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    for file in ("a.txt", "nothing"):
        with refused("no text that can be read", file=tmp_path / file):
            [*read_texts(tmp_path / file)]
    with refused("no text"):
        write_tokens([""], load_tokenizer(None), tmp_path / "out")


def test_a_tokenizer_needs_a_token_that_ends_a_document(tmp_path):
    tokenizer = load_tokenizer(None)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with refused("no end of a document"):
        load_tokenizer(tmp_path)


def saved(folder: Path, ids: np.ndarray) -> Tokens:
    np.save(folder / "tokens.npy", ids)
    return open_tokens(folder)


def test_any_pipeline_may_write_tokens(tmp_path):
    ids = np.arange(1000, dtype=np.uint32)
    tokens = saved(tmp_path, ids)
    assert (len(tokens.train), len(tokens.held_out), tokens.vocab_size) == (950, 50, 1000)
    assert saved(tmp_path, ids).fingerprint == tokens.fingerprint
    ids[500] += 1
    assert saved(tmp_path, ids).fingerprint != tokens.fingerprint


def file_of(content: bytes):
    return lambda file: file.write_bytes(content)


def array_of(values: Any):
    return lambda file: np.save(file, values)


NOT_TOKENS = {
    "no file": Path.exists,
    "an empty file": file_of(b""),
    "half a header": file_of(b"\x93NUMPY\x01\x00v"),
    "numbers that are not whole": array_of(np.linspace(0, 9, 400)),
    "negative numbers": array_of(np.full(400, -100)),
    "flags": array_of(np.ones(400, bool)),
    "text": array_of(["a", "b"]),
    "several rows": array_of(np.ones((20, 20), np.uint16)),
    "one number": array_of(np.uint16(7)),
    "no number": array_of(np.zeros(0, np.uint16)),
}


@pytest.mark.parametrize("name", NOT_TOKENS)
def test_only_one_row_of_whole_numbers_is_tokens(name, tmp_path):
    NOT_TOKENS[name](tmp_path / "tokens.npy")
    with refused("no tokens"):
        open_tokens(tmp_path)


def test_tokens_are_below_the_vocabulary_of_their_tokenizer(tmp_path):
    load_tokenizer(None).save_pretrained(tmp_path)
    assert saved(tmp_path, np.arange(257)).vocab_size == 257
    with refused("tokens of another tokenizer"):
        saved(tmp_path, np.arange(258))


def test_each_epoch_holds_every_window_once_in_another_order(tmp_path):
    tokens = saved(tmp_path, np.arange(1000, dtype=np.uint16))
    count = (950 - 1) // 10
    epochs = [tokens.batch(epoch * count, count, 10, seed=3) for epoch in (0, 1)]
    for epoch in epochs:
        assert epoch.shape == (count, 11) and (np.diff(epoch, axis=1) == 1).all()
        assert sorted(epoch[:, 0]) == [*range(0, 10 * count, 10)]
    assert (epochs[0] != epochs[1]).any()
    across = tokens.batch(count - 2, 4, 10, seed=3)
    assert (across == np.concatenate([epochs[0][-2:], epochs[1][:2]])).all()
    assert order_of_epoch(7, 2, 8).tolist() == [7, 6, 4, 1, 5, 2, 0, 3]  # NumPy's frozen order


def test_validation_is_spread(tmp_path):
    tokens = saved(tmp_path, np.arange(4000, dtype=np.uint16))
    assert tokens.validation(4, 10)[:, 0].tolist() == [3800, 3840, 3890, 3940]
    assert len(tokens.validation(99, 10)) == 19


def test_the_unigram_loss_is_that_of_the_counts(tmp_path):
    ids = np.zeros(400, np.uint16)
    ids[::4] = 1
    expected = -(0.75 * np.log(286 / 382) + 0.25 * np.log(96 / 382))
    assert saved(tmp_path, ids).unigram_loss() == pytest.approx(expected)
