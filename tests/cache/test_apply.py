"""Every edit against plain loops over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvassay.cache.edits import Bias, Decision, Evict, KeyNorm, LowRank, Merge, Quantize
from kvassay.cache.rope import rotate, unrotate
from tests.cache.build import ROPE, Row, as_stored, one_layer
from tests.cache.edits import ALL, N, apply, into
from tests.cache.test_codec import quantised


def merged(rows: dict[int, Row], weight: Tensor, target: int, sources: list[int]) -> Row:
    """The weighted mean, token by token in float64."""
    sides = []
    for side in range(2):
        total = torch.zeros_like(rows[target][side], dtype=torch.float64)
        for position in (target, *sources):
            total += float(weight[position]) * rows[position][side].double()
        sides.append((total / sum(float(weight[p]) for p in (target, *sources))).float())
    return sides[0], sides[1]


class TestEvict:
    def test_a_mask_per_head(self) -> None:
        made, seq = one_layer(N)
        keep = torch.zeros(2, N, dtype=torch.bool)
        keep[0, [1, 6]], keep[1, [0, 2, 7]] = True, True
        apply(made, seq, Evict(keep))
        made.keep(seq, 0, [[1, 6], [0, 2, 7]])
        made.check(seq)

    def test_one_mask_for_all_heads(self) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Evict(torch.arange(N) % 3 == 0))
        made.keep(seq, 0, [[0, 3, 6]] * 2)
        made.check(seq)

    def test_columns_are_those_of_the_view_not_positions(self) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Evict(torch.arange(N) >= 3))
        apply(made, seq, Evict(torch.tensor([True, False, True, True, False])))
        made.keep(seq, 0, [[3, 5, 6]] * 2)
        made.check(seq)

    def test_padding_of_shorter_heads_means_nothing(self) -> None:
        made, seq = one_layer(N)
        keep = torch.stack([torch.arange(N) < 2, torch.arange(N) < 5])
        apply(made, seq, Evict(keep))
        apply(made, seq, Evict(torch.tensor([[True, True, False, False, False], [True, False, True, True, True]])))
        made.keep(seq, 0, [[0, 1], [0, 2, 3, 4]])
        made.check(seq)

    def test_several_masks_all_count(self) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Evict(torch.arange(N) > 1), Evict(torch.arange(N) < 6))
        made.keep(seq, 0, [[2, 3, 4, 5]] * 2)
        made.check(seq)

    def test_nothing_is_written_or_copied(self) -> None:
        made, seq = one_layer(N)
        child = made.cache.fork(seq)
        before = made.cache.store.keys(0).clone()
        apply(made, child, Evict(torch.arange(N) > 3))
        assert torch.equal(made.cache.store.keys(0).nan_to_num(), before.nan_to_num())
        assert made.cache.moved_elements == 0
        made.check(seq)

    def test_whole_dead_blocks_are_let_go(self) -> None:
        made, seq = one_layer(3 * 4 + 1)
        reclaimed = made.cache.apply(seq, Decision({0: [Evict(torch.arange(13) >= 9)]}))
        assert reclaimed == (2, 2)


class TestMerge:
    def test_several_sources_into_one_target_by_weight(self) -> None:
        made, seq = one_layer(N)
        weight = made.random(2, N).abs() + 0.1
        before = [dict(rows) for rows in made.truth[seq, 0]]
        apply(made, seq, Merge(into((0, 1, 3), (0, 2, 3), (0, 6, 3), (1, 0, 7)), weight, values_only=False))
        made.truth[seq, 0][0][3] = merged(before[0], weight[0], 3, [1, 2, 6])
        made.truth[seq, 0][1][7] = merged(before[1], weight[1], 7, [0])
        made.check(seq, atol=1e-6)

    def test_values_only_leaves_the_key(self) -> None:
        made, seq = one_layer(N)
        weight = torch.ones(2, N)
        apply(made, seq, Merge(into((0, 1, 3), (1, 5, 4)), weight))
        for head, source, target in ((0, 1, 3), (1, 5, 4)):
            rows = made.truth[seq, 0][head]
            rows[target] = (rows[target][0], (rows[target][1] + rows[source][1]) / 2)
        made.check(seq, atol=1e-6)

    def test_sources_stay_until_they_are_evicted(self) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Merge(into((0, 1, 3), (1, 1, 3)), torch.ones(2, N)), Evict(torch.arange(N) != 1))
        for rows in made.truth[seq, 0]:
            rows[3] = (rows[3][0], (rows[3][1] + rows[1][1]) / 2)
        made.keep(seq, 0, [[0, 2, 3, 4, 5, 6, 7]] * 2)
        made.check(seq, atol=1e-6)

    def test_over_a_ragged_view(self) -> None:
        """View columns, not positions: head 0 holds 2, 5, 7 and head 1 all."""
        made, seq = one_layer(N)
        keep = ALL.repeat(2, 1)
        keep[0] = torch.isin(torch.arange(N), torch.tensor([2, 5, 7]))
        apply(made, seq, Evict(keep))
        weight = torch.ones(2, N)
        weight[0, 3:] = torch.nan  # padding
        apply(made, seq, Merge(into((0, 0, 2), (1, 3, 4)), weight))
        made.keep(seq, 0, [[2, 5, 7], list(range(N))])
        for head, source, target in ((0, 2, 7), (1, 3, 4)):
            rows = made.truth[seq, 0][head]
            rows[target] = (rows[target][0], (rows[target][1] + rows[source][1]) / 2)
        made.check(seq, atol=1e-6)


class TestBias:
    def test_twice_adds(self) -> None:
        made, seq = one_layer(N)
        first, second = made.random(2, N), made.random(2, N)
        apply(made, seq, Bias(first))
        apply(made, seq, Bias(second), Bias(second))
        bias = made.cache.layer(seq, 0).bias
        assert bias is not None
        torch.testing.assert_close(bias, first + 2 * second)

    def test_stays_with_the_position(self) -> None:
        made, seq = one_layer(N)
        weight = made.random(2, N)
        apply(made, seq, Bias(weight))
        apply(made, seq, Evict(torch.arange(N) % 2 == 1))
        made.extend(seq, 2)
        bias = made.cache.layer(seq, 0).bias
        assert bias is not None
        assert torch.equal(bias, torch.cat([weight[:, 1::2], torch.zeros(2, 2)], 1))

    @pytest.mark.parametrize(
        "softcap, before, place", [(50.0, True, "inner"), (50.0, False, "outer"), (None, True, "outer")]
    )
    def test_before_or_after_the_softcap(self, softcap: float | None, before: bool, place: str) -> None:
        made, seq = one_layer(N, softcap=softcap)
        apply(made, seq, Bias(torch.ones(2, N), before_softcap=before))
        data = made.cache.layer(seq, 0)
        here, there = (data.inner_bias, data.bias) if place == "inner" else (data.bias, data.inner_bias)
        assert here is not None and torch.equal(here, torch.ones(2, N)) and there is None


class TestQuantize:
    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_tokens_in_scope_and_no_others(self, bits: int) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Quantize(bits, bits, group=4, tokens=torch.arange(N) < 5))
        for rows in made.truth[seq, 0]:
            for p in range(5):
                rows[p] = tuple(  # type: ignore[assignment]
                    torch.tensor(quantised(x[:4].tolist(), bits) + quantised(x[4:].tolist(), bits)) for x in rows[p]
                )
        made.check(seq, atol=1e-6)
        assert made.cache.layer(seq, 0).encoded.tolist() == [[True] * 5 + [False] * 3] * 2  # type: ignore[union-attr]

    def test_keys_per_channel_over_groups_of_tokens(self) -> None:
        """8 tokens in groups of 4 along time for keys; values per token over 4 channels."""
        made, seq = one_layer(N)
        apply(made, seq, Quantize(4, 2, key_axis="channel", group=4))
        for rows in made.truth[seq, 0]:
            keys = torch.stack([rows[p][0] for p in range(N)])
            for first in (0, 4):
                for channel in range(8):
                    keys[first : first + 4, channel] = torch.tensor(
                        quantised(keys[first : first + 4, channel].tolist(), 2)
                    )
            for p in range(N):
                v = rows[p][1].tolist()
                rows[p] = (keys[p], torch.tensor(quantised(v[:4], 4) + quantised(v[4:], 4)))
        made.check(seq, atol=1e-6)

    def test_ragged_scope_and_heads(self) -> None:
        """The same encoding whether or not the heads' tokens line up."""
        made, seq = one_layer(N)
        apply(made, seq, Evict(torch.stack([torch.arange(N) > 4, torch.arange(N) != 3])))
        made.keep(seq, 0, [[5, 6, 7], [0, 1, 2, 4, 5, 6, 7]])
        scope = torch.zeros(2, 7, dtype=torch.bool)
        scope[0, :2], scope[1, [1, 3, 4]] = True, True
        apply(made, seq, Quantize(4, 4, group=4, tokens=scope))
        for rows, chosen in zip(made.truth[seq, 0], ([5, 6], [1, 4, 5]), strict=True):
            for p in chosen:
                rows[p] = tuple(  # type: ignore[assignment]
                    torch.tensor(quantised(x[:4].tolist(), 4) + quantised(x[4:].tolist(), 4)) for x in rows[p]
                )
        made.check(seq, atol=1e-6)
        (segment,) = made.cache.ledger.segments(seq, 0)
        assert segment.positions.tolist() == [[5, 6, -1], [1, 4, 5]]
        # 5 tokens x 16 channels x 4 bits, 4 groups of 4 channels with 4 bytes each; nothing for the padding.
        assert segment.nbytes == 5 * 8 + 5 * 4 * 4

    def test_zero_bits_drop_tokens_of_a_head(self) -> None:
        made, seq = one_layer(N)
        bits = torch.full((2, N), 16)
        bits[0, [0, 3]], bits[1, 7] = 0, 0
        apply(made, seq, Quantize(bits, 16))
        made.keep(seq, 0, [[1, 2, 4, 5, 6, 7], list(range(7))])
        made.check(seq)
        assert made.cache.layer(seq, 0).encoded.sum(1).tolist() == [6, 7]  # type: ignore[union-attr]

    def test_zero_key_bits_drop_a_token_too(self) -> None:
        made, seq = one_layer(N)
        bits = torch.full((2, N), 16)
        bits[:, 2] = 0
        apply(made, seq, Quantize(16, bits))
        made.keep(seq, 0, [[0, 1, 3, 4, 5, 6, 7]] * 2)
        made.check(seq)

    def test_two_edits_drop_what_each_of_them_drops(self) -> None:
        made, seq = one_layer(N)
        bits = torch.full((2, N), 16)
        bits[:, [1, 6]] = 0
        first = torch.arange(N) < 4
        apply(made, seq, Quantize(bits, 16, tokens=first), Quantize(bits, 16, tokens=~first))
        made.keep(seq, 0, [[0, 2, 3, 4, 5, 7]] * 2)
        made.check(seq)

    def test_zero_bits_of_a_key_channel_make_it_zero(self) -> None:
        made, seq = one_layer(N)
        bits = torch.full((2, 8), 16)
        bits[0, 1], bits[1, [4, 5]] = 0, 0
        apply(made, seq, Quantize(16, bits, key_axis="channel"))
        for rows, gone in zip(made.truth[seq, 0], ([1], [4, 5]), strict=True):
            for k, _ in rows.values():
                k[gone] = 0
        made.check(seq)

    def test_widths_follow_the_columns_of_the_scope(self) -> None:
        made, seq = one_layer(N)
        bits = torch.tensor([[2, 16, 8, 16, 2, 16, 4, 8], [8, 2, 16, 16, 2, 4, 16, 2]])
        apply(made, seq, Quantize(bits, bits, tokens=torch.arange(N) >= 2))
        for head, rows in enumerate(made.truth[seq, 0]):
            for p in range(2, N):
                width = int(bits[head, p])
                if width < 16:
                    rows[p] = tuple(torch.tensor(quantised(x.tolist(), width)) for x in rows[p])  # type: ignore[assignment]
        made.check(seq, atol=1e-6)

    def test_fp8_of_a_ragged_scope_holds_no_padding(self) -> None:
        made, seq = one_layer(N)
        scope = torch.zeros(2, N, dtype=torch.bool)
        scope[0, :6], scope[1, 2] = True, True
        apply(made, seq, Quantize(8, 8, number="fp8_e4m3", tokens=scope))
        for rows, chosen in zip(made.truth[seq, 0], (range(6), [2]), strict=True):
            for p in chosen:
                rows[p] = tuple(x.to(torch.float8_e4m3fn).float() for x in rows[p])  # type: ignore[assignment]
        made.check(seq)
        assert made.cache.ledger.segments(seq, 0)[0].nbytes == 7 * 16

    def test_the_default_scope_is_what_is_still_raw(self) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Quantize(16, 16, tokens=torch.arange(N) < 3))
        made.extend(seq, 2, committed=False)
        apply(made, seq, Quantize(16, 16))
        assert [s.positions[0].tolist() for s in made.cache.ledger.segments(seq, 0)] == [[0, 1, 2], [3, 4, 5, 6, 7]]
        made.check(seq)


def bases(groups: tuple[tuple[int, ...], ...], dim: int, rank: int, seed: int) -> Any:
    rng = torch.Generator().manual_seed(seed)
    encode = tuple(torch.randn(len(g) * dim, rank, generator=rng) for g in groups)
    decode = tuple(torch.randn(rank, len(g) * dim, generator=rng) for g in groups)
    return encode, decode


class TestLowRank:
    @pytest.mark.parametrize("domain", ["pre_rope", "post_rope"])
    @pytest.mark.parametrize("groups", [((0, 1),), ((0,), (1,)), ((1, 0),)])
    def test_rows_go_through_the_bases_in_the_domain(self, domain: Any, groups: tuple[tuple[int, ...], ...]) -> None:
        made, seq = one_layer(N, rope=ROPE)
        key, value = bases(groups, 8, 3, 1), bases(groups, 8, 2, 2)
        apply(made, seq, LowRank(groups, *key, *value, domain=domain, tokens=torch.arange(N) >= 2))
        truth = made.truth[seq, 0]
        for number, group in enumerate(groups):
            for p in range(2, N):
                at = torch.tensor([p])
                k = torch.cat([truth[h][p][0] for h in group]).view(len(group), 1, 8)
                k = unrotate(k, at, ROPE) if domain == "pre_rope" else k
                k = (k.flatten() @ key[0][number] @ key[1][number]).view(len(group), 1, 8)
                k = rotate(k, at, ROPE) if domain == "pre_rope" else k
                v = torch.cat([truth[h][p][1] for h in group]) @ value[0][number] @ value[1][number]
                for row, head in enumerate(group):
                    truth[head][p] = (k[row, 0], v.view(len(group), 8)[row])
        made.check(seq, atol=1e-4)
        # Coefficients are billed at the layout's dtype, 2 bytes.
        assert made.cache.ledger.segments(seq, 0)[0].nbytes == 6 * len(groups) * (3 + 2) * 2

    def test_biases_and_the_key_norm_are_put_back(self) -> None:
        """Keys are projected per head and before their norm, values over both heads; holes shift nothing."""
        rng = torch.Generator().manual_seed(3)
        made, seq = one_layer(N, rope=ROPE)
        key, value = bases(((1,), (0,)), 8, 3, 1), bases(((0, 1),), 8, 2, 2)
        rows, weight = torch.randn(2, N, 8, generator=rng), torch.randn(8, generator=rng)
        bias = torch.randn(2, 2, 8, generator=rng)
        scope = torch.arange(N) % 2 == 1
        apply(
            made,
            seq,
            LowRank(
                ((1,), (0,)),
                key[0],
                key[1],
                value[0],
                value[1],
                domain="pre_rope",
                tokens=scope,
                value_groups=((0, 1),),
                key_bias=bias[0],
                value_bias=bias[1],
                key_norm=KeyNorm(weight, 0.1, rows),
            ),
        )
        truth = made.truth[seq, 0]
        for p in scope.nonzero().flatten().tolist():
            values = torch.cat([truth[h][p][1] - bias[1, h] for h in range(2)]) @ value[0][0] @ value[1][0]
            for number, head in enumerate((1, 0)):
                k = (rows[head, p] - bias[0, head]) @ key[0][number] @ key[1][number] + bias[0, head]
                k = k / (k.square().mean() + 0.1).sqrt() * weight
                k = rotate(k[None, None], torch.tensor([p]), ROPE)[0, 0]
                truth[head][p] = (k, values.view(2, 8)[head] + bias[1, head])
        made.check(seq, atol=1e-4)

    def test_one_side_alone_leaves_the_other(self) -> None:
        made, seq = one_layer(N)
        value = bases(((0, 1),), 8, 2, 2)
        apply(made, seq, LowRank(((0, 1),), None, None, *value, domain="pre_rope"))
        for p in range(N):
            v = torch.cat([made.truth[seq, 0][h][p][1] for h in range(2)]) @ value[0][0] @ value[1][0]
            for head in range(2):
                made.truth[seq, 0][head][p] = (made.truth[seq, 0][head][p][0], v.view(2, 8)[head])
        made.check(seq, atol=1e-4)
        assert made.cache.ledger.segments(seq, 0)[0].nbytes == N * (2 * 8 + 2) * 2


class TestOrder:
    def test_what_is_encoded_is_what_a_merge_wrote(self) -> None:
        made, seq = one_layer(N)
        apply(
            made,
            seq,
            Evict(torch.arange(N) != 1),
            Quantize(4, 4, tokens=torch.arange(N) == 3),
            Merge(into((0, 1, 3), (1, 1, 3)), torch.ones(2, N), values_only=False),
        )
        for rows in made.truth[seq, 0]:
            rows[3] = tuple(  # type: ignore[assignment]
                torch.tensor(quantised(((x + y) / 2).tolist(), 4)) for x, y in zip(rows[3], rows[1], strict=True)
            )
        made.keep(seq, 0, [[0, 2, 3, 4, 5, 6, 7]] * 2)
        made.check(seq, atol=1e-6)

    def test_one_kv_head_in_one_block_too(self) -> None:
        """The smallest cache, where a gather may be a window onto the store itself."""
        made, seq = one_layer(3, kv_heads=1)
        merge = Merge(into((0, 0, 1), heads=1, tokens=3), torch.ones(1, 3), values_only=False)
        apply(made, seq, merge, Quantize(16, 16))
        rows = made.truth[seq, 0][0]
        rows[1] = merged(rows, torch.ones(3), 1, [0])
        made.check(seq, atol=1e-6)
        made.cache.store.keys(0).fill_(torch.nan)
        made.cache.store.values(0).fill_(torch.nan)
        made.check(seq, atol=1e-6)

    def test_two_codes_side_by_side(self) -> None:
        made, seq = one_layer(N)
        first = torch.arange(N) < 4
        apply(made, seq, Quantize(16, 16, tokens=first), Quantize(16, 16, tokens=~first))
        made.check(seq)
        assert len(made.cache.ledger.segments(seq, 0)) == 2

    def test_a_view_of_the_stored_runs_agrees_after_all_of_it(self) -> None:
        made, seq = one_layer(N)
        apply(made, seq, Quantize(8, 8, tokens=torch.arange(N) < 4), Evict(torch.arange(N) != 2))
        data, runs = made.cache.layer(seq, 0), as_stored(made.cache, seq, 0)
        for head in range(2):
            for at, p in enumerate(data.positions[head].tolist()):
                assert torch.equal(runs[head][p][0], data.k[head, at])
