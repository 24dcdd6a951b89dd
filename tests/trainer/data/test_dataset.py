"""Data: the same batches whatever happened before, each window once an epoch, no document on both sides."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from narrowgauge.errors import DataError
from narrowgauge.trainer.data.dataset import Dataset, Stream, open_data, prepare_data
from narrowgauge.trainer.data.text import open_texts
from narrowgauge.trainer.data.tokens import load_tokenizer, read_tokens, train_tokenizer, write_tokens

SENTENCE = "the number of bits a weight keeps decides what a step may still change in it"
WORDS = SENTENCE.split(" ")


def text_of(number: int, length: int = 60) -> str:
    """Text that differs per number and repeats words often enough for a tokenizer to learn them."""
    return " ".join(WORDS[(number * place + place * place) % len(WORDS)] for place in range(length)) + f" {number}\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "data"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.txt").write_text(text_of(number))
    return folder


@pytest.fixture
def dataset(corpus: Path) -> Dataset:
    return prepare_data(corpus, vocab_size=300, held_out=0.2, seed=1)


def all_tokens(stream: Stream | np.ndarray) -> np.ndarray:
    return stream[np.arange(len(stream))]


def documents(data: Dataset, stream: Stream | np.ndarray) -> list[str]:
    """Return the texts of one side, decoded."""
    tokens = all_tokens(stream)
    tokenizer = load_tokenizer(data.tokenizer_path)[0]
    ends = np.flatnonzero(tokens == data.end_of_text)
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


# ── preparation ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_document_is_on_one_side_and_decodes_to_itself(dataset: Dataset) -> None:
    train, valid = documents(dataset, dataset.train), documents(dataset, dataset.valid)
    assert sorted(train + valid) == sorted(text_of(number) for number in range(60))
    assert 3 <= len(valid) <= 25 and dataset.vocab_size == 300
    assert dataset.num_tokens + len(dataset.valid) < sum(len(text) for text in train + valid) / 2


def test_a_damaged_entry_of_the_cache_is_made_again(corpus: Path, dataset: Dataset) -> None:
    content = bytearray((dataset.folder / "tokens.bin").read_bytes())
    content[len(content) // 2] ^= 1
    (dataset.folder / "tokens.bin").write_bytes(content)
    assert prepare_data(corpus, vocab_size=300, held_out=0.2, seed=1).fingerprint == dataset.fingerprint
    (dataset.folder / "tokens.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"documents\.bin does not fit"):
        open_data(dataset.folder, 0.2, 1)


def test_a_single_document_gives_up_its_end_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(text_of(1, 2000))
    data = prepare_data(tmp_path / "one.txt", vocab_size=280, held_out=0.1)
    assert len(data.valid) == (data.num_tokens + len(data.valid)) // 10
    assert data.notes == (
        f"The data has 1 document, too few to hold one out; the last {len(data.valid)} tokens are held out.",
    )
    whole = np.concatenate([all_tokens(data.train), all_tokens(data.valid)])
    assert load_tokenizer(data.tokenizer_path)[0].decode(whole[:-1].tolist()) == text_of(1, 2000)


def test_another_seed_holds_out_other_documents(corpus: Path, dataset: Dataset) -> None:
    other = prepare_data(corpus, vocab_size=300, held_out=0.2, seed=2)
    assert set(documents(other, other.valid)) != set(documents(dataset, dataset.valid))


def test_the_unigram_loss_guesses_by_the_training_tokens_alone() -> None:
    data = Dataset(train=np.array([0, 0, 0, 1]), valid=np.array([0, 1, 1, 1, 1]), vocab_size=2)
    # One is added to each count: 4 and 2 of 6.
    assert data.unigram_loss() == pytest.approx(-(math.log(4 / 6) + 4 * math.log(2 / 6)) / 5)


# ── sources ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lines_of_json_are_split_by_their_text(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text_of(number), "id": number}) for number in range(40)]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join([*lines[:20], "", *lines[20:], '{"text": ""}', '{"text": "\\ud800"}']))
    assert [document.text for document in open_texts(str(file)).read()] == [*map(text_of, range(40)), "?"]
    data = prepare_data(file, vocab_size=300, held_out=0.2)
    file.write_text("\n".join(reversed(lines)))
    other = prepare_data(file, vocab_size=300, held_out=0.2)
    assert sorted(documents(other, other.valid)) == sorted(t for t in documents(data, data.valid) if t != "?")


def test_a_folder_is_read_in_one_order_without_what_is_no_text(tmp_path: Path) -> None:
    for name in ("b.md", "a/z.py", "a.txt", "c.jsonl", "d.png", ".hidden.txt", ".git/x.txt", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else '{"text": "row"}' if "json" in name else name)
    assert [document.text for document in open_texts(str(tmp_path)).read()] == ["a.txt", "a/z.py", "b.md", "row"]


def test_a_given_tokenizer(corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
    data = prepare_data(corpus, tokenizer=dataset.folder, held_out=0.2, seed=1)
    assert np.array_equal(all_tokens(data.train), all_tokens(dataset.train))
    with pytest.raises(DataError, match="has 300 tokens, and vocab_size is 299"):
        prepare_data(corpus, tokenizer=dataset.folder, vocab_size=299)
    with pytest.raises(DataError, match="No tokenizer in"):
        prepare_data(corpus, tokenizer=tmp_path)
    tokenizer = json.loads((dataset.folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "[DONE]"
    tokenizer["model"]["vocab"]["[DONE]"] = tokenizer["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DataError, match="no end-of-text token"):
        prepare_data(corpus, tokenizer=tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "[DONE]"}}')
    tokenizer["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    again = prepare_data(corpus, tokenizer=tmp_path, held_out=0.2, seed=1)
    assert again.end_of_text == dataset.end_of_text and again.num_tokens == dataset.num_tokens


def test_the_end_of_text_is_the_one_that_the_model_names(dataset: Dataset, tmp_path: Path) -> None:
    tokenizer = json.loads((dataset.folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 300, "content": "[DONE]"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load_tokenizer(tmp_path)[1] == dataset.end_of_text
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[DONE]"}')
    assert load_tokenizer(tmp_path)[1] == 300


def test_a_token_map_is_referenced(corpus: Path, tmp_path: Path, dataset: Dataset, cache: Path) -> None:
    texts, folder = open_texts(str(corpus)), tmp_path / "map"
    folder.mkdir()
    write_tokens(folder, texts, *train_tokenizer(texts, 300, texts.measure()[1]))
    entries = set(cache.iterdir())
    for source in (folder, folder / "tokens.bin"):
        data = prepare_data(source, held_out=0.2, seed=1)
        assert data.folder == folder and data.fingerprint == dataset.fingerprint
    assert set(cache.iterdir()) == entries
    whole, tokens = read_tokens(folder, check=True), (folder / "tokens.bin").read_bytes()
    assert whole.fingerprint == read_tokens(folder).fingerprint
    (folder / "tokens.bin").write_bytes(bytes([tokens[0] ^ 1]) + tokens[1:])
    with pytest.raises(DataError, match=r"tokens\.bin does not match its checksum"):
        read_tokens(folder, check=True)
    (folder / "documents.bin").write_bytes(b"\0" * 16)
    with pytest.raises(DataError, match=r"documents\.bin does not fit"):
        prepare_data(folder)
    head = json.loads((folder / "tokens.json").read_text())
    (folder / "tokens.json").write_text(json.dumps({**head, "schema_version": 99}))
    with pytest.raises(DataError, match="schema 99; this version reads up to"):
        prepare_data(folder)
    (folder / "tokens.json").write_text(json.dumps({**head, "dtype": "float16"}))
    with pytest.raises(DataError, match="its tokens are float16, and uint16 or uint32 are read"):
        prepare_data(folder)


def test_refusals(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    for source, options, says in (
        (tmp_path / "nowhere", {"vocab_size": 300}, "there is no such file or folder"),
        (tmp_path / "empty.txt", {"vocab_size": 300}, "has no text"),
        (tmp_path / "binary.txt", {"vocab_size": 300}, r"binary\.txt is not UTF-8 text: byte 0xff"),
        (corpus, {"vocab_size": 256}, "vocab_size 256 is too small"),
        (corpus, {}, "needs a vocab_size"),
    ):
        with pytest.raises(DataError, match=says):
            prepare_data(source, **options)


@pytest.mark.parametrize("text", ["naïve 1e-3 <|endoftext|>\r\n\t\0 日本 🙂  x", text_of(3, 100_000) + "x" * 600_000])
def test_every_text_comes_back(dataset: Dataset, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text, newline="")
    data = prepare_data(tmp_path / "a.txt", tokenizer=dataset.folder, held_out=0.01)
    ids = np.concatenate([all_tokens(data.train), all_tokens(data.valid)])
    decoded = load_tokenizer(dataset.tokenizer_path)[0].decode(ids[:-1].tolist(), skip_special_tokens=False)
    # Text that spells the end of a document does not end it.
    assert decoded == text.replace("\r\n", "\n") and ids.tolist().count(dataset.end_of_text) == 1


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_batch_depends_on_nothing_but_its_place(dataset: Dataset) -> None:
    batches = [dataset.batch(step, 4, 16, seed=3) for step in range(30)]
    assert np.array_equal(open_data(dataset.folder, 0.2, 1).batch(17, 4, 16, seed=3), batches[17])
    assert np.array_equal(dataset.batch(17, 4, 16, 3, slice(1, 3)), batches[17][1:3])
    assert np.array_equal(np.concatenate(batches[:6]), np.concatenate([dataset.batch(k, 8, 16, 3) for k in range(3)]))
    assert not np.array_equal(dataset.batch(0, 4, 16, seed=4), batches[0])


def test_an_epoch_holds_every_window_of_the_text_once(dataset: Dataset) -> None:
    num_windows = (dataset.num_tokens - 1) // 16
    epoch = np.concatenate([dataset.batch(step, 1, 16, seed=0) for step in range(num_windows)])
    assert epoch.dtype == np.int64 and epoch.shape == (num_windows, 17)
    tokens = all_tokens(dataset.train)
    windows = {tuple(tokens[start : start + 17].tolist()) for start in range(0, num_windows * 16, 16)}
    assert {tuple(row) for row in epoch.tolist()} == windows


def test_validation_is_fixed_full_and_spread(dataset: Dataset) -> None:
    every, num_windows = list(dataset.valid_batches(2, 16, 10**6)), (len(dataset.valid) - 1) // 16
    assert len(every) == num_windows // 2 and {batch.shape for batch in every} == {(2, 17)}
    assert np.array_equal(np.concatenate(every), np.concatenate(list(dataset.valid_batches(2, 16, 10**6))))
    some = np.concatenate(list(dataset.valid_batches(2, 16, limit=2)))
    assert np.array_equal(some[2], all_tokens(dataset.valid)[num_windows // 2 * 16 :][:17])
    (small,) = dataset.valid_batches(1000, 16, 1)
    assert small.shape == (num_windows, 17)


@pytest.mark.parametrize(("tokens", "windows"), [(32, 1), (33, 2)])
def test_the_last_window_has_a_token_to_predict(dataset: Dataset, tokens: int, windows: int) -> None:
    (batch,) = dataclasses.replace(dataset, valid=all_tokens(dataset.valid)[:tokens]).valid_batches(8, 16, 1)
    assert batch.shape == (windows, 17)


def test_a_sequence_longer_than_the_data_is_refused(dataset: Dataset) -> None:
    length = dataset.num_tokens
    with pytest.raises(DataError, match=f"needs {length + 1} tokens; the data has {length}"):
        dataset.batch(0, 1, length, seed=0)
    length = len(dataset.valid)
    with pytest.raises(DataError, match=f"needs {length + 1} tokens; the held-out part has {length}"):
        dataset.valid_batches(1, length, 1)
