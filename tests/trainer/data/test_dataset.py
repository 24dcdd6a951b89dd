"""Data: the same batches whatever happened before, each window once an epoch, no document on both sides."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import narrowgauge.trainer.data.dataset as data_module
from narrowgauge.errors import DataError, RecordError
from narrowgauge.trainer.data.corpus import Document, Texts, open_texts
from narrowgauge.trainer.data.dataset import Dataset, open_data, prepare_data
from narrowgauge.trainer.data.tokens import cache_folder, read_tokens, tokenize_texts, train_tokenizer, write_tokens

SENTENCE = "the number of bits a weight keeps decides what a step may still change in it"
WORDS = SENTENCE.split()


def text_of(number: int, length: int = 60) -> str:
    """Text that differs per number and repeats words often enough for a tokenizer to learn them."""
    return " ".join(WORDS[(number * place + place * place) % len(WORDS)] for place in range(length)) + f" {number}\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.txt").write_text(text_of(number))
    return folder


@pytest.fixture
def dataset(corpus: Path, tmp_path: Path) -> Dataset:
    return prepare_data(corpus, tmp_path / "run", vocab_size=300, held_out=0.2, seed=1)


def documents(data: Dataset, tokens: np.ndarray) -> list[str]:
    """The texts of one side, decoded."""
    ends = np.flatnonzero(tokens == data.end_of_text)
    starts = [0, *(ends[:-1] + 1)]
    return [data.tokenizer().decode(tokens[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestPreparation:
    def test_every_document_is_on_one_side_and_decodes_to_itself(self, dataset: Dataset) -> None:
        train, valid = documents(dataset, dataset.train), documents(dataset, dataset.valid)
        assert sorted(train + valid) == sorted(text_of(number) for number in range(60))
        assert 3 <= len(valid) <= 25
        assert dataset.vocab_size == 300
        assert dataset.num_tokens + dataset.num_valid_tokens < sum(len(text) for text in train + valid) / 2

    def test_the_same_request_gives_the_same_bytes(self, corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
        again = prepare_data(corpus, tmp_path / "again", vocab_size=300, held_out=0.2, seed=1)
        assert files_of(again.folder) == files_of(dataset.folder)
        assert again.fingerprint == dataset.fingerprint
        other = prepare_data(corpus, tmp_path / "other", vocab_size=300, held_out=0.2, seed=2)
        assert other.fingerprint != dataset.fingerprint

    def test_adding_a_file_moves_no_other_document(self, corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
        (corpus / "000a.txt").write_text(text_of(777))
        more = prepare_data(corpus, tmp_path / "more", vocab_size=300, held_out=0.2, seed=1)
        for side in ("train", "valid"):
            before = documents(dataset, getattr(dataset, side))
            after = documents(more, getattr(more, side))
            assert [text for text in after if text != text_of(777)] == before

    def test_it_is_reused_without_its_source(self, corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
        for file in corpus.iterdir():
            file.unlink()
        again = prepare_data(corpus, tmp_path / "run", vocab_size=300, held_out=0.2, seed=1)
        assert again.fingerprint == dataset.fingerprint == open_data(tmp_path / "run").fingerprint
        with pytest.raises(DataError, match="prepared with seed 1, and 2 was requested"):
            prepare_data(corpus, tmp_path / "run", vocab_size=300, held_out=0.2, seed=2)

    @pytest.mark.parametrize("name", ["train.bin", "valid.bin", "tokenizer.json"])
    def test_damage_is_noticed(self, tmp_path: Path, dataset: Dataset, name: str) -> None:
        content = bytearray((dataset.folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (dataset.folder / name).write_bytes(content)
        with pytest.raises(RecordError, match=f"{name} does not match its checksum"):
            open_data(tmp_path / "run")
        (dataset.folder / name).unlink()
        with pytest.raises(RecordError, match="Cannot use the data of the run"):
            open_data(tmp_path / "run")

    def test_a_failure_leaves_nothing(self, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (corpus / "999.txt").write_bytes(b"\xff\xfe")
        with pytest.raises(DataError, match=r"999\.txt is not UTF-8 text: byte 0xff"):
            prepare_data(corpus, tmp_path / "run", vocab_size=300)
        (corpus / "999.txt").unlink()

        def full(_: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(data_module, "sync_file", full)
        with pytest.raises(RecordError, match="the disk is full"):
            prepare_data(corpus, tmp_path / "run", vocab_size=300)
        assert not (tmp_path / "run").exists()

    def test_a_folder_in_the_way_is_not_touched(self, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "run" / "data").mkdir(parents=True)
        (tmp_path / "run" / "data" / "mine.csv").touch()
        with pytest.raises(RecordError, match=r"it exists and has no data\.json"):
            prepare_data(corpus, tmp_path / "run", vocab_size=300)
        assert (tmp_path / "run" / "data" / "mine.csv").exists()

    def test_a_single_document_gives_up_its_end_and_says_so(self, tmp_path: Path) -> None:
        (tmp_path / "one.txt").write_text(text_of(1, 2000))
        data = prepare_data(tmp_path / "one.txt", tmp_path / "run", vocab_size=280, held_out=0.1)
        assert data.num_valid_tokens == (data.num_tokens + data.num_valid_tokens) // 10
        assert data.notes == [
            f"The data has 1 document, too few to hold one out; the last {data.num_valid_tokens} tokens are held out."
        ]
        whole = np.concatenate([data.train, data.valid])
        assert data.tokenizer().decode(whole[:-1].tolist()) == text_of(1, 2000)
        assert whole[-1] == data.end_of_text

    @pytest.mark.parametrize("seed", range(20))
    def test_neither_side_is_ever_empty(self, tmp_path: Path, seed: int) -> None:
        for number in range(2):
            (tmp_path / f"{number}.md").write_text(text_of(number))
        data = prepare_data(tmp_path, tmp_path / "run", vocab_size=257, held_out=0.5, seed=seed)
        assert data.num_tokens
        assert data.num_valid_tokens

    def test_nothing_held_out(self, corpus: Path, tmp_path: Path) -> None:
        data = prepare_data(corpus, tmp_path / "run", vocab_size=300, held_out=0)
        assert data.num_valid_tokens == 0
        assert list(data.valid_batches(2, 8)) == []
        assert data.batch(0, 2, 8, seed=0).shape == (2, 9)


class TestSources:
    def test_lines_of_json(self, tmp_path: Path) -> None:
        lines = [json.dumps({"text": text_of(number), "id": number}) for number in range(40)]
        file = tmp_path / "lines.jsonl"
        file.write_text(
            "\n".join(lines[:20]) + "\n\n" + "\n".join([*lines[20:], '{"text": ""}', '{"text": "\\ud800"}'])
        )
        texts = [document.text for document in open_texts(str(file)).read()]
        assert texts == [text_of(number) for number in range(40)] + ["?"]
        data = prepare_data(file, tmp_path / "run", vocab_size=300, held_out=0.2)
        valid = documents(data, data.valid)
        file.write_text("\n".join(reversed(lines)))
        other = prepare_data(file, tmp_path / "reversed", vocab_size=300, held_out=0.2)
        assert sorted(text for text in documents(other, other.valid)) == sorted(text for text in valid if text != "?")

    @pytest.mark.parametrize(
        ("line", "word"),
        [
            ("{", "line 2 is not JSON"),
            ('{"body": "a"}', "it has body"),
            ("[]", "it has list"),
            ('{"text": 5}', "no text"),
        ],
    )
    def test_a_line_without_text_is_refused(self, tmp_path: Path, line: str, word: str) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + line)
        with pytest.raises(DataError, match=word):
            prepare_data(tmp_path / "a.jsonl", tmp_path / "run", vocab_size=300)

    def test_a_folder_is_read_in_one_order_without_what_is_no_text(self, tmp_path: Path) -> None:
        for name in ("b.md", "a/z.py", "a.txt", "c.jsonl", "d.png", ".hidden.txt", ".git/x.txt", "empty.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("" if name == "empty.txt" else '{"text": "row"}' if "json" in name else name)
        found = [document.text for document in open_texts(str(tmp_path)).read()]
        assert found == ["a.txt", "a/z.py", "b.md", "row"]

    def test_a_given_tokenizer(self, corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
        data = prepare_data(corpus, tmp_path / "second", tokenizer=dataset.folder, held_out=0.2, seed=1)
        assert np.array_equal(data.train, dataset.train)
        with pytest.raises(DataError, match="has 300 tokens, and vocab_size is 299"):
            prepare_data(corpus, tmp_path / "x", tokenizer=dataset.folder, vocab_size=299)
        with pytest.raises(DataError, match="No tokenizer in"):
            prepare_data(corpus, tmp_path / "x", tokenizer=tmp_path)
        tokenizer = json.loads((dataset.folder / "tokenizer.json").read_text())
        tokenizer["added_tokens"][0]["content"] = "[DONE]"
        tokenizer["model"]["vocab"]["[DONE]"] = tokenizer["model"]["vocab"].pop("<|endoftext|>")
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(DataError, match="no end-of-text token"):
            prepare_data(corpus, tmp_path / "x", tokenizer=tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "[DONE]"}}')
        data = prepare_data(corpus, tmp_path / "third", tokenizer=tmp_path, held_out=0.2, seed=1)
        assert data.end_of_text == dataset.end_of_text

    def test_a_token_map(self, corpus: Path, tmp_path: Path, dataset: Dataset) -> None:
        texts = open_texts(str(corpus))
        folder = tmp_path / "map"
        folder.mkdir()
        write_tokens(folder, tokenize_texts(texts, *train_tokenizer(texts, 300, texts.measure()[1])))
        for number, source in enumerate((folder, folder / "tokens.bin")):
            data = prepare_data(source, tmp_path / f"from-map-{number}", held_out=0.2, seed=1)
            assert np.array_equal(data.train, dataset.train)
            assert np.array_equal(data.valid, dataset.valid)
        with pytest.raises(DataError, match="is tokens already"):
            prepare_data(folder, tmp_path / "x", tokenizer=dataset.folder)
        (folder / "documents.bin").write_bytes(b"\0" * 16)
        with pytest.raises(DataError, match=r"documents\.bin does not match its checksum"):
            prepare_data(folder, tmp_path / "x")

    def test_tokens_beyond_their_vocabulary_are_refused(self, tmp_path: Path) -> None:
        head = {"schema_version": 1, "dtype": "uint16", "vocab_size": 10, "end_of_text": 0, "blake2b": {}}
        (tmp_path / "tokens.json").write_text(json.dumps(head))
        np.array([1, 2, 10, 3], dtype="<u2").tofile(tmp_path / "tokens.bin")
        with pytest.raises(DataError, match="The tokens hold 10, and their vocabulary has 10"):
            prepare_data(tmp_path, tmp_path / "run")

    def test_a_wide_vocabulary_takes_four_bytes(self, tmp_path: Path) -> None:
        head = {"schema_version": 1, "dtype": "uint32", "vocab_size": 100_000, "end_of_text": 0, "blake2b": {}}
        (tmp_path / "tokens.json").write_text(json.dumps(head))
        np.arange(90_000, dtype="<u4").tofile(tmp_path / "tokens.bin")
        data = prepare_data(tmp_path, tmp_path / "run")
        assert np.array_equal(np.concatenate([data.train, data.valid]), np.arange(90_000))

    def test_the_package_datasets_is_asked_for(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(DataError, match=r"pip install 'narrowgauge\[datasets\]'"):
            prepare_data("datasets:some/where", tmp_path / "run", vocab_size=300)

    def test_rows_of_the_package_datasets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Rows(list):
            column_names = ("text",)

        class Package:
            @staticmethod
            def load_dataset(name: str, split: str) -> Rows:
                assert (name, split) == ("some/where", "validation")
                return Rows({"text": text_of(number)} for number in range(3))

        monkeypatch.setitem(sys.modules, "datasets", Package)
        texts = [document.text for document in open_texts("datasets:some/where:validation").read()]
        assert texts == [text_of(number) for number in range(3)]

    def test_refusals(self, tmp_path: Path, corpus: Path) -> None:
        (tmp_path / "empty.txt").touch()
        for source, options, word in (
            (tmp_path / "nowhere", {"vocab_size": 300}, "there is no such file or folder"),
            (tmp_path / "empty.txt", {"vocab_size": 300}, "has no text"),
            (corpus, {"vocab_size": 256}, "vocab_size 256 is too small"),
            (corpus, {}, "needs a vocab_size"),
            (corpus, {"vocab_size": 300, "held_out": 1}, "held_out is 1"),
        ):
            with pytest.raises(DataError, match=word):
                prepare_data(source, tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()


class TestTokenizer:
    def test_every_text_comes_back(self, dataset: Dataset) -> None:
        text = "naïve 1e-3 <|endoftext|>\r\n\t\0 日本 🙂  x"
        tokens = tokenize_texts(Texts("x", lambda: iter([Document("x", text)])), dataset.tokenizer(), 0)
        ((_, ids),) = tokens.read()
        assert dataset.tokenizer().decode(ids[:-1].tolist(), skip_special_tokens=False) == text
        # Text that spells the end of a document does not end it.
        assert ids.tolist().count(dataset.end_of_text) == 1

    def test_a_long_document_is_encoded_in_pieces(self, dataset: Dataset) -> None:
        text = text_of(3, 100_000) * 2 + "x" * 600_000
        tokens = tokenize_texts(Texts("x", lambda: iter([Document("x", text)])), dataset.tokenizer(), 0)
        ((_, ids),) = tokens.read()
        assert dataset.tokenizer().decode(ids[:-1].tolist()) == text


class TestBatches:
    def test_a_batch_depends_on_nothing_but_its_place(self, dataset: Dataset) -> None:
        batches = [dataset.batch(step, 4, 16, seed=3) for step in range(30)]
        assert np.array_equal(open_data(dataset.folder.parent).batch(17, 4, 16, seed=3), batches[17])
        stream = np.concatenate(batches)
        assert np.array_equal(np.concatenate([dataset.batch(step, 12, 16, seed=3) for step in range(10)]), stream)
        assert not np.array_equal(dataset.batch(0, 4, 16, seed=4), batches[0])

    def test_sequences_are_windows_of_the_text(self, dataset: Dataset) -> None:
        num_windows = (dataset.num_tokens - 1) // 16
        epoch = np.concatenate([dataset.batch(step, 1, 16, seed=0) for step in range(num_windows)])
        assert epoch.dtype == np.int64
        assert epoch.shape == (num_windows, 17)
        windows = {tuple(dataset.train[start : start + 17].tolist()) for start in range(0, num_windows * 16, 16)}
        assert {tuple(row) for row in epoch.tolist()} == windows

    def test_validation_is_fixed_full_and_spread(self, dataset: Dataset) -> None:
        every = list(dataset.valid_batches(2, 16))
        num_windows = (dataset.num_valid_tokens - 1) // 16
        assert len(every) == num_windows // 2
        assert {batch.shape for batch in every} == {(2, 17)}
        assert np.array_equal(np.concatenate(every), np.concatenate(list(dataset.valid_batches(2, 16))))
        some = np.concatenate(list(dataset.valid_batches(2, 16, limit=2)))
        assert np.array_equal(some[2], dataset.valid[num_windows // 2 * 16 :][:17])
        assert list(dataset.valid_batches(2, 16, limit=0)) == []
        (small,) = dataset.valid_batches(1000, 16)
        assert small.shape == (num_windows, 17)

    @pytest.mark.parametrize(("tokens", "windows"), [(32, 1), (33, 2), (48, 2), (49, 3)])
    def test_the_last_window_has_a_token_to_predict(self, dataset: Dataset, tokens: int, windows: int) -> None:
        held_out = dataclasses.replace(dataset, valid=dataset.valid[:tokens])
        (batch,) = held_out.valid_batches(8, 16)
        assert batch.shape == (windows, 17)

    def test_a_sequence_longer_than_the_data_is_refused(self, dataset: Dataset) -> None:
        length = dataset.num_tokens
        with pytest.raises(
            DataError, match=f"sequence_length {length} needs {length + 1} tokens; the data has {length}"
        ):
            dataset.batch(0, 1, length, seed=0)
        length = dataset.num_valid_tokens
        with pytest.raises(DataError, match=f"needs {length + 1} tokens; the held-out part has {length}"):
            dataset.valid_batches(1, length)


LIBRARY = """
import sys, sysconfig
root = sysconfig.get_path("stdlib")
sysconfig.get_path = lambda _: root + "/email"
from narrowgauge.trainer.data.dataset import prepare_data
print(prepare_data("stdlib", sys.argv[1], vocab_size=300).fingerprint)
"""


class TestLibrary:
    @pytest.fixture(autouse=True)
    def small_library(self, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A library of 60 small files, so that the test is quick."""
        for file in corpus.iterdir():
            file.rename(file.with_suffix(".py"))
        (corpus / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
        (corpus / "broken.py").write_bytes(b"name = '\xe9'\n")
        for name in ("test", "site-packages"):
            (corpus / name).mkdir()
            (corpus / name / "other.py").write_text("never read")
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(corpus))
        monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))

    def test_it_is_decoded_as_python_would(self) -> None:
        texts = {document.name: document.text for document in open_texts("stdlib").read()}
        assert len(texts) == 62
        assert texts["latin.py"].endswith("name = 'é'\n")
        assert texts["broken.py"] == "name = '�'\n"

    def test_it_comes_from_the_cache_the_second_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = prepare_data("stdlib", tmp_path / "first", vocab_size=300)
        (entry,) = [path for path in (cache_folder() / "data").iterdir() if path.is_dir()]
        assert read_tokens(entry).vocab_size == 300
        with monkeypatch.context() as patch:
            patch.setattr(data_module, "train_tokenizer", None)
            second = prepare_data("stdlib", tmp_path / "second", vocab_size=300)
        assert files_of(first.folder) == files_of(second.folder)
        (entry / "tokens.bin").write_bytes(b"damaged!")
        assert prepare_data("stdlib", tmp_path / "third", vocab_size=300).fingerprint == first.fingerprint
        assert read_tokens(entry).vocab_size == 300

    def test_changed_text_is_not_taken_from_the_cache(self, corpus: Path, tmp_path: Path) -> None:
        first = prepare_data("stdlib", tmp_path / "first", vocab_size=300)
        (corpus / "000.py").write_text("changed = True\n")
        assert prepare_data("stdlib", tmp_path / "second", vocab_size=300).fingerprint != first.fingerprint

    def test_without_a_cache_it_works_and_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = prepare_data("stdlib", tmp_path / "first", vocab_size=300)
        (tmp_path / "file").touch()
        monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "file"))
        second = prepare_data("stdlib", tmp_path / "second", vocab_size=300)
        assert second.fingerprint == first.fingerprint
        assert "cannot be written" in second.notes[0]


def test_processes_that_fill_the_cache_at_once_agree(tmp_path: Path) -> None:
    # A part of the real library, large enough that they do meet; one waits for the other.
    source = str(Path(data_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source, "NARROWGAUGE_CACHE": str(tmp_path / "cache")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", LIBRARY, str(tmp_path / f"run-{number}")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    fingerprints = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert fingerprints[0] == fingerprints[1]
    entries = [path.name for path in (tmp_path / "cache" / "data").iterdir()]
    assert len(entries) == 2
    assert not any(name.startswith(".tmp-") for name in entries)
    assert files_of(tmp_path / "run-0") == files_of(tmp_path / "run-1")
