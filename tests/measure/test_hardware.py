"""Hardware files: the shipped ones are as published, a user's own is checked by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvassay.errors import HardwareError
from kvassay.measure.hardware.files import load_hardware, parse_hardware, shipped

GOOD = """
name = "mine"
title = "My card"
kind = "gpu"
memory_bandwidth = 1e12
capacity = 16e9
sources = ["a datasheet"]

[matrix_rate]
bfloat16 = 100e12

[achievable]
bandwidth = 0.8
matrix = 0.5
source = "assumed"
"""


def test_shipped_files_are_the_published_peaks() -> None:
    assert shipped() == ("epyc-2core-avx2", "h100-sxm", "h200", "mi300x")
    peaks = {name: load_hardware(name) for name in shipped()}
    assert all(found.name == name and found.sources and found.achievable.source for name, found in peaks.items())
    published = {name: (p.memory_bandwidth, p.capacity, p.matrix_rate.get("bfloat16")) for name, p in peaks.items()}
    assert published == {
        "epyc-2core-avx2": (21.8e9, 24e9, None),
        "h100-sxm": (3.35e12, 80e9, 989.5e12),
        "h200": (4.8e12, 141e9, 989.5e12),
        "mi300x": (5.3e12, 192e9, 1307.4e12),
    }


def test_only_the_machine_itself_may_calibrate() -> None:
    cpu = load_hardware("epyc-2core-avx2")
    assert cpu.is_machine("AMD EPYC 9B14", 2)
    assert not cpu.is_machine("AMD EPYC 9B14", 8) and not cpu.is_machine("Intel Xeon", 2)
    assert not load_hardware("h200").is_machine("AMD EPYC 9B14", 2)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD, encoding="utf-8")
    found = load_hardware(str(file))
    assert (found.name, found.bandwidth, found.rate("bfloat16")) == ("mine", 0.8e12, 50e12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("capacity", "capcity"), "x.toml: unknown key 'capcity' (did you mean 'capacity'?)"),
        (('source = "assumed"', ""), "x.toml: [achievable] missing key 'source'"),
        (("matrix = 0.5", "matrix = 1.5"), "x.toml: [achievable] matrix: Input should be less than or equal to 1, got"),
        (("matrix = 0.5", "matirx = 0.5"), "x.toml: [achievable] unknown key 'matirx' (did you mean 'matrix'?)"),
        (("bfloat16 =", "bf16 ="), "x.toml: [matrix_rate] unknown dtype 'bf16' (did you mean 'bfloat16'?)"),
        (("100e12", "-1"), "x.toml: [matrix_rate] bfloat16: Input should be greater than 0, got -1"),
        (('["a datasheet"]', "[]"), "x.toml: sources: "),
        (('"gpu"', '"tpu"'), "x.toml: kind: Input should be 'cpu' or 'gpu', got 'tpu'"),
        (("1e12", "= 1e12"), "x.toml: not valid TOML: "),
    ],
)
def test_mistakes_name_file_and_key(change: tuple[str, str], message: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(HardwareError) as caught:
        parse_hardware(GOOD.replace(*change, 1), "x.toml")
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_names_and_paths_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        HardwareError, match=r"unknown hardware 'h100' \(did you mean 'h100-sxm'\?\); a file of your own"
    ):
        load_hardware("h100")
    with pytest.raises(HardwareError, match=r"unknown hardware 'h20' \(did you mean 'h200'\?\); a file of your own"):
        load_hardware("h20")
    with pytest.raises(HardwareError, match=r"nowhere\.toml: cannot be read: No such file"):
        load_hardware(str(tmp_path / "nowhere.toml"))
