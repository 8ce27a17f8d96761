from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvassay.errors import GateError
from kvassay.measure.verdict import VERDICTS, Check, Judgement, Verdict, dump_judgement, load_judgement

CHECK = Check("quality top1", -0.05, "at_least", -0.02, -0.03, None, True, "measured", unit="fraction", note="ok")
WHOLE = Verdict("", "", "a keep=0.25", "promote", "modelled latency, not calibrated", "tiny", False, (CHECK,))
PART = Verdict("copy 2k", "copy", "a keep=0.25", "hold", "underpowered: x", "tiny", False, (CHECK,), "tiny", True)
JUDGEMENT = Judgement("g", "f" * 64, None, "2026-01-01T00:00:00+00:00", True, "EXPLORATORY", "c" * 64, (WHOLE, PART))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert load_judgement(tmp_path) is None
    (tmp_path / VERDICTS).write_text(dump_judgement(JUDGEMENT), encoding="utf-8")
    assert load_judgement(tmp_path) == JUDGEMENT


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    odd = replace(JUDGEMENT, verdicts=(replace(WHOLE, checks=(replace(CHECK, value=math.nan),)),))
    (tmp_path / VERDICTS).write_text(dump_judgement(odd), encoding="utf-8")
    found = load_judgement(tmp_path)
    assert found is not None and found.verdicts[0].checks[0].value is None


def test_overall_verdicts_are_told_from_parts() -> None:
    assert JUDGEMENT.overall == (WHOLE,) and JUDGEMENT.of("a keep=0.25") == (WHOLE, PART)
    assert JUDGEMENT.count() == {"promote": 1}
    assert WHOLE.line == "promote (modelled latency, not calibrated)" and PART.line == "hold: underpowered: x"
    assert replace(WHOLE, reason="").line == "promote"


@pytest.mark.parametrize(("key", "value"), [("outcome", "maybe"), ("checks", 3), ("arm", None)])
def test_a_damaged_file_is_named_with_the_place(tmp_path: Path, key: str, value: object) -> None:
    data = json.loads(dump_judgement(JUDGEMENT))
    data["judgement"]["verdicts"][0][key] = value
    (tmp_path / VERDICTS).write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(GateError, match=rf"verdicts.json: not as this kvassay writes it: judgement.verdicts.0.{key}: "):
        load_judgement(tmp_path)
