"""The codes: packed bits, error bounds, and sizes that are those of the tensors held."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvassay.cache.codec import (
    ChannelGroups,
    Coefficients,
    Encoder,
    Float8,
    Mixed,
    Packed,
    Raw,
    Size,
    TokenGroups,
    pack,
    unpack,
)


def half_error(x: Tensor) -> Tensor:
    """How far rounding x to float16 can move it: half a unit in the last place, subnormals included."""
    return (x.abs() * 2.0**-11).clamp(min=2.0**-25)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(value: object) -> Iterator[Tensor]:
    """All tensors inside a code."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


def held(code: object) -> int:
    """Bytes of all tensors inside a code."""
    return sum(t.numel() * t.element_size() for t in tensors(code))


def quantised(row: list[float], bits: int) -> list[float]:
    """One row through asymmetric min/max codes with float16 scale and zero, element by element."""

    def half(x: float) -> float:
        return float(torch.tensor(x).half())

    top = 2**bits - 1
    zero = half(min(row))
    scale = half(max(max(row) - zero, 0.0) / top)
    codes = [min(max(round((x - zero) / scale), 0), top) if scale else 0 for x in row]
    return [code * scale + zero for code in codes]


def bound(x: Tensor, packed: Packed) -> Tensor:
    """Largest error per row: half a step, what rounding scale and zero moves the ends by, and float32 rounding."""
    step, zero = packed.scale.float(), packed.zero.float()
    ends = (2**packed.bits - 1) * half_error(step * (1 + 2.0**-10)) + half_error(zero * (1 + 2.0**-10))
    return step / 2 + ends + 2.0**-22 * x.abs().amax(-1)


class TestPack:
    @given(
        bits=st.sampled_from([2, 4, 8]),
        rows=st.integers(1, 3),
        length=st.integers(1, 33),
        seed=st.integers(0, 2**31),
    )
    def test_round_trip_at_any_length(self, bits: int, rows: int, length: int, seed: int) -> None:
        codes = torch.randint(0, 2**bits, (rows, length), generator=torch.Generator().manual_seed(seed))
        packed = pack(codes, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (rows, -(-length * bits // 8))
        assert torch.equal(unpack(packed, bits, length).long(), codes)

    def test_least_significant_code_first_and_a_zero_tail(self) -> None:
        assert pack(torch.tensor([1, 2, 3, 0, 3]), 2).tolist() == [0b00111001, 0b00000011]
        assert pack(torch.tensor([0xA, 0x5, 0xF]), 4).tolist() == [0x5A, 0x0F]


class TestPacked:
    @given(
        bits=st.sampled_from([2, 4, 8]),
        length=st.integers(1, 40),
        spread=st.floats(1e-7, 1e3),
        shift=st.floats(-100, 100),
        seed=st.integers(0, 2**31),
    )
    def test_errors_are_within_half_a_step(
        self, bits: int, length: int, spread: float, shift: float, seed: int
    ) -> None:
        x = random(4, length, seed=seed) * spread + shift
        packed = Packed.encode(x, bits)
        assert bool(((packed.decode() - x).abs().amax(-1) <= bound(x, packed)).all())

    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_codes_are_those_of_the_element_by_element_oracle(self, bits: int) -> None:
        x = random(5, 13)
        expected = torch.tensor([quantised(row, bits) for row in x.tolist()])
        torch.testing.assert_close(Packed.encode(x, bits).decode(), expected, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("value", [0.0, -3.5, 1000.0])
    def test_constants_are_exact(self, value: float) -> None:
        """Every constant that float16 holds."""
        assert torch.equal(Packed.encode(torch.full((2, 9), value), 2).decode(), torch.full((2, 9), value))

    def test_the_ends_of_a_range_are_codes(self) -> None:
        x = torch.tensor([[-1.0, 0.0, 1.0, 2.0]])
        assert Packed.encode(x, 2).codes.tolist() == [[0b11100100]]
        assert torch.equal(Packed.encode(x, 2).decode(), x)

    @pytest.mark.parametrize(
        "bits, length, payload, padding", [(2, 16, 12, 0), (2, 5, 3, 3), (4, 7, 10, 2), (8, 7, 21, 0)]
    )
    def test_size_is_that_of_the_tensors(self, bits: int, length: int, payload: int, padding: int) -> None:
        packed = Packed.encode(random(3, length), bits)
        assert packed.size == Size(payload=payload, metadata=3 * 4, padding=padding)
        assert packed.size.total(2.0) == held(packed)


class TestTokenGroups:
    @pytest.mark.parametrize("group", [None, 4, 8])
    def test_each_group_of_channels_of_a_token_has_its_scale(self, group: int | None) -> None:
        x = random(2, 3, 8)
        size = group or 8
        code = TokenGroups.encode(x, 4, group)
        decoded = code.decode()
        for head in range(2):
            for token in range(3):
                for first in range(0, 8, size):
                    expected = quantised(x[head, token, first : first + size].tolist(), 4)
                    assert decoded[head, token, first : first + size].tolist() == pytest.approx(expected, abs=1e-6)
        assert code.size.total(2.0) == held(code) == 2 * 3 * 8 // 2 + 2 * 3 * (8 // size) * 4


class TestChannelGroups:
    @pytest.mark.parametrize("group, groups", [(4, [4, 4, 3]), (11, [11]), (None, [11]), (16, [11])])
    def test_the_last_group_may_be_short(self, group: int | None, groups: list[int]) -> None:
        x = random(2, 11, 5)
        code = ChannelGroups.encode(x, 2, group)
        decoded, first = code.decode(), 0
        for size in groups:
            rows = slice(first, first + size)
            for head in range(2):
                for channel in range(5):
                    expected = quantised(x[head, rows, channel].tolist(), 2)
                    assert decoded[head, rows, channel].tolist() == pytest.approx(expected, abs=1e-6)
            first += size
        payload = sum(2 * 5 * -(-size * 2 // 8) for size in groups)
        assert code.size.total(2.0) == held(code) == payload + 2 * 5 * len(groups) * 4


def tokenwise(group: int | None = None) -> Encoder:
    return lambda x, bits: Raw(x) if bits == 16 else TokenGroups.encode(x, bits, group)


def channelwise(group: int | None = None) -> Encoder:
    return lambda x, bits: Raw(x) if bits == 16 else ChannelGroups.encode(x, bits, group)


class TestMixed:
    @pytest.mark.parametrize("group", [None, 2])
    def test_tokens_at_their_own_widths(self, group: int | None) -> None:
        x, size = random(2, 6, 4), group or 4
        bits = torch.tensor([[0, 2, 4, 8, 16, 2], [8, 8, 0, 0, 16, 4]])
        present = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1]]).bool()
        code = Mixed.encode(x, bits, "token", present, tokenwise(group))
        decoded = code.decode()
        for head in range(2):
            for token in range(6):
                width = int(bits[head, token]) if present[head, token] else 0
                row = x[head, token].tolist()
                expected = [0.0] * 4 if width == 0 else row
                if 0 < width < 16:
                    expected = [y for at in range(0, 4, size) for y in quantised(row[at : at + size], width)]
                assert decoded[head, token].tolist() == pytest.approx(expected, abs=1e-6)

    @pytest.mark.parametrize("group", [None, 3])
    def test_channels_at_their_own_widths_over_each_heads_tokens(self, group: int | None) -> None:
        x = random(2, 7, 5)
        bits = torch.tensor([[0, 2, 4, 8, 16], [16, 2, 2, 2, 8]])
        present = torch.ones(2, 7, dtype=torch.bool)
        present[0, [1, 4]] = False
        decoded = Mixed.encode(x, bits, "channel", present, channelwise(group)).decode()
        for head in range(2):
            rows = present[head].nonzero().flatten().tolist()
            for channel in range(5):
                width, column = int(bits[head, channel]), x[head, rows, channel].tolist()
                expected = [0.0] * len(rows) if width == 0 else column
                if 0 < width < 16:
                    size = group or len(rows)
                    parts = [column[at : at + size] for at in range(0, len(rows), size)]
                    expected = [y for part in parts for y in quantised(part, width)]
                assert decoded[head, rows, channel].tolist() == pytest.approx(expected, abs=1e-6)
            assert not decoded[head, ~present[head]].any()

    def test_a_head_with_nothing_present_holds_nothing(self) -> None:
        present = torch.tensor([[False, False], [True, True]])
        code = Mixed.encode(random(2, 2, 4), torch.full((2, 2), 8), "token", present, tokenwise())
        assert [part.head for part in code.parts] == [1]
        assert not code.decode()[0].any()

    def test_absent_rows_are_never_read(self) -> None:
        x = random(1, 3, 4)
        x[0, 1] = torch.nan
        present = torch.tensor([[True, False, True]])
        for axis, encoder, width in (("token", tokenwise(), 3), ("channel", channelwise(), 4)):
            code = Mixed.encode(x, torch.full((1, width), 4), axis, present, encoder)  # type: ignore[arg-type]
            assert bool(torch.isfinite(code.decode()).all())

    def test_bytes_by_hand(self) -> None:
        """Head 0: 1 token of 4 channels at 2 bits and 1 raw, each listed; head 1: both at 8 bits, no list needed."""
        bits = torch.tensor([[2, 16], [8, 8]])
        code = Mixed.encode(random(2, 2, 4), bits, "token", torch.ones(2, 2, dtype=torch.bool), tokenwise())
        assert code.size == Size(payload=1 + 2 * 4, metadata=4 + 2 * 4 + 2 * 4, raw_elements=4)

    def test_a_dropped_channel_makes_the_others_be_listed(self) -> None:
        bits = torch.tensor([[0, 8, 8, 8]])
        code = Mixed.encode(random(1, 5, 4), bits, "channel", torch.ones(1, 5, dtype=torch.bool), channelwise())
        assert code.size == Size(payload=3 * 5, metadata=3 * 4 + 3 * 4)


class TestFloat8:
    def test_is_torchs_cast_saturated(self) -> None:
        x = torch.cat([random(2, 50) * 300, torch.tensor([[447.0, 449.0], [-1e9, 1e-9]])], 1)
        code = Float8.encode(x)
        assert torch.equal(code.decode(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
        assert code.decode()[:, -2:].tolist() == [[448.0, 448.0], [-448.0, 0.0]]
        assert code.size == Size(payload=104) and held(code) == 104


class TestRaw:
    def test_elements_are_billed_at_the_caches_dtype(self) -> None:
        x = random(2, 3, 4)
        assert Raw(x).decode() is x
        assert (Raw(x).size.total(2.0), Raw(x).size.total(1.0)) == (48, 24)


class TestCoefficients:
    def test_heads_of_a_group_share_a_basis_over_their_joined_channels(self) -> None:
        x = random(3, 5, 4).double()
        groups = ((0, 2), (1,))
        encoders = [random(8, 3, seed=1).double(), random(4, 2, seed=2).double()]
        decoders = [random(3, 8, seed=3).double(), random(2, 4, seed=4).double()]
        code = Coefficients.encode(x, groups, encoders, decoders)
        expected = torch.empty_like(x)
        for token in range(5):
            joined = torch.cat([x[0, token], x[2, token]]) @ encoders[0] @ decoders[0]
            expected[0, token], expected[2, token] = joined[:4], joined[4:]
            expected[1, token] = x[1, token] @ encoders[1] @ decoders[1]
        torch.testing.assert_close(code.decode(), expected)
        assert code.size == Size(raw_elements=5 * 3 + 5 * 2)

    def test_bases_of_another_float_type_are_cast(self) -> None:
        x = random(1, 4, 3)
        eye = torch.eye(3, dtype=torch.float64)
        decoded = Coefficients.encode(x, ((0,),), [eye], [eye]).decode()
        assert decoded.dtype == torch.float32 and torch.equal(decoded, x)


class TestSize:
    def test_kinds_add_up(self) -> None:
        total = Size(1, 2, 3, 4) + Size(10, 20, 30, 40)
        assert total == Size(11, 22, 33, 44)
        assert total.total(0.5) == 11 + 22 + 33 + 22
