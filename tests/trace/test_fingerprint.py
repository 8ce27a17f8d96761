from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch

from kvassay.errors import TraceError
from kvassay.trace import fingerprint as fp
from kvassay.trace.fingerprint import compare, fingerprint, load_recipe, save_recipe
from kvassay.trace.reader import Trace
from kvassay.trace.schema import LogitsSpec
from kvassay.trace.writer import TraceWriter

from . import tiny


def again(path: Path, **changes: torch.Tensor) -> fp.Fingerprint:
    """Fingerprint of the standard trace with rows replaced; keys as `prefix__0__k`."""
    rows = tiny.rows_for(torch.float32)
    for key, value in changes.items():
        segment, where, name = key.split("__")
        rows[segment, int(where) if where.isdigit() else where, name] = value
    with TraceWriter(path, tiny.header()) as writer:
        tiny.write_rows(writer, rows)
    return fingerprint(Trace.open(path))


def test_what_it_holds(made: tiny.Made) -> None:
    found = fingerprint(Trace.open(made.path))
    assert json.loads(json.dumps(found)) == found
    k = made.rows["prefix", 0, "k"].double()
    entry = found["rows"]["prefix/layer_000"]["k"]
    assert entry["norm"] == pytest.approx(float(k.norm()), rel=1e-6)
    b = torch.cat([made.rows["branch_000", 1, "v"], made.rows["branch_001", 1, "v"]]).double()
    chained = found["rows"]["branches/layer_001"]["v"]
    assert chained["norm"] == pytest.approx(float(b.norm()), rel=1e-6)
    assert chained["samples"]["8"] == pytest.approx(b[8].flatten()[:4].tolist(), rel=1e-6)
    left, right = torch.from_numpy(fp.signs(11, 1)), torch.from_numpy(fp.signs(8, 2))
    by_hand = torch.einsum("tp,te,ep->p", left, k.reshape(11, 8), right)
    assert entry["projections"] == pytest.approx(by_hand.tolist(), rel=1e-6)
    assert entry["samples"]["5"] == pytest.approx(k[5].flatten()[:4].tolist(), rel=1e-6)
    assert set(entry["samples"]) == {"0", "5", "10"}
    assert list(found["rows"]["prefix/layer_002"]) == ["q"]
    logits = made.rows["branch_000", "logits", "logits"]
    greedy = found["greedy"]["branch_000"]
    assert greedy["ids"] == logits.argmax(1).tolist()
    top = logits.sort(dim=1, descending=True).values
    assert greedy["margins"] == pytest.approx((top[:, 0] - top[:, 1]).tolist(), rel=1e-6)


def test_signs_are_fixed_forever() -> None:
    # committed fingerprints depend on these; numpy promises Philox's raw stream
    assert fp.signs(6, 1).tolist() == SIGNS
    signs = fp.signs(4000, 2)
    assert set(signs.flatten().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean(axis=0)).max() < 0.06
    assert abs(signs.T @ signs / 4000 - torch.eye(4).numpy()).max() < 0.06


SIGNS = [
    [1, 1, 1, 1],
    [1, 1, 1, 1],
    [-1, 1, -1, -1],
    [-1, 1, -1, -1],
    [-1, -1, 1, 1],
    [1, -1, -1, 1],
]


def test_noise_within_the_tolerance_is_no_difference(made: tiny.Made, tmp_path: Path) -> None:
    rows = {key: value for key, value in made.rows.items() if isinstance(key[1], int)}
    noisy = {
        "__".join(map(str, key)): value + 1e-5 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
        for key, value in rows.items()
    }
    first = fingerprint(Trace.open(made.path))
    second = again(tmp_path / "noisy", **noisy)
    assert first != second
    assert compare(first, second) == []
    assert compare(first, second, tolerance=1e-7) != []
    assert compare(first, first, tolerance=0) == []


@pytest.mark.parametrize("name", ["k", "v", "q"])
@pytest.mark.parametrize("how", ["negated", "swapped", "shifted"])
def test_changed_rows_are_noticed(made: tiny.Made, tmp_path: Path, name: str, how: str) -> None:
    rows = made.rows["branch_000", 1, name].clone()
    if how == "negated":
        rows[2] = -rows[2]
    elif how == "swapped":
        rows[[1, 4]] = rows[[4, 1]]
    else:
        rows = rows.roll(1, dims=0)
    found = compare(fingerprint(Trace.open(made.path)), again(tmp_path / "changed", **{f"branch_000__1__{name}": rows}))
    assert len(found) == 1
    assert found[0].startswith(f"branches/layer_001 '{name}': ")


def test_one_negated_row_among_thousands_is_noticed_though_the_norm_is_the_same() -> None:
    x = torch.randn(8192, 3, 64, generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[4321] *= -1
    a, b = fp._print_rows([x]), fp._print_rows([changed])
    assert a["norm"] == b["norm"]
    assert fp._compare_tensor(a, b, fp.TOLERANCE) != []


def test_one_flipped_token_is_noticed(made: tiny.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fingerprint(Trace.open(made.path))
    monkeypatch.setitem(tiny.IDS, "prefix", [*range(10, 20), 21])
    assert compare(first, again(tmp_path / "flipped")) == ["prefix: token ids differ"]


def test_greedy_flips_count_only_beyond_a_tie(made: tiny.Made, tmp_path: Path) -> None:
    first = fingerprint(Trace.open(made.path))
    logits = made.rows["branch_000", "logits", "logits"].clone()
    order = logits[3].argsort(descending=True)
    logits[3, order[:2]] = logits[3, order[:2].flip(0)]
    second = again(tmp_path / "flipped", branch_000__logits__logits=logits)
    (line,) = compare(first, second)
    assert line == f"branch_000: 1 greedy ids differ, first after token 3: {order[0]} became {order[1]}"
    lead = first["greedy"]["branch_000"]["margins"][3]
    assert compare(first, second, tolerance=lead / first["greedy"]["branch_000"]["peak"] * 1.01) == []


def test_identity_and_shape_differences(made: tiny.Made, tmp_path: Path) -> None:
    first = fingerprint(Trace.open(made.path))
    half = fingerprint(Trace.open(tiny.make(tmp_path / "half", dtype="float16").path))
    assert compare(first, half)[0] == "dtype: float32 became float16"
    top = fingerprint(Trace.open(tiny.make(tmp_path / "top", logits=LogitsSpec(kind="topk", k=2)).path))
    assert compare(first, top) == []
    none = copy.deepcopy(first)
    none["greedy"] = {}
    assert compare(first, none) == ["logits are stored in one of the two only"]
    none["tokens"]["branch_001"] = 4
    (line,) = compare(first, none)
    assert line.startswith("tokens: {'prefix': 11, 'branch_000': 6, 'branch_001': 3} became ")
    del first["rows"]["prefix/layer_000"]["v"]
    assert "prefix/layer_000: tensors ['k', 'q'] became ['k', 'q', 'v']" in compare(first, half)


def test_a_nan_never_passes(made: tiny.Made) -> None:
    first = fingerprint(Trace.open(made.path))
    broken = copy.deepcopy(first)
    broken["rows"]["prefix/layer_000"]["k"]["norm"] = float("nan")
    assert len(compare(first, broken)) == len(compare(broken, first)) == 1


def test_recipe_files(made: tiny.Made, tmp_path: Path) -> None:
    trace = Trace.open(made.path)
    file = tmp_path / "recipe.json"
    save_recipe(trace, file)
    assert load_recipe(file) == load_recipe(made.path) == (made.header, fingerprint(trace))
    good = json.loads(file.read_text())
    for data, message in [
        ("{", "not a recipe file"),
        ("[]", "not a recipe file"),
        (json.dumps({"header": good["header"]}), "not a recipe file with 'header' and 'fingerprint': 'fingerprint'"),
        (json.dumps({**good, "header": {**good["header"], "q_from": 99}}), "q_from 99 lies beyond"),
        (json.dumps({**good, "fingerprint": {**good["fingerprint"], "version": 2}}), "version 2, this kvassay reads 1"),
        (json.dumps({**good, "fingerprint": {"version": 1}}), "model: Field required"),
    ]:
        file.write_text(data)
        with pytest.raises(TraceError, match=message) as error:
            load_recipe(file)
        assert "\n" not in str(error.value)
    with pytest.raises(TraceError, match=r"nowhere.json: cannot read: No such file"):
        load_recipe(tmp_path / "nowhere.json")
