"""Every refusal of an edit, and that a refused decision changes nothing."""

from __future__ import annotations

import pytest
import torch

from kvassay.cache.edits import Bias, Decision, Edit, Evict, KeyNorm, LowRank, Merge, Quantize
from kvassay.cache.ops import GroupSpec
from kvassay.errors import IllegalEdit, LayoutError
from kvassay.layout.model import Rope
from tests.cache.build import bits_of, layer, one_layer, world
from tests.cache.edits import ALL, N, apply, into

EYE = (torch.eye(16),)
ONE = ((0, 1),)

REFUSED: dict[str, tuple[Edit | list[Edit], str]] = {
    "evict: width": (Evict(torch.ones(N - 1).bool()), r"Evict.keep is torch.bool \[7\], bool \[2, 8\] or \[8\] needed"),
    "evict: heads": (Evict(torch.ones(3, N).bool()), r"bool \[3, 8\], bool \[2, 8\] or \[8\] needed"),
    "evict: dtype": (Evict(torch.ones(2, N)), r"Evict.keep is torch.float32 \[2, 8\]"),
    "evict: everything": (Evict(torch.zeros(N).bool()), "KV head 0 would keep 0 of 8 tokens"),
    "evict: one head": (Evict(torch.stack([ALL, ~ALL])), "KV head 1 would keep 0 of 8 tokens"),
    "evict: together": ([Evict(torch.arange(N) < 4), Evict(torch.arange(N) >= 4)], "KV head 0 would keep 0 of 8"),
    "evict and 0 bits together": (
        [Evict(torch.arange(N) < 4), Quantize(torch.where(torch.arange(N) < 4, 0, 8).repeat(2, 1), 8)],
        "KV head 0 would keep 0 of 8 tokens",
    ),
    "merge: chain": (
        Merge(into((0, 1, 2), (0, 2, 3)), torch.ones(2, N)),
        "a token is merged away and merged into at once",
    ),
    "merge: itself": (Merge(into((0, 1, 1)), torch.ones(2, N)), "merged away and merged into at once"),
    "merge: shape": (Merge(into(heads=1), torch.ones(2, N)), r"Merge.into is torch.int64 \[1, 8\], integer \[2, 8\]"),
    "merge: floats": (Merge(into((0, 1, 2)).float(), torch.ones(2, N)), "Merge.into is torch.float32"),
    "merge: out of range": (Merge(into((0, 1, N)), torch.ones(2, N)), "Merge.into names token 8 of 8"),
    "merge: weight 0": (Merge(into((0, 1, 2)), torch.arange(N).repeat(2, 1) - 1.0), "Merge.weight must be positive"),
    "merge: weight nan": (Merge(into((0, 1, 2)), torch.full((2, N), torch.nan)), "finite float"),
    "merge: weight shape": (Merge(into((0, 1, 2)), torch.ones(N)), r"Merge.weight is torch.float32 \[8\]"),
    "merge: twice": ([Merge(into((0, 1, 2)), torch.ones(2, N))] * 2, "2 Merge edits, one takes all merges"),
    "bias: shape": (Bias(torch.ones(N)), r"Bias.log_weight is torch.float32 \[8\], finite float \[2, 8\] needed"),
    "bias: infinite": (Bias(torch.full((2, N), -torch.inf)), "Bias.log_weight is"),
    "bias: dtype": (Bias(torch.ones(2, N, dtype=torch.int64)), "Bias.log_weight is torch.int64"),
    "quantize: width": (Quantize(3, 8), r"Quantize.value_bits holds widths \[3\], allowed are \(0, 2, 4, 8, 16\)"),
    "quantize: 0 for all": (Quantize(8, 0), r"Quantize.key_bits holds widths \[0\]"),
    "quantize: 0 for all, as a tensor": (Quantize(torch.zeros(2, N).long(), 8), r"holds widths \[0\]"),
    "quantize: value shape": (
        Quantize(torch.full((2, 7), 8), 8),
        r"value_bits is torch.int64 \[2, 7\], integer \[2, 8\]",
    ),
    "quantize: key shape": (
        Quantize(8, torch.full((2, 9), 8), key_axis="channel"),
        r"Quantize.key_bits is torch.int64 \[2, 9\], integer \[2, 8\]",
    ),
    "quantize: bits dtype": (Quantize(torch.full((2, N), 8.0), 8), "value_bits is torch.float32"),
    "quantize: group": (Quantize(8, 8, group=3), "Quantize.group=3 does not divide the value dimension 8"),
    "quantize: group 0": (Quantize(8, 8, group=0), "Quantize.group=0 does not divide"),
    "quantize: fp8 bits": (Quantize(4, 8, number="fp8_e4m3"), "fp8_e4m3 has 8 bits for keys and values, not 8 and 4"),
    "quantize: axis": (Quantize(8, 8, key_axis="head"), "key_axis='head'"),  # type: ignore[arg-type]
    "quantize: nothing": (Quantize(8, 8, tokens=~ALL), "Quantize encodes no token"),
    "quantize: scope": (Quantize(8, 8, tokens=torch.ones(N)), r"tokens is torch.float32 \[8\]"),
    "quantize: twice": ([Quantize(8, 8), Quantize(4, 4, tokens=ALL)], "16 tokens are to be encoded by two edits"),
    "low rank: heads": (LowRank(((0,),), EYE, EYE, EYE, EYE), r"name heads \[0\], each of 0..1 once needed"),
    "low rank: nothing": (LowRank(ONE, None, None, None, None), "LowRank encodes neither keys nor values"),
    "low rank: half a side": (LowRank(ONE, EYE, None, None, None), "one of key_encode and key_decode"),
    "low rank: groups": (LowRank(((0,), (1,)), EYE, EYE, None, None), "LowRank has 1 key bases for 2 head groups"),
    "low rank: shape": (
        LowRank(ONE, None, None, (torch.ones(16, 3),), (torch.ones(4, 16),)),
        r"LowRank value bases \[16, 3\] and \[4, 16\], \[16, rank\] and \[rank, 16\] needed",
    ),
    "low rank: ragged": (
        LowRank(ONE, EYE, EYE, EYE, EYE, tokens=torch.stack([torch.arange(N) < 2, torch.arange(N) < 5])),
        r"LowRank needs the same tokens in every head, its scope has \[2, 5\]",
    ),
    "low rank: value heads": (
        LowRank(ONE, EYE, EYE, EYE, EYE, value_groups=((1,),)),
        r"value_groups name heads \[1\], each of 0..1 once needed",
    ),
    "low rank: value groups": (
        LowRank(ONE, EYE, EYE, EYE, EYE, value_groups=((0,), (1,))),
        "LowRank has 1 value bases for 2 head groups",
    ),
    "low rank: bias": (
        LowRank(ONE, EYE, EYE, EYE, EYE, value_bias=torch.ones(16)),
        r"LowRank.value_bias \[16\], \[2, 8\] needed",
    ),
    "low rank: norm after rotation": (
        LowRank(ONE, EYE, EYE, EYE, EYE, key_norm=KeyNorm(torch.ones(8), 0.0, torch.ones(2, N, 8))),
        "LowRank.key_norm comes before the rotation: domain 'pre_rope' and key bases needed",
    ),
    "low rank: norm's rows": (
        LowRank(
            ONE, EYE, EYE, EYE, EYE, domain="pre_rope", key_norm=KeyNorm(torch.ones(8), 0.0, torch.ones(2, N - 1, 8))
        ),
        r"LowRank.key_norm has rows \[2, 7, 8\] and weight \[8\], \[2, 8, 8\] and \[8\] needed",
    ),
    "low rank: empty": (LowRank(ONE, EYE, EYE, EYE, EYE, tokens=~ALL), "LowRank encodes no token"),
    "no edit": ("evict please", "str is not an edit"),  # type: ignore[dict-item]
}


class TestRefusals:
    @pytest.mark.parametrize("edit, message", REFUSED.values(), ids=REFUSED.keys())
    def test_names_the_layer_and_changes_nothing_in_any_layer(self, edit: Edit | list[Edit], message: str) -> None:
        """The bad edit comes last, after good ones of every kind in its own layer and in the one before."""
        made = world([GroupSpec(0, (0, 1), (2, 2), 4)], [layer(0), layer(1)])
        seq = made.create(N)
        made.fork(seq)
        before, free = bits_of(made.cache, seq), made.cache.ledger.pool.num_free
        good = [
            Evict(torch.arange(N) > 0),
            Merge(into((0, 0, 5), (1, 0, 5)), torch.ones(2, N)),
            Bias(torch.ones(2, N)),
            Quantize(8, 8, tokens=torch.arange(N) == 7),
        ]
        bad = edit if isinstance(edit, list) else [edit]
        for last in (bad, [good[2], *bad]):
            with pytest.raises(IllegalEdit, match=f"layer 1: .*({message})"):
                made.cache.apply(seq, Decision({0: good, 1: last}))
        assert bits_of(made.cache, seq) == before
        assert (made.cache.ledger.pool.num_free, made.cache.encoded, made.cache.moved_elements) == (free, {}, 0)
        assert made.cache.ledger.is_dense(seq)
        made.check(seq)

    def test_the_good_edits_alone_are_carried_out(self) -> None:
        """So that the refusals above are refusals of the bad edit."""
        made, seq = one_layer(N)
        apply(
            made,
            seq,
            Evict(torch.arange(N) > 0),
            Merge(into((0, 0, 5), (1, 0, 5)), torch.ones(2, N)),
            Bias(torch.ones(2, N)),
            Quantize(8, 8, tokens=torch.arange(N) == 7),
        )
        assert made.cache.layer(seq, 0).positions[0].tolist() == [1, 2, 3, 4, 5, 6, 7]

    @pytest.mark.parametrize(
        "edit, message",
        [
            (Evict(torch.arange(N + 2) != N), "Evict drops 2 uncommitted tokens"),
            (Merge(into((0, 1, N), tokens=N + 2), torch.ones(2, N + 2)), "encoded, uncommitted or not there"),
            (Merge(into((0, N, 1), tokens=N + 2), torch.ones(2, N + 2)), "encoded, uncommitted or not there"),
            (Bias(torch.ones(2, N + 2)), "Bias touches uncommitted tokens"),
            (Quantize(8, 8, tokens=torch.arange(N + 2) >= N), "uncommitted or encoded already"),
            (Evict(torch.arange(N + 2) >= N), "KV head 0 would keep 0 of 8 tokens"),
        ],
    )
    def test_uncommitted_tokens(self, edit: Edit, message: str) -> None:
        made, seq = one_layer(N)
        made.extend(seq, 2, committed=False)
        before = bits_of(made.cache, seq)
        with pytest.raises(IllegalEdit, match=message):
            apply(made, seq, edit)
        assert bits_of(made.cache, seq) == before
        made.check(seq)

    def test_a_bias_of_zero_on_uncommitted_tokens_is_no_edit_of_them(self) -> None:
        made, seq = one_layer(N)
        made.extend(seq, 2, committed=False)
        apply(made, seq, Bias(torch.cat([torch.ones(2, N), torch.zeros(2, 2)], 1)))

    @pytest.mark.parametrize(
        "edit, message",
        [
            (Quantize(4, 4, tokens=ALL), "encoded data is not re-encoded"),
            (LowRank(ONE, EYE, EYE, EYE, EYE, tokens=ALL), "encoded data is not re-encoded"),
            (Merge(into((0, 1, 7)), torch.ones(2, N)), "encoded, uncommitted or not there"),
            (Merge(into((0, 7, 1)), torch.ones(2, N)), "encoded, uncommitted or not there"),
        ],
    )
    def test_encoded_tokens(self, edit: Edit, message: str) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Quantize(8, 8, tokens=torch.arange(N) < 4))
        before = bits_of(made.cache, seq)
        with pytest.raises(IllegalEdit, match=message):
            apply(made, seq, edit)
        assert bits_of(made.cache, seq) == before

    def test_padding_is_no_target(self) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Evict(torch.stack([torch.arange(N) < 3, ALL])))
        with pytest.raises(IllegalEdit, match="encoded, uncommitted or not there"):
            apply(made, seq, Merge(into((0, 1, 5)), torch.ones(2, N)))

    def test_heads_that_share_a_basis_hold_the_same_tokens(self) -> None:
        """Three tokens per head, but not the same three: no row to join."""
        made, seq = one_layer(N)
        apply(made, seq, Evict(torch.stack([torch.arange(N) < 3, torch.arange(N) > 4])))
        with pytest.raises(IllegalEdit, match=r"the same tokens in heads \[0, 1\], which share a basis"):
            apply(made, seq, LowRank(ONE, EYE, EYE, EYE, EYE))
        eye = (torch.eye(8),) * 2
        apply(made, seq, LowRank(((0,), (1,)), eye, eye, eye, eye))
        made.keep(seq, 0, [[0, 1, 2], [5, 6, 7]])
        made.check(seq, atol=1e-6)

    def test_a_rotation_that_cannot_be_taken_back(self) -> None:
        made, seq = one_layer(N, rope=Rope(10000.0, 8, "yarn"))
        before = bits_of(made.cache, seq)
        with pytest.raises(LayoutError, match="RoPE kind 'yarn'"):
            apply(made, seq, Bias(torch.ones(2, N)), LowRank(ONE, EYE, EYE, EYE, EYE, domain="pre_rope"))
        assert bits_of(made.cache, seq) == before

    @pytest.mark.parametrize(
        "edit",
        [
            Evict(torch.arange(5) > 1),
            Bias(torch.ones(2, 5)),
            Quantize(8, 8),
            Merge(into((0, 0, 1), tokens=5), torch.ones(2, 5)),
        ],
    )
    def test_layers_bounded_by_a_window_need_leave(self, edit: Edit) -> None:
        made, seq = one_layer(N, window=5)
        before = bits_of(made.cache, seq)
        with pytest.raises(IllegalEdit, match="layer 0: bounded by a window of 5"):
            apply(made, seq, edit)
        assert bits_of(made.cache, seq) == before
        made.cache.apply(seq, Decision({0: [edit]}), allow_window=True)
        made.cache.check()
        assert bits_of(made.cache, seq) != before

    def test_no_edits_need_no_leave(self) -> None:
        made, seq = one_layer(N, window=5)
        before = bits_of(made.cache, seq)
        made.cache.apply(seq, Decision({0: []}))
        assert bits_of(made.cache, seq) == before
