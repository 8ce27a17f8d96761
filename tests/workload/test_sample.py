from __future__ import annotations

from dataclasses import replace

import pytest

from kvassay.errors import WorkloadError
from kvassay.workload.floor import FLOORS, check_floor
from kvassay.workload.sample import Branch, Sample

BRANCH = Branch((1, 2), (3, 4), "q", "a", (1,), 0.5, {"key": "x"})
SAMPLE = Sample("probe", 7, 2, (9, 8, 7), (BRANCH,), False, {"recipe": {"seed": 7}})


def test_round_trip_through_json() -> None:
    assert Sample.from_json(SAMPLE.to_json()) == SAMPLE
    assert BRANCH.token_ids == (1, 2, 3, 4)


def test_other_schemas_and_missing_fields_are_refused() -> None:
    data = SAMPLE.to_dict()
    with pytest.raises(WorkloadError, match="sample schema 2 is not 1"):
        Sample.from_dict({**data, "schema": 2})
    del data["seed"]
    with pytest.raises(WorkloadError, match="incomplete: 'seed'"):
        Sample.from_dict(data)


def test_what_cannot_be_scored_is_refused() -> None:
    for change, message in (
        ({"question_ids": ()}, "at least 1 question token"),
        ({"answer_ids": ()}, "no answer tokens"),
        ({"scored": ()}, "no scored answer tokens"),
        ({"scored": (2,)}, "scored index 2 is outside the 2 answer tokens"),
        ({"scored": (-1,)}, "scored index -1 is outside"),
    ):
        with pytest.raises(WorkloadError, match=message):
            replace(BRANCH, **change)
    with pytest.raises(WorkloadError, match="the context is empty"):
        replace(SAMPLE, context_ids=())
    with pytest.raises(WorkloadError, match="at least 1 branch"):
        replace(SAMPLE, branches=())


def test_below_the_floor_is_refused_with_the_numbers() -> None:
    floor = FLOORS["copy"]
    check_floor("copy", 2048, floor.min_top1, floor.max_nll)
    message = r"'copy' is refused at length 4096: tiny reaches top-1 0\.100 and NLL 3\.000"
    with pytest.raises(WorkloadError, match=message):
        check_floor("copy", 4096, 0.1, 3.0, model="tiny")
    with pytest.raises(WorkloadError):
        check_floor("copy", 4096, 1.0, floor.max_nll + 0.01)
    with pytest.raises(WorkloadError):
        check_floor("copy", 4096, floor.min_top1 - 0.01, 0.0)
    with pytest.raises(WorkloadError):
        check_floor("copy", 4096, float("nan"), 0.0)
    with pytest.raises(WorkloadError):
        check_floor("copy", 4096, 1.0, float("nan"))
    with pytest.raises(WorkloadError, match=r"no dense floor for workload 'cpoy' \(did you mean 'copy'\?\)"):
        check_floor("cpoy", 4096, 1.0, 0.0)


def test_floors_lie_above_chance() -> None:
    """A digit at random: 10 % and ln 10 nats; every floor must ask for more."""
    for name, floor in FLOORS.items():
        assert floor.min_top1 >= 0.25, name
    for name in ("needle_single", "needle_multikey", "kv_short", "tracking", "chain"):
        assert FLOORS[name].max_nll < 2.302585
