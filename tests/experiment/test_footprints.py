"""Footprints read off a made-up run, and stated ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvassay.errors import ExperimentError
from kvassay.experiment.folder import CELLS, MANIFEST
from kvassay.experiment.footprints import load_footprints, load_times
from kvassay.experiment.rows import write_cells
from kvassay.measure.aggregate import aggregate
from kvassay.measure.result import RECLAIM_MODES
from kvassay.replay.serving.cost import TableTimes
from kvassay.replay.serving.footprint import Footprint
from tests.rows import SILENT, row
from tests.runs import make_run

SNAPKV = "snapkv(window=16) keep=0.25"


def test_an_arm_of_a_run(tmp_path: Path) -> None:
    """The run's 64 of 128 blocks by compaction; bytes 0.125 in scope; reads 225 of 900 KiB, nothing outside scope."""
    make_run(tmp_path / "run")
    (found,) = load_footprints([tmp_path / "run"], "slot_reuse", [SNAPKV])
    assert found == Footprint(
        arm=SNAPKV,
        mode="slot_reuse",
        how="measured",
        source="run: tiny-model, kv_short 2k, 2048 tokens, 4 questions",
        selected_fraction=1.0,
        retained_fraction=0.125,
        freed_fraction=64 / 128,
        read_fraction=0.25,
        writes=True,
        correct=0.75,
        dense_correct=1.0,
    )


def test_modes_differ_and_only_some_write(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    whole = load_footprints([tmp_path / "run"], "whole_block", [SNAPKV])[0]
    assert (whole.freed_fraction, whole.writes) == (3 / 128, False)
    fp8 = load_footprints([tmp_path / "run"], "whole_block", ["fp8"])[0]
    assert (fp8.freed_fraction, fp8.writes) == (0.0, True), "codes are written where keys and values were"


def test_what_windows_read_is_not_the_arm_s(tmp_path: Path) -> None:
    """400 of 1000 KiB lie in windows: dense reads 500 KiB besides, the arm 250."""
    make_run(tmp_path / "run")
    kib = 1024.0
    rows = [
        row("dense", retained_bytes_scope=600 * kib, policy_bytes=0.0),
        row("fp8", retained_bytes_scope=300 * kib, read_bytes=650 * kib, policy_bytes=150 * kib),
    ]
    labels = {"model": "tiny-model", "trace_set": "kv_short 2k"}
    write_cells([(labels, aggregate(rows).cells)], tmp_path / "run" / CELLS)
    (found,) = load_footprints([tmp_path / "run"])
    assert (found.read_fraction, found.scan_fraction) == (0.5, 0.25)


def test_a_selectors_side_data_is_charged_beside_blocks_that_codes_make_smaller(tmp_path: Path) -> None:
    """Of 128 blocks 64 are left, and 0.62 of dense's bytes are held: 0.12 of them lie beside the blocks."""
    make_run(tmp_path / "run")
    freed = dict.fromkeys(RECLAIM_MODES, 64.0)
    alike = (
        row(name, retained_bytes_scope=620.0, retained_fraction_scope=0.62, blocks_freed=freed)
        for name in ("fp8", SNAPKV)
    )
    rows = [row("dense", retained_bytes_scope=1000.0), *alike]
    labels = {"model": "tiny-model", "trace_set": "kv_short 2k"}
    write_cells([(labels, aggregate(rows).cells)], tmp_path / "run" / CELLS)
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    next(arm for arm in manifest["arms"] if arm["label"] == "fp8")["effects"] = ["quantize", "select"]
    (tmp_path / "run" / MANIFEST).write_text(json.dumps(manifest))
    selector, other = load_footprints([tmp_path / "run"], "whole_block", ["fp8", SNAPKV])
    assert (selector.freed_fraction, selector.side_fraction) == (0.5, pytest.approx(0.12))
    assert selector.block_scale == pytest.approx(0.62) and other.side_fraction == 0


def test_what_acts_on_what_is_written_is_smaller_from_the_start_unless_told_otherwise(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (found,) = load_footprints([tmp_path / "run"], arms=["fp8"])
    assert (found.timing, found.edits) == ("from_start", False)
    (found,) = load_footprints([tmp_path / "run"], arms=["fp8"], timing="after_prefill")
    assert (found.timing, found.edits) == ("after_prefill", True)
    assert load_footprints([tmp_path / "run"], arms=[SNAPKV])[0].timing == "after_prefill"


def test_references_are_left_out_unless_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert [found.arm for found in load_footprints([tmp_path / "run"])] == ["fp8", SNAPKV, "kivi"]
    assert len(load_footprints([tmp_path / "run"], arms=["hindsight keep=0.25"])) == 1


def test_what_compresses_generated_tokens_alone_is_stated_not_read_off(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    manifest = tmp_path / "run" / "manifest.json"
    data = json.loads(manifest.read_text())
    for arm in data["arms"]:
        if arm["label"] == "kivi":
            arm.update(effects=["evict"], when=["every_n"])
    manifest.write_text(json.dumps(data))
    assert "kivi" not in [found.arm for found in load_footprints([tmp_path / "run"])]
    with pytest.raises(ExperimentError, match="kivi acts on generated tokens alone"):
        load_footprints([tmp_path / "run"], arms=["kivi"])
    path = tmp_path / "kara.toml"
    path.write_text('[[footprint]]\narm = "kivi"\ntiming = "every_n"\ninterval = 256\nfreed_fraction = 0.5\n')
    assert load_footprints([path])[0].windows
    assert load_footprints([tmp_path / "run", path], arms=["kivi", "fp8"])[0].windows, "stated, so the run is not asked"
    path.write_text('[[footprint]]\narm = "kara"\ntiming = "every_n"\nfreed_fraction = 0.5\n')
    with pytest.raises(ExperimentError, match="every_n needs one"):
        load_footprints([path])


def test_unknown_arms_and_sets_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(ExperimentError, match=r"no arm 'fp9' .*did you mean 'fp8'"):
        load_footprints([tmp_path / "run"], arms=["fp9"])
    with pytest.raises(ExperimentError, match=r"no trace set 'kv_short 4k' .*did you mean 'kv_short 2k'"):
        load_footprints([tmp_path / "run"], trace_set="kv_short 4k")


def test_of_several_sources_a_file_goes_first_and_then_the_first_run_that_has_an_arm(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    path = tmp_path / "mine.toml"
    path.write_text('[[footprint]]\narm = "fp8"\n[[footprint]]\narm = "half"\nfreed_fraction = 0.5\n')
    sources, wanted = [path, tmp_path / "run"], ["half", SNAPKV, "fp8"]
    found = {one.arm: one.how for one in load_footprints(sources, arms=wanted)}
    assert found == {"fp8": "assumed", "half": "assumed", SNAPKV: "measured"}
    assert load_footprints(sources[::-1], arms=["fp8"])[0].how == "assumed", "what is stated goes before what is run"
    with pytest.raises(ExperimentError, match=r"mine\.toml, .*run: no arm 'halves' .*did you mean 'half'"):
        load_footprints(sources, arms=["halves"])


def test_stated_footprints_are_assumed(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[footprint]]\narm = "half"\nfreed_fraction = 0.5\ntiming = "from_start"\nwrites = true\n')
    (found,) = load_footprints([path])
    assert (found.arm, found.how, found.freed_fraction, found.timing, found.writes) == (
        "half",
        "assumed",
        0.5,
        "from_start",
        True,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[footprint]]\narm = "a"\nfreed = 0.5\n', r"mine\.toml: footprint 1: unknown key 'freed'"),
        ("[[footprint]]\nfreed_fraction = 0.5\n", r"footprint 1: missing key 'arm'"),
        ('[[footprint]]\narm = "a"\nwrites = 1\n', r"footprint 1: writes = 1 is no bool"),
        ('[[footprint]]\narm = "a"\ntiming = "late"\n', r"footprint 1: timing = 'late'"),
        ('[[footprint]]\narm = "a"\nfreed_fraction = 1\n', r"footprint 1: a: freed_fraction is 1"),
        ('[[footprint]]\narm = "a"\n[[footprint]]\narm = "a"\n', r"mine\.toml: arm 'a' is stated twice"),
        ('[footprint]\narm = "a"\n', r"holds \[\[footprint\]\] tables and nothing else"),
        ("[[", r"cannot be read"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ExperimentError, match=says):
        load_footprints([path])


def test_step_times_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "times.toml"
    path.write_text("step = 0.004\ntoken = 1e-5\n")
    assert load_times(path) == TableTimes(0.004, 1e-5, 0.0, "table: times.toml")
    path.write_text("token = 1e-5\n")
    with pytest.raises(ExperimentError, match=r"times\.toml: missing key 'step'"):
        load_times(path)
    path.write_text("step = 1\ntokens = 2\n")
    with pytest.raises(ExperimentError, match=r"unknown key 'tokens' \(did you mean 'token'"):
        load_times(path)


def test_correctness_is_unknown_where_nothing_was_generated(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    labels = {"model": "tiny-model", "trace_set": "kv_short 2k"}
    cells = aggregate([row("dense", **SILENT), row("fp8", **SILENT)]).cells
    write_cells([(labels, cells)], tmp_path / "run" / CELLS)
    (found,) = load_footprints([tmp_path / "run"])
    assert (found.correct, found.dense_correct) == (None, None)
