"""Storages: the table's figures, how fields share words, and the names that compose a row."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

import expectations
from narrowgauge.spec.storages import (
    MOMENT_CODES,
    STATE_NAMES,
    STORAGES,
    VISIBLE,
    WEIGHT_CODES,
    Code,
    Storage,
    find,
    for_vectors,
    low_parts,
    packed,
    width_of,
)

Fields = tuple[tuple[str, int], ...]
every_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_row_has_its_figures() -> None:
    found = {n: (row.bytes_per_param, row.bytes_per_row, row.tail_bits, row.beside) for n, row in STORAGES.items()}
    wanted = {
        n: (row.bytes_per_param, row.row_bytes, row.tail_bits, row.beside) for n, row in expectations.STORAGES.items()
    }
    assert found == wanted, "tests/expectations.py states each storage a second time"


@every_storage
def test_bytes_are_those_of_the_words_that_hold_the_fields(storage: Storage) -> None:
    in_words = sum(width_of(group) for group in storage.packing) / 8
    assert storage.bytes_per_param == 2 * VISIBLE[storage.visible][0] / 8 + in_words
    assert in_words >= sum(bits for _, bits in storage.fields) / 8
    assert sorted(itertools.chain(*storage.packing)) == sorted(storage.fields)


@every_storage
def test_a_row_is_a_value_that_says_where_it_comes_from(storage: Storage) -> None:
    assert STORAGES[storage.name] is storage and hash(storage) == hash(replace(storage))
    assert storage.loses and storage.source
    assert storage.name.count("/") <= 1 and storage.arithmetic in ("float32", "float64", "expansion")


@every_storage
def test_fallbacks_and_vectors_are_rows_of_the_same_weight_that_lose_less(storage: Storage) -> None:
    fallback, vectors = STORAGES[storage.fallback], for_vectors(storage)
    for other in (fallback, vectors):
        assert {storage.visible, other.visible} in ({storage.visible}, {"float32", "bfloat16"})
    assert fallback.name not in ("naive", "no-master") and vectors.bytes_per_param >= storage.bytes_per_param
    assert for_vectors(vectors) == vectors


def test_throughout_holds_nothing_but_float16() -> None:
    row = STORAGES["float16-throughout/naive"]
    assert row.visible == "float16" and dict(row.fields) == {"exp_avg": 16, "exp_avg_sq": 15}
    for code in (row.weight, row.exp_avg, row.exp_avg_sq):
        # The normal numbers of float16 begin at 2^-14, its steps at 2^-24; what IEEE calls infinite is one more binade.
        assert (code.exponent_bits, code.mantissa_bits, code.lowest, code.highest) == (5, 10, -14, 16)
        assert code.rounding == "nearest" and code.is_window and not code.scaled
    # A second moment of zero would make the next step unbounded.
    assert row.exp_avg_sq.hold and not row.exp_avg_sq.signed


def test_ours_keep_vectors_whole_and_baselines_as_their_sources_do() -> None:
    masters = {"master", "float16/master", "float32", "float64/float64", "master64", "float16/master64"}
    whole = {name for name, row in STORAGES.items() if for_vectors(row).name in masters}
    assert whole == {name for name, row in expectations.STORAGES.items() if row.vectors_whole}
    assert {name for name, row in STORAGES.items() if for_vectors(row) is row} == set(STORAGES) - whole | masters


@every_storage
def test_the_stored_weight_reaches_from_what_the_model_sees_to_its_code(storage: Storage) -> None:
    """Visible bits and tail are together as wide as the code says, and no tail lies beside a copy or a low part."""
    bits, lacking, exponent = VISIBLE[storage.visible]
    if storage.tail_bits:
        assert not storage.master and storage.weight.parts == 1
        assert lacking - storage.tail_bits == 23 - storage.weight.mantissa_bits
    assert (exponent != 0) == (bits < 32 - lacking)


def test_stochastic_rows_are_those_with_a_stochastic_code() -> None:
    stochastic = {name for name, row in STORAGES.items() if row.is_stochastic}
    assert stochastic == {name for name, row in expectations.STORAGES.items() if row.dealt}


def test_scaled_names_are_those_kept_relative_to_a_row() -> None:
    assert STORAGES["compact"].scaled == STORAGES["states8"].scaled == STORAGES["float32-states8"].scaled == STATE_NAMES
    assert STORAGES["float8/collage-plus"].scaled == ("weight", *STATE_NAMES)
    assert STORAGES["word"].scaled == STORAGES["collage-plus"].scaled == ()


def test_low_parts_are_numbered_from_the_second() -> None:
    triple = STORAGES["float8/collage-plus"].weight
    assert low_parts("weight", triple) == ("weight_low", "weight_low2")
    assert low_parts("weight", replace(triple, parts=1)) == ()
    names = [name for name, _ in STORAGES["float8/collage-plus"].fields]
    assert names == ["weight_low", "weight_low2", "exp_avg", "exp_avg_sq", "exp_avg_sq_low", "exp_avg_sq_low2"]


@pytest.mark.parametrize(
    ("states", "fields"),
    [
        ((), {"tail": 8}),
        ((("momentum_buffer", "exp_avg"),), {"tail": 8, "momentum_buffer": 12}),
        ((("sum", "exp_avg_sq"), ("exp_avg", "exp_avg")), {"tail": 8, "sum": 12, "exp_avg": 12}),
    ],
)
def test_a_rule_with_other_states_keeps_those(states: tuple[tuple[str, str], ...], fields: dict[str, int]) -> None:
    word = STORAGES["word"]
    row = word.keeping(states)
    assert dict(row.fields) == fields and (row.name, row.visible, row.weight) == ("word", "bfloat16", word.weight)
    assert [row.code(name) for name, _ in states] == [getattr(word, role) for _, role in states]
    assert row.code("weight") is word.weight and row.code("exp_avg_sq") is word.exp_avg_sq
    assert word.keeping(word.states) is word


def test_scales_follow_the_states_a_rule_keeps() -> None:
    row = STORAGES["compact"].keeping((("momentum_buffer", "exp_avg"),))
    assert row.scaled == ("momentum_buffer",) and row.bytes_per_row == 4
    assert STORAGES["compact"].keeping(()).scaled == () and STORAGES["compact"].keeping(()).is_stochastic
    composed = find("bfloat16+e6m5+float32")
    assert composed is not None and composed.is_stochastic and not composed.keeping(()).is_stochastic
    assert STORAGES["collage-plus"].keeping((("exp_avg_sq", "exp_avg"),)).bytes_per_param == 8


# ── sharing words ───────────────────────────────────────────────────────────────────────────────────────────────────


def fewest_bits(sizes: tuple[int, ...]) -> int:
    """By trying: the first field with any choice of the others, and what is left by itself."""
    if not sizes:
        return 0
    first, rest = sizes[0], sizes[1:]
    best = 1 << 30
    for count in range(len(rest) + 1):
        for chosen in itertools.combinations(range(len(rest)), count):
            total = first + sum(rest[k] for k in chosen)
            if total <= 32:
                width = 8 if total <= 8 else 16 if total <= 16 else 32
                left = tuple(size for k, size in enumerate(rest) if k not in chosen)
                best = min(best, width + fewest_bits(left))
    return best


def some_fields() -> list[Fields]:
    generator = random.Random(0)
    likely = (1, 3, 4, 7, 8, 8, 8, 9, 11, 12, 12, 13, 15, 16, 16, 17, 20, 24, 25, 31, 32)
    return [
        tuple((f"f{k}", generator.choice(likely)) for k in range(generator.randint(0, 6))) for _ in range(400)
    ]  # fmt: skip


def test_fields_share_words_without_overlap_and_in_the_fewest_bits() -> None:
    for fields in some_fields():
        groups = packed(fields)
        assert sorted(itertools.chain(*groups)) == sorted(fields)
        assert all(0 < sum(bits for _, bits in group) <= width_of(group) <= 32 for group in groups)
        assert sum(map(width_of, groups)) == fewest_bits(tuple(bits for _, bits in fields)), fields
        assert all(len(group) == 1 for group in groups if any(bits in (16, 32) for _, bits in group))


def test_of_equal_ways_the_one_with_the_fewest_words_is_taken() -> None:
    eights = tuple((name, 8) for name in "abcd")
    assert packed(eights) == (eights,)
    assert len(packed(eights[:2])) == 1
    # Three bytes are a word of 8 bits and one of 16, and the first field, the tail, stays readable by itself.
    assert packed(eights[:3]) == ((("a", 8),), (("b", 8), ("c", 8)))
    assert packed((("a", 16), ("b", 8), ("c", 8))) == ((("a", 16),), (("b", 8), ("c", 8)))
    assert packed(()) == ()


@pytest.mark.parametrize(("bits", "width"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32)])
def test_a_lone_field_takes_the_next_width(bits: int, width: int) -> None:
    assert width_of((("a", bits),)) == width and packed((("a", bits),)) == ((("a", bits),),)


def test_more_than_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="'wide' is wider than a 32-bit word"):
        packed((("tail", 8), ("wide", 33)))
    row = replace(STORAGES["word"], name="wide", exp_avg=Code("e8m24", 8, 24))
    with pytest.raises(ValueError, match="'exp_avg'"):
        _ = row.packing


# ── composed rows ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("weight", WEIGHT_CODES)
def test_any_codes_compose_a_row(weight: str) -> None:
    for first, second in itertools.product(MOMENT_CODES, MOMENT_CODES):
        name = f"{weight}+{first}+{second}"
        row = find(name)
        if not MOMENT_CODES[first].signed:
            assert row is None
            continue
        assert row is not None and row == find(name) and row.name == name
        assert (row.weight, row.exp_avg, row.exp_avg_sq) == (
            WEIGHT_CODES[weight],
            MOMENT_CODES[first],
            MOMENT_CODES[second],
        )
        assert row.visible == "bfloat16" and row.arithmetic == "float32" and for_vectors(row).name == "master"
        bits = 32 + 16 * (row.weight.parts - 1) + row.tail_bits
        bits += sum(code.bits * code.parts for code in (row.exp_avg, row.exp_avg_sq))
        assert bits <= 8 * row.bytes_per_param <= bits + 20
        assert row.loses == "nothing" if name == "tail16+float32+float32" else "bits of the" in row.loses


@pytest.mark.parametrize(
    ("composed", "own"),
    [
        ("tail8+e6m5+e7m5", "word"),
        ("tail8+e4m3-row+e5m3-row", "compact"),
        ("bfloat16-stochastic+e4m3-row+e5m3-row", "states8"),
        ("bfloat16-pair+bfloat16+bfloat16", "kahan"),
        ("tail8+bfloat16+e8m15", "split8"),
        ("bfloat16+bfloat16+bfloat16", "naive"),
        ("tail16+float32+float32", "exact"),
    ],
)
def test_the_tables_own_rows_can_be_composed(composed: str, own: str) -> None:
    row = find(composed)
    assert row is not None
    said = {"name": own, "vectors": row.vectors, "loses": row.loses, "fallback": row.fallback, "source": row.source}
    assert row == replace(STORAGES[own], **{**said, "name": composed})
    assert find(own) is STORAGES[own]


@pytest.mark.parametrize(
    "name",
    [
        "", "+", "++", "wrod", "tail8", "tail8+bfloat16", "tail8+bfloat16+", "+bfloat16+float32", "tail8+e7m5+e7m5",
        "tail8+e5m3-row+float32", "tail8+bfloat16+float32+float32", "tail8 + bfloat16 + float32", "float32+float32+float32",
        "tail8+bfloat16+tail8", "split", "WORD",
    ],
)  # fmt: skip
def test_what_composes_nothing_is_not_found(name: str) -> None:
    assert (find(name) is None) == (name not in STORAGES)


def test_what_is_lost_is_counted() -> None:
    words = {
        name: row.loses for name in ("tail8+bfloat16+float32", "bfloat16-pair+e6m5+e5m3-row") if (row := find(name))
    }
    assert words == {
        "tail8+bfloat16+float32": "8 bits of the weight, 16 bits of the first moment",
        "bfloat16-pair+e6m5+e5m3-row": "8 bits of the weight, 18 bits of the first moment, 20 bits of the second moment",
    }


# ── codes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("code", "bits", "highest"),
    [
        (Code("float32", 8, 23), 32, 127),
        (Code("bfloat16", 8, 7), 16, 127),
        (Code("pair", 8, 7, parts=2), 16, 127),
        # Exponent fields 1 to 63 are normal: binades from -54 to 8.
        (Code("e6m5", 6, 5, lowest=-54), 12, 8),
        (Code("e7m5", 7, 5, signed=False, lowest=-108), 12, 18),
        # Scaled windows end at the power of two that bounds their row.
        (MOMENT_CODES["e4m3-row"], 8, 0),
        (MOMENT_CODES["e5m3-row"], 8, 0),
    ],
)
def test_codes_count_their_bits(code: Code, bits: int, highest: int) -> None:
    assert (code.bits, code.highest) == (bits, highest)


@every_storage
def test_every_code_keeps_what_it_must(storage: Storage) -> None:
    """Second moments cut at random never vanish; scaled windows end at 1; a weight and a first moment have a sign."""
    codes = [storage.weight, storage.exp_avg, storage.exp_avg_sq]
    assert storage.weight.signed and storage.exp_avg.signed
    assert all(code.highest == 0 for code in codes if code.scaled)
    assert not storage.exp_avg_sq.is_window or storage.exp_avg_sq.hold or storage.arithmetic == "expansion"
    widest = 64 if storage.arithmetic == "float64" else 32
    assert all(code.bits <= widest and code.parts >= 1 for code in codes)


def test_the_window_of_the_second_moment_covers_the_squares_of_the_first() -> None:
    word = STORAGES["word"]
    assert word.exp_avg_sq.lowest == 2 * word.exp_avg.lowest
    assert word.exp_avg_sq.highest >= 2 * word.exp_avg.highest
