"""Data: the same batches whatever happened before, each window once an epoch in a known order, no
document on both sides.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrowgauge.errors import DataError, RecordError
from narrowgauge.trainer.data.dataset import Dataset, Stream, open_data, shuffled
from narrowgauge.trainer.data.tokens import (
    END_OF_TEXT,
    Document,
    load_tokenizer,
    pieces,
    read_documents,
    read_tokens,
    write_tokens,
)

SENTENCE = "the number of bits a weight keeps decides what a step may still change in it"
WORDS = SENTENCE.split(" ")


def text_of(number: int, length: int = 60) -> str:
    """Text that differs per number and repeats words often enough for a tokenizer to learn them."""
    return (
        " ".join(WORDS[(number * place + place * place) % len(WORDS)] for place in range(length))
        + f" {number}\n"
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.txt").write_text(text_of(number))
    return folder


def tokenized(source: Path, out: Path, tokenizer: Path | None = None) -> Path:
    return write_tokens(read_documents(source), *load_tokenizer(tokenizer), out)


@pytest.fixture
def dataset(corpus: Path, tmp_path: Path) -> Dataset:
    return open_data(tokenized(corpus, tmp_path / "tokens"), 0.2)


def all_tokens(stream: Stream | np.ndarray) -> np.ndarray:
    return stream[np.arange(len(stream))]


def documents(data: Dataset, stream: Stream | np.ndarray) -> list[str]:
    """Return the texts of one side, decoded."""
    tokens = all_tokens(stream)
    tokenizer = load_tokenizer(data.tokenizer_path)[0]
    ends = np.flatnonzero(tokens == data.end_of_text)
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


def test_every_document_is_on_one_side_and_decodes_to_itself(dataset: Dataset) -> None:
    train = documents(dataset, dataset.train)
    valid = documents(dataset, dataset.valid)
    assert sorted(train + valid) == sorted(text_of(number) for number in range(60))
    assert 3 <= len(valid) <= 25 and dataset.vocab_size == 257


def test_a_single_document_gives_up_its_end_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(text_of(1, 2000))
    data = open_data(tokenized(tmp_path / "one.txt", tmp_path / "tokens"), 0.1)
    assert len(data.valid) == (data.num_tokens + len(data.valid)) // 10
    assert data.notes == (
        f"The data has 1 document, too few to hold one out; the last {len(data.valid)} tokens are "
        "held out.",
    )
    tokens = np.concatenate([all_tokens(data.train), all_tokens(data.valid)])
    assert load_tokenizer(data.tokenizer_path)[0].decode(tokens[:-1].tolist()) == text_of(1, 2000)


def test_the_unigram_loss_guesses_by_the_training_tokens_alone() -> None:
    data = Dataset(train=np.array([0, 0, 0, 1]), valid=np.array([0, 1, 1, 1, 1]), vocab_size=2)
    # One is added to each count: 4 and 2 of 6.
    assert data.unigram_loss() == pytest.approx(-(math.log(4 / 6) + 4 * math.log(2 / 6)) / 5)


def test_lines_of_json_are_split_by_their_text(tmp_path: Path) -> None:
    lines = []
    for number in range(40):
        lines.append(json.dumps({"text": text_of(number), "id": number}))
    file = tmp_path / "lines.jsonl"
    file.write_text(
        "\n".join([*lines[:20], "", *lines[20:], '{"text": ""}', '{"text": "\\ud800"}'])
    )
    assert [document.text for document in read_documents(file)] == [*map(text_of, range(40)), "?"]
    data = open_data(tokenized(file, tmp_path / "a"), 0.2)
    file.write_text("\n".join(reversed(lines)))
    from_reversed = open_data(tokenized(file, tmp_path / "b"), 0.2)
    assert sorted(documents(from_reversed, from_reversed.valid)) == sorted(
        t for t in documents(data, data.valid) if t != "?"
    )


def test_a_folder_is_read_in_one_order_without_what_is_no_text(tmp_path: Path) -> None:
    for name in (
        "b.md",
        "a/z.py",
        "a.txt",
        "c.jsonl",
        "d.png",
        ".hidden.txt",
        ".git/x.txt",
        "empty.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "" if name == "empty.txt" else '{"text": "row"}' if "json" in name else name
        )
    os.mkfifo(tmp_path / "pipe.txt")  # whose writer never comes
    assert [document.text for document in read_documents(tmp_path)] == [
        "a.txt",
        "a/z.py",
        "b.md",
        "row",
    ]


def test_a_folder_that_cannot_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("a")
    true_scandir = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return true_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"Cannot read the text in .*closed: Permission denied"):
        list(read_documents(tmp_path))


def test_the_end_of_text_is_the_one_that_the_tokenizer_names(
    dataset: Dataset, tmp_path: Path
) -> None:
    tokenizer = json.loads((dataset.folder / "tokenizer.json").read_text())
    place = tmp_path / "other"
    place.mkdir()
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": 257, "content": "[DONE]"}
    )
    tokenizer["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_tokenizer(place)[1] == dataset.end_of_text
    (place / "tokenizer_config.json").write_text('{"eos_token": {"content": "[DONE]"}}')
    data = open_data(tokenized(tmp_path / "corpus", tmp_path / "again", place), 0.2)
    assert data.end_of_text == 257 and data.num_tokens == dataset.num_tokens
    (place / "tokenizer_config.json").unlink()
    (place / "tokenizer.json").write_text(json.dumps(tokenizer).replace(END_OF_TEXT, "[END]"))
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(place)
    with pytest.raises(DataError, match="No tokenizer in"):
        load_tokenizer(tmp_path)


def test_damaged_token_maps_are_refused(dataset: Dataset) -> None:
    folder = dataset.folder
    assert open_data(folder / "tokens.bin", 0.2).fingerprint == dataset.fingerprint
    head = json.loads((folder / "tokens.json").read_text())
    content = (folder / "tokens.bin").read_bytes()
    for name, changed, says in (
        ("tokens.bin", content[:-2], r"documents\.bin does not fit"),
        ("documents.bin", b"\0" * 16, r"documents\.bin does not fit"),
        (
            "tokens.json",
            json.dumps({**head, "schema_version": 99}).encode(),
            "schema 99; this version reads 1",
        ),
        (
            "tokens.json",
            json.dumps({**head, "dtype": "float16"}).encode(),
            "its tokens are float16",
        ),
        ("tokens.bin", b"", "empty"),
    ):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(changed)
        with pytest.raises(DataError, match=says):
            open_data(folder, 0.2)
        (folder / name).write_bytes(before)
    with pytest.raises(RecordError, match="is not empty"):
        tokenized(folder / "tokenizer.json", folder)


@pytest.mark.parametrize("num_tokens", [100_000, 5_000_000])
def test_a_fingerprint_sees_other_tokens_and_another_order(num_tokens: int, tmp_path: Path) -> None:
    """All tokens of a small map, samples of a large one."""
    tokens = np.arange(num_tokens, dtype="<u2")
    head = {"schema_version": 1, "dtype": "uint16", "vocab_size": 1 << 16, "end_of_text": 0}
    (tmp_path / "tokens.json").write_text(json.dumps(head))
    prints = []
    for changed in (
        tokens,
        np.roll(tokens, 1),
        tokens[:-1],
        np.where(np.arange(num_tokens) == 3000, 7, tokens),
    ):
        changed.astype("<u2").tofile(tmp_path / "tokens.bin")
        prints.append(read_tokens(tmp_path).fingerprint)
    assert len(set(prints)) == (4 if num_tokens < 1 << 21 else 3)


def test_refusals_of_text(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    for source, says in (
        ("nowhere", "there is no such file or folder"),
        ("empty.txt", "there is no text"),
        ("binary.txt", r"binary\.txt is not UTF-8 text: byte 0xff"),
    ):
        with pytest.raises(DataError, match=says):
            tokenized(tmp_path / source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text", ["naïve 1e-3 <|endoftext|>\r\n\t\0 日本 🙂  x", text_of(3, 100_000) + "x" * 600_000]
)
def test_every_text_comes_back(tmp_path: Path, text: str) -> None:
    tokenizer, end = load_tokenizer(None)
    tokens = read_tokens(write_tokens([Document("a", text)], tokenizer, end, tmp_path / "tokens"))
    assert "".join(pieces(text)) == text and max(map(len, pieces("x" * 600_000))) == 4096
    decoded = tokenizer.decode(tokens.ids[:-1].tolist(), skip_special_tokens=False)
    # Text that spells the end of a document does not end it.
    assert decoded == text and tokens.ids.tolist().count(end) == 1


def test_a_batch_depends_on_nothing_but_its_place(dataset: Dataset) -> None:
    batches = [dataset.batch(4 * step, 4, 16, seed=3) for step in range(30)]
    assert np.array_equal(open_data(dataset.folder, 0.2).batch(68, 4, 16, seed=3), batches[17])
    assert np.array_equal(dataset.batch(69, 2, 16, 3), batches[17][1:3])
    assert np.array_equal(np.concatenate(batches[:6]), dataset.batch(0, 24, 16, 3))
    assert not np.array_equal(dataset.batch(0, 4, 16, seed=4), batches[0])


def test_an_epoch_holds_every_window_of_the_text_once(dataset: Dataset) -> None:
    num_windows = (dataset.num_tokens - 1) // 16
    epoch = np.concatenate([dataset.batch(step, 1, 16, seed=0) for step in range(num_windows)])
    assert epoch.dtype == np.int64 and epoch.shape == (num_windows, 17)
    tokens = all_tokens(dataset.train)
    windows = set()
    for start in range(0, num_windows * 16, 16):
        windows.add(tuple(tokens[start : start + 17].tolist()))
    assert {tuple(row) for row in epoch.tolist()} == windows


def test_validation_is_fixed_and_spread(dataset: Dataset) -> None:
    num_windows = (len(dataset.valid) - 1) // 16
    every = dataset.validation(10**6, 16)
    assert every.shape == (num_windows, 17) and dataset.num_validation(10**6, 16) == num_windows
    some = dataset.validation(4, 16)
    assert np.array_equal(some[2], all_tokens(dataset.valid)[num_windows // 2 * 16 :][:17])
    assert np.array_equal(dataset.validation(4, 16, slice(1, 3)), some[1:3])


@pytest.mark.parametrize(("tokens", "windows"), [(32, 1), (33, 2)])
def test_the_last_window_has_a_token_to_predict(
    dataset: Dataset, tokens: int, windows: int
) -> None:
    short = dataclasses.replace(dataset, valid=all_tokens(dataset.valid)[:tokens])
    assert short.validation(8, 16).shape == (windows, 17)


def test_a_sequence_longer_than_the_data_is_refused(dataset: Dataset) -> None:
    length = dataset.num_tokens
    with pytest.raises(DataError, match=f"needs {length + 1} tokens; the data has {length}"):
        dataset.batch(0, 1, length, seed=0)
    length = len(dataset.valid)
    with pytest.raises(
        DataError, match=f"needs {length + 1} tokens; the held-out part has {length}"
    ):
        dataset.validation(1, length)


def mix(word: int) -> int:
    """splitmix64 as published, in integers that cannot overflow."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def place_in_order(item: int, num_windows: int, seed: int) -> int:
    epoch, place = divmod(item, num_windows)
    key = mix((mix(seed % 2**64) + epoch) % 2**64)
    half = 3
    while 4**half < num_windows:
        half += 1
    while True:
        high, low = divmod(place, 2**half)
        for number in range(6):
            high, low = low, high ^ mix((key + mix(low + (number << 40))) % 2**64) % 2**half
        place = high * 2**half + low
        if place < num_windows:
            return place


@pytest.mark.parametrize("num_windows", [1, 2, 5, 64, 65, 4097])
def test_each_epoch_holds_every_window_once(num_windows: int) -> None:
    items = np.arange(3 * num_windows, dtype=np.uint64)
    epochs = shuffled(items, num_windows, seed=7).reshape(3, num_windows)
    assert (np.sort(epochs, axis=1) == np.arange(num_windows)).all()
    if num_windows > 60:
        assert not (epochs[0] == epochs[1]).all()


@pytest.mark.parametrize(
    ("num_windows", "seed"), [(1, 0), (7, -1), (1000, 42), (2**33 + 1, 2**70 + 5)]
)
def test_it_is_the_order_of_python_integers(num_windows: int, seed: int) -> None:
    """An old run must find its order again in every later version."""
    items = [0, 1, num_windows - 1, num_windows, 5 * num_windows + 3, 2**40]
    places = shuffled(np.array(items, dtype=np.uint64), num_windows, seed).tolist()
    assert places == [place_in_order(item, num_windows, seed) for item in items]
