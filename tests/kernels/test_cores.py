"""The small functions that every kernel leans on, over all their inputs where there are few enough."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from kvassay.cache.codec import pack
from kvassay.kernels.codes import from_float8, half, unpack
from kvassay.kernels.cores import exp2
from kvassay.kernels.vectors import multiply_rows


@njit
def exp2_all(x, out):  # type: ignore[no-untyped-def]
    for i in range(x.shape[0]):
        out[i] = exp2(x[i])


@njit
def half_all(bits, out):  # type: ignore[no-untyped-def]
    for i in range(bits.shape[0]):
        out[i] = half(bits[i])


@njit
def products(factors, n, rows, begin, out):  # type: ignore[no-untyped-def]
    multiply_rows(factors, n, rows, begin, out)


def powers(x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    exp2_all(x, out)
    return out


def test_exp2_is_right_to_a_unit_in_the_last_place() -> None:
    x = np.concatenate([np.linspace(-125.9, 0, 200_001), np.linspace(-1, 40, 100_001)]).astype(np.float32)
    error = np.abs(powers(x) / np.exp2(x.astype(np.float64)) - 1)
    assert error.max() < 2.0**-23


def test_exp2_at_its_ends() -> None:
    x = np.array([0, 1, -1, 40, -126, -126.5, -1000, -np.inf, np.nan], dtype=np.float32)
    expected = np.array([1, 2, 0.5, 2.0**40, 2.0**-126, 0, 0, 0, np.nan], dtype=np.float32)
    np.testing.assert_array_equal(powers(x), expected)


def test_half_of_every_finite_float16() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    true = bits.view(np.float16).astype(np.float32)
    finite = np.isfinite(true)
    out = np.empty(2**16, dtype=np.float32)
    half_all(bits, out)
    np.testing.assert_array_equal(out[finite], true[finite])


def test_float8_of_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = np.empty(256, dtype=np.float32)
    from_float8(codes.numpy(), out)
    np.testing.assert_array_equal(out, codes.view(torch.float8_e4m3fn).float().numpy())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unpack_undoes_pack(bits: int) -> None:
    codes = torch.randint(2**bits, (120,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    pairs = np.array([0.5, -3, 2, 1], dtype=np.float32)
    out = np.full(122, -1, dtype=np.float32)
    # Two groups of 60 codes, each of three vectors and a rest.
    unpack(pack(codes, bits).numpy(), 0, 60 * bits // 8, bits, 2, 60, pairs, out, 1)
    expected = np.concatenate([[-1], codes[:60].numpy() * 0.5 - 3, codes[60:].numpy() * 2.0 + 1, [-1]])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("width", [1, 15, 16, 40, 64, 72, 200])
def test_rows_are_multiplied_at_any_width_and_number_of_heads(heads: int, width: int) -> None:
    rng = np.random.default_rng(heads * width)
    factors, rows = rng.integers(-3, 4, (heads, 12)), rng.integers(-3, 4, (11, width))
    flat = np.concatenate([[7, 7], rows.ravel()]).astype(np.float32)
    out = np.full((heads, width + 2), np.nan, dtype=np.float32)  # what it held before is no part of the sum
    products(factors.astype(np.float32), 11, flat, 2, out[:, :width])
    np.testing.assert_array_equal(out[:, :width], factors[:, :11] @ rows)  # small integers: exact in float32
    assert np.isnan(out[:, width:]).all()
