"""Register-blocked inner loops for numba, written as LLVM vector code: what its loop vectoriser does not find.

Each row of keys or values is loaded once for up to `HEADS` query heads; the sums of `TOKENS` dot products are
reduced together. Rows are named by the element at which they begin: `at[line, t]` is token t's, so that a list of
scattered slots costs no more than a table of blocks.

Memory is read fastest in order, a row after the other, as one head alone reads it: the processor sees what comes, and
whatever is fetched besides only hinders it. Where several rows are read at once, or rows lie apart, it does not see it,
and rows that come next are fetched ahead of their use into the second cache, a few lines with each step: more at once
wait for each other.

Loads are as wide as the host's vectors; numba's cache on disk is kept per host CPU, and per state of this room's
sources (`kvassay.runtime.compiled_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16 if binding.get_host_cpu_features().get("avx512f") else 8
HEADS, TOKENS = 4, 4
"""Query heads and tokens that are taken together; one head alone takes a token at a time, all of its row."""
WIDE = 4 if LANES == 16 else 2
"""Vectors of a row taken together where sums stay in registers: HEADS times as many, half of what the host has."""
LINE = 16
"""Elements of a cache line."""
SECOND_CACHE = 2

FLOAT, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VECTOR, WHOLE = ir.VectorType(FLOAT, LANES), ir.VectorType(I32, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)
LOOSE = ("reassoc", "contract", "nsz")

Value = Any
"""A value or pointer of llvmlite, which has no types of its own to check by."""
Load = Callable[[Value], Value]


class _Array:
    """An array as an intrinsic sees it; its rows may lie apart, the elements of a row do not."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Value) -> None:
        self.builder, made = builder, context.make_array(kind)(context, builder, value)
        self.data = made.data
        shape = cgutils.unpack_tuple(builder, made.shape, kind.ndim)
        self.length, self.width = shape[0], shape[-1]
        size = context.get_abi_sizeof(context.get_value_type(kind.dtype))
        apart = cgutils.unpack_tuple(builder, made.strides, kind.ndim)[0]
        self.step = builder.ashr(apart, I64(size.bit_length() - 1))  # in bytes; a division takes as long as a row

    def place(self, row: Value, column: Value | None = None) -> Value:
        """Pointer to an element of an array of two dimensions."""
        b, start = self.builder, self.builder.mul(row, self.step)
        return b.gep(self.data, [start if column is None else b.add(start, column)])

    def data_at(self, element: Value) -> Value:
        """Pointer to an element of an array of one dimension."""
        return self.builder.gep(self.data, [element])


def _load(b: Any, pointer: Value) -> Value:
    loaded = b.load(b.bitcast(pointer, VECTOR.as_pointer()))
    loaded.align = 4
    return loaded


def _store(b: Any, value: Value, pointer: Value) -> None:
    b.store(value, b.bitcast(pointer, value.type.as_pointer())).align = 4


def _declared(b: Any, name: str, result: Any, *arguments: Any) -> Any:
    return cgutils.get_or_insert_function(b.module, ir.FunctionType(result, arguments), name)


def _multiply_add(b: Any, x: Value, y: Value, to: Value) -> Value:
    return b.call(_declared(b, f"llvm.fma.v{LANES}f32", VECTOR, VECTOR, VECTOR, VECTOR), [x, y, to])


def _splat(b: Any, x: Value, kind: Any = VECTOR) -> Value:
    first = b.insert_element(ir.Constant(kind, ir.Undefined), x, I32(0))
    return b.shuffle_vector(first, first, ir.Constant(WHOLE, [0] * LANES))


def _fetch(b: Any, pointer: Value) -> None:
    """Have the line that holds an element brought near; nothing waits for it."""
    byte = b.bitcast(pointer, ir.IntType(8).as_pointer())
    function = _declared(b, "llvm.prefetch.p0", ir.VoidType(), byte.type, I32, I32, I32)
    b.call(function, [byte, I32(0), I32(SECOND_CACHE), I32(1)])


def _mask(b: Any, count: Value) -> Value:
    """The first `count` lanes."""
    lanes = ir.Constant(WHOLE, list(range(LANES)))
    return b.icmp_signed("<", lanes, _splat(b, b.trunc(count, I32), WHOLE))


def _masked_load(b: Any, pointer: Value, mask: Value) -> Value:
    place = b.bitcast(pointer, VECTOR.as_pointer())
    function = _declared(b, f"llvm.masked.load.v{LANES}f32.p0", VECTOR, place.type, I32, mask.type, VECTOR)
    return b.call(function, [place, I32(4), mask, ZEROS])


def _masked_store(b: Any, value: Value, pointer: Value, mask: Value) -> None:
    place = b.bitcast(pointer, VECTOR.as_pointer())
    function = _declared(
        b, f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), VECTOR, place.type, I32, mask.type
    )  # fmt: skip
    b.call(function, [value, place, I32(4), mask])


def _pick(b: Any, x: Value, y: Value, lanes: Sequence[int]) -> Value:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))


def _sums(b: Any, vectors: list[Value]) -> list[Value]:
    """Sums over the lanes of each vector, in order, as many to a vector as fall out: neighbours are added together."""
    each = LANES
    while each > 1:
        count = vectors[0].type.count
        low = [start + lane for start in range(0, count, each) for lane in range(each // 2)]
        high = [lane + each // 2 for lane in low]
        if len(vectors) % 2 == 0 and count == LANES:
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            low, high = ([*one, *(lane + count for lane in one)] for one in (low, high))
        else:
            pairs = zip(vectors, vectors, strict=True)
        vectors = [b.fadd(_pick(b, x, y, low), _pick(b, x, y, high), flags=LOOSE) for x, y in pairs]
        each //= 2
    return vectors


def _registers(b: Any, count: int) -> list[Value]:
    """Vectors of zeros; they have a place on the stack, and LLVM keeps them in registers."""
    places = [cgutils.alloca_once(b, VECTOR) for _ in range(count)]
    for place in places:
        b.store(ZEROS, place)
    return places


def _by_heads(b: Any, group: Value, body: Callable[[Value, int], None]) -> None:
    """Call `body(first head, heads)` for HEADS heads at a time, and once for what is left."""
    with cgutils.for_range_slice(b, I64(0), group, I64(HEADS)) as (g, _):
        left = b.sub(group, g)
        for heads in range(1, HEADS + 1):
            with b.if_then(b.icmp_signed("==" if heads < HEADS else ">=", left, I64(heads))):
                body(g, heads)


class _Tokens:
    """A few tokens' rows, and those that are fetched meanwhile: on the first pass, if there is a line ahead."""

    def __init__(self, b: Any, rows: _Array, at: _Array, line: Value, ahead: Value, tokens: list[Value], g: Value):
        self.builder = b
        some = b.icmp_signed(">=", ahead, I64(0))
        ahead = b.select(some, ahead, line)  # no place before the first line is looked up
        self.here, self.there = ([rows.data_at(b.load(at.place(of, t))) for t in tokens] for of in (line, ahead))
        self.told = b.and_(some, b.icmp_signed("==", g, I64(0)))

    def load(self, load: Load, d: Value) -> list[Value]:
        """A vector of each row from element d on."""
        b, told = self.builder, self.told
        if LANES < LINE:
            told = b.and_(told, b.icmp_signed("==", b.and_(d, I64(LINE - 1)), I64(0)))
        with b.if_then(told):
            for row in self.there:
                _fetch(b, b.gep(row, [d]))
        return [load(b.gep(row, [d])) for row in self.here]


@intrinsic
def row_dots(typing, q, rows, at, line, ahead, n, out):  # type: ignore[no-untyped-def]
    """out[g, t] = q[g] . the row that begins at rows[at[line, t]], t < n rounded up to TOKENS, q [group, width].

    ahead: the line of `at` whose rows are fetched meanwhile, -1 for none
    """

    def code(context, b, signature, given):  # type: ignore[no-untyped-def]
        q, rows, at, out = (_Array(context, b, signature.args[i], given[i]) for i in (0, 1, 2, 6))
        line, ahead, n = given[3:6]

        def body(g: Value, heads: int) -> None:
            queries = [q.place(b.add(g, I64(h))) for h in range(heads)]
            many = TOKENS if heads > 1 else 1
            with cgutils.for_range_slice(b, I64(0), n, I64(many)) as (t, _):
                tokens = [b.add(t, I64(i)) for i in range(many)]
                found = _block(b, queries, _Tokens(b, rows, at, line, ahead, tokens, g), q.width)
                for h in range(heads):
                    _store(b, found[h], out.place(b.add(g, I64(h)), t))

        _by_heads(b, q.length, body)
        return context.get_dummy_value()

    return types.void(q, rows, at, line, ahead, n, out), code


def _block(b: Any, queries: list[Value], rows: _Tokens, width: Value) -> list[Value]:
    """Dot products of queries and a few rows, for each query a vector of as many."""
    tokens = len(rows.here)
    sums = _registers(b, len(queries) * tokens)

    def step(d: Value, load: Load, *_: object) -> None:
        row = rows.load(load, d)
        for h, query in enumerate(queries):
            x = load(b.gep(query, [d]))
            for i in range(tokens):
                place = sums[h * tokens + i]
                b.store(_multiply_add(b, x, row[i], b.load(place)), place)

    _over_width(b, width, step)
    done = _sums(b, [b.load(one) for one in sums])
    share = done[0].type.count // tokens
    firsts = (h % share * tokens for h in range(len(queries)))
    return [_pick(b, done[h // share], done[h // share], range(at, at + tokens)) for h, at in enumerate(firsts)]


def _add_rows(b: Any, factors: list[list[Value]], rows: _Tokens, to: list[Value], width: Value) -> None:
    """Add to each of `to` all rows times its factors."""

    def step(d: Value, load: Load, store: Callable[[Value, Value], None], _: int) -> None:
        row = rows.load(load, d)
        for mine, one in zip(factors, to, strict=True):
            place = b.gep(one, [d])
            found = load(place)
            for factor, x in zip(mine, row, strict=True):
                found = _multiply_add(b, factor, x, found)
            store(found, place)

    _over_width(b, width, step)


def _over_width(b: Any, width: Value, step: Callable[..., None], most: int = 1) -> None:
    """Call `step(first element, load, store, vectors)` over a row: `most` vectors at a time, then one at a time.

    What is left at the row's end is masked.
    """
    done = I64(0)
    for count in sorted({most, 1}, reverse=True):
        end = b.add(done, b.and_(b.sub(width, done), I64(-count * LANES)))
        with cgutils.for_range_slice(b, done, end, I64(count * LANES)) as (d, _):
            step(d, lambda p: _load(b, p), lambda x, p: _store(b, x, p), count)
        done = end
    rest = b.sub(width, done)
    with b.if_then(b.icmp_signed(">", rest, I64(0)), likely=False):
        mask = _mask(b, rest)
        step(done, lambda p: _masked_load(b, p, mask), lambda x, p: _masked_store(b, x, p, mask), 1)


@intrinsic
def row_mix(typing, weights, n, rows, at, line, ahead, acc):  # type: ignore[no-untyped-def]
    """acc[g] += sum over t < n of weights[g, t] * the row that begins at rows[at[line, t]]; `ahead` as above."""

    def code(context, b, signature, given):  # type: ignore[no-untyped-def]
        weights, rows, at, acc = (_Array(context, b, signature.args[i], given[i]) for i in (0, 2, 3, 6))
        n, line, ahead = given[1], given[4], given[5]

        def tokens(g: Value, heads: int, first: Value, end: Value, many: int) -> None:
            with cgutils.for_range_slice(b, first, end, I64(many)) as (t, _):
                some = [b.add(t, I64(i)) for i in range(many)]
                which = [b.add(g, I64(h)) for h in range(heads)]
                factors = [[_splat(b, b.load(weights.place(h, one))) for one in some] for h in which]
                mine = _Tokens(b, rows, at, line, ahead, some, g)
                _add_rows(b, factors, mine, [acc.place(h) for h in which], acc.width)

        def body(g: Value, heads: int) -> None:
            many = TOKENS if heads > 1 else 1
            whole = b.and_(n, I64(-many))
            tokens(g, heads, I64(0), whole, many)
            tokens(g, heads, whole, n, 1)

        _by_heads(b, acc.length, body)
        return context.get_dummy_value()

    return types.void(weights, n, rows, at, line, ahead, acc), code


@intrinsic
def multiply_rows(typing, factors, n, rows, begin, out):  # type: ignore[no-untyped-def]
    """out[g, d] = sum over t < n of factors[g, t] * rows[begin + t * width + d], all of a block's sums in registers.

    For rows that stay in the first cache, such as a basis; factors [group, >= n], out [group, width]
    """

    def code(context, b, signature, given):  # type: ignore[no-untyped-def]
        factors, rows, out = (_Array(context, b, signature.args[i], given[i]) for i in (0, 2, 4))
        n, begin = given[1], given[3]

        def body(g: Value, heads: int) -> None:
            which = [b.add(g, I64(h)) for h in range(heads)]

            def step(d: Value, load: Load, store: Callable[[Value, Value], None], count: int) -> None:
                columns = [b.add(d, I64(i * LANES)) for i in range(count)]
                sums = _registers(b, heads * count)
                with cgutils.for_range(b, n) as loop:
                    row = b.add(begin, b.mul(loop.index, out.width))
                    each = [_splat(b, b.load(factors.place(h, loop.index))) for h in which]
                    for i, column in enumerate(columns):
                        part = load(rows.data_at(b.add(row, column)))
                        for factor, place in zip(each, sums[i * heads :], strict=False):
                            b.store(_multiply_add(b, factor, part, b.load(place)), place)
                for i, column in enumerate(columns):
                    for h, place in zip(which, sums[i * heads :], strict=False):
                        store(b.load(place), out.place(h, column))

            _over_width(b, out.width, step, WIDE)

        _by_heads(b, out.length, body)
        return context.get_dummy_value()

    return types.void(factors, n, rows, begin, out), code


@intrinsic
def greatest(typing, x, row, n):  # type: ignore[no-untyped-def]
    """The greatest of x[row, :n], n > 0 a multiple of 16; NaN is passed over."""

    def code(context, b, signature, given):  # type: ignore[no-untyped-def]
        x = _Array(context, b, signature.args[0], given[0])
        (best,) = _registers(b, 1)
        b.store(ir.Constant(VECTOR, [float("-inf")] * LANES), best)
        with cgutils.for_range_slice(b, I64(0), given[2], I64(LANES)) as (t, _):
            one, other = _load(b, x.place(given[1], t)), b.load(best)
            b.store(b.select(b.fcmp_ordered(">", one, other), one, other), best)
        found, count = b.load(best), LANES
        while count > 1:
            count //= 2
            one, other = (_pick(b, found, found, range(at, at + count)) for at in (0, count))
            found = b.select(b.fcmp_ordered(">", one, other), one, other)
        return b.extract_element(found, I32(0))

    return types.float32(x, row, n), code


UNPACKED = 16
"""Codes that are unpacked at once."""


@intrinsic
def unpack_vectors(typing, codes, begin, step, bits, count, n, pairs, out, at):  # type: ignore[no-untyped-def]
    """out[at + k * n + i] = code i of group k * pairs[2 * k] + pairs[2 * k + 1], i < n rounded down to UNPACKED.

    Group k's codes begin `step` bytes after those of k - 1; bits: 2, 4 or 8, least significant code of a byte first
    """

    def code(context, b, signature, given):  # type: ignore[no-untyped-def]
        codes, pairs, out = (_Array(context, b, signature.args[i], given[i]) for i in (0, 6, 7))
        begin, step, bits, count, n, at = (given[i] for i in (1, 2, 3, 4, 5, 8))
        for width in (2, 4, 8):
            with b.if_then(b.icmp_signed("==", bits, I64(width))), cgutils.for_range(b, count) as loop:
                scale, zero = (b.add(b.mul(loop.index, I64(2)), I64(which)) for which in (0, 1))
                factor, offset = (_wide(b, b.load(pairs.data_at(which))) for which in (scale, zero))
                source = b.gep(codes.data, [b.add(begin, b.mul(loop.index, step))])
                target = b.gep(out.data, [b.add(at, b.mul(loop.index, n))])
                with cgutils.for_range_slice(b, I64(0), b.and_(n, I64(-UNPACKED)), I64(UNPACKED)) as (i, _):
                    value = _unpacked(b, b.gep(source, [b.sdiv(i, I64(8 // width))]), width)
                    value = b.fadd(b.fmul(value, factor, flags=LOOSE), offset, flags=LOOSE)
                    _store(b, value, b.gep(target, [i]))
        return context.get_dummy_value()

    return types.void(codes, begin, step, bits, count, n, pairs, out, at), code


def _wide(b: Any, x: Value) -> Value:
    first = b.insert_element(ir.Constant(ir.VectorType(FLOAT, UNPACKED), ir.Undefined), x, I32(0))
    return _pick(b, first, first, [0] * UNPACKED)


def _unpacked(b: Any, place: Value, bits: int) -> Value:
    """UNPACKED codes from a byte on, in float32."""
    per, whole = 8 // bits, ir.VectorType(I32, UNPACKED)
    packed = b.load(b.bitcast(place, ir.VectorType(ir.IntType(8), UNPACKED // per).as_pointer()))
    packed.align = 1
    each = b.zext(_pick(b, packed, packed, [lane // per for lane in range(UNPACKED)]), whole)
    each = b.lshr(each, ir.Constant(whole, [lane % per * bits for lane in range(UNPACKED)]))
    each = b.and_(each, ir.Constant(whole, [2**bits - 1] * UNPACKED))
    return b.sitofp(each, ir.VectorType(FLOAT, UNPACKED))
