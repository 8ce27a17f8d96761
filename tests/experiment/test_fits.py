"""What was learnt is kept in the run folder: another process reads it, unless the code changed or it is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvassay.errors import ExperimentError
from kvassay.experiment.fits import KeptFits
from kvassay.experiment.folder import RunFolder
from kvassay.policy.base import Artefact

KEY = ("svd", "c" * 64)


def fit(value: float) -> Callable[[], Artefact]:
    # A slice: what is written must not hold more than it shows.
    return lambda: Artefact({"rho": torch.full((4, 2), value)[:, 0], "at": torch.tensor(3)}, "s" * 64)


def never() -> Artefact:
    raise AssertionError("fitted again")


def test_another_process_reads_what_was_learnt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first = KeptFits(folder, "code").learnt(KEY, fit(1.0))
    again = KeptFits(folder, "code").learnt(KEY, never)
    assert again.source_sha256 == first.source_sha256 == "s" * 64
    assert again.tensors["rho"].tolist() == [1.0] * 4 and int(again.tensors["at"]) == 3
    assert [path.suffix for path in folder.fits.glob("[!.]*")] == [".safetensors"]


def test_within_a_process_it_is_read_once(tmp_path: Path) -> None:
    fits = KeptFits(RunFolder(tmp_path), "code")
    assert fits.learnt(KEY, fit(1.0)) is fits.learnt(KEY, never)


@pytest.mark.parametrize(
    ("key", "code"), [(("svd(rank=0.25)", KEY[1]), "code"), ((KEY[0], "d" * 64), "code"), (KEY, "x")]
)
def test_another_policy_text_or_code_is_fitted(tmp_path: Path, key: tuple[str, str], code: str) -> None:
    KeptFits(RunFolder(tmp_path), "code").learnt(KEY, fit(1.0))
    assert KeptFits(RunFolder(tmp_path), code).learnt(key, fit(2.0)).tensors["rho"].tolist() == [2.0] * 4


def test_a_damaged_file_is_fitted_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    KeptFits(folder, "code").learnt(KEY, fit(1.0))
    (path,) = folder.fits.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    assert KeptFits(folder, "code").learnt(KEY, fit(2.0)).tensors["rho"].tolist() == [2.0] * 4
    assert KeptFits(folder, "code").learnt(KEY, never).tensors["rho"].tolist() == [2.0] * 4


def test_a_failed_fit_leaves_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(AssertionError):
        KeptFits(folder, "code").learnt(KEY, never)
    assert not list(folder.fits.glob("[!.]*"))
    KeptFits(folder, "code").learnt(KEY, fit(1.0))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "fits").write_text("in the way")
    with pytest.raises(ExperimentError, match="fits"):
        KeptFits(RunFolder(tmp_path), "code").learnt(KEY, fit(1.0))
