from __future__ import annotations

import pytest

from kvassay.measure import resample


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts rest on tests, not on bootstrap intervals, so these may be coarse here."""
    monkeypatch.setattr(resample, "RESAMPLES", 199)
