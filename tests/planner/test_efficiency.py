"""Shares: every chip has them, each with an interval and a source."""

from __future__ import annotations

from typing import Any

import pytest

from narrowgauge.errors import ChipError, NarrowgaugeError
from narrowgauge.planner.inputs.efficiency import GENERAL, SOFTWARE, Share, shares_of, software_of, sources_of
from narrowgauge.spec.chips import CHIPS, get_chip


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_chip_has_every_share_with_a_source(chip: object) -> None:
    shares = shares_of(chip)  # type: ignore[arg-type]
    assert set(GENERAL) <= set(shares.rows)
    for format in chip.peak_tflops:  # type: ignore[attr-defined]
        assert 0.3 < shares.matmul(format).value < 1
    assert all(share.source and share.low <= share.value <= share.high for share in shares.rows.values())
    assert len(sources_of(shares, shares.rows)) == len(shares.rows)


def test_own_measurements_are_preferred_and_others_are_wider() -> None:
    h100, l40s = shares_of(get_chip("H100-SXM")), shares_of(get_chip("L40S"))
    assert h100.matmul("float8_e5m2") is h100.matmul("float8_e4m3fn")
    widths = [s.matmul("bfloat16").high / s.matmul("bfloat16").low for s in (h100, l40s)]
    assert widths[0] < widths[1]


def test_rows_are_replaced_and_the_rest_stays() -> None:
    shares = shares_of(get_chip("H100-SXM"))
    here = shares.replaced({"link": Share(0.5, 0.4, 0.6, "measured here")})
    assert (here["link"].value, here["network"]) == (0.5, shares["network"])
    assert shares["link"].value != 0.5


def test_every_software_has_years_and_shares_with_sources() -> None:
    for name, row in SOFTWARE.items():
        assert row.name == name and 2020 < row.years[0] <= row.years[1] and row.engines and row.age
        assert name.endswith(str(row.years[1]))
        for own in row.shares.values():
            assert "library" in own and all(share.source for share in own.values())
            assert set(own) <= set(GENERAL)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_what_is_assumed_on_a_chip_has_its_years_in_its_source(chip: Any) -> None:
    row = software_of(chip)
    assert row.age in shares_of(chip)["library"].source
    for name in SOFTWARE:
        assert SOFTWARE[name].age in shares_of(chip, name)["library"].source


def test_what_is_assumed_is_wider_than_what_is_named() -> None:
    a100 = get_chip("A100-SXM4-80GB")
    widths = {
        name: (s := shares_of(a100, name)["library"]).high / s.low for name in ("", "megatron-lm-2022", "fsdp-2023")
    }
    assert widths[""] == max(widths.values())
    low, high = shares_of(a100)["library"].low, shares_of(a100)["library"].high
    assert low < shares_of(a100, "megatron-deepspeed-2022")["library"].value < high
    with pytest.raises(NarrowgaugeError, match="software 'torch'"):
        shares_of(a100, "torch")


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="does not lie within"):
        Share(0.5, 0.6, 0.7, "nowhere")
    with pytest.raises(ChipError, match="bfloat16"):
        shares_of(get_chip("V100")).matmul("bfloat16")
