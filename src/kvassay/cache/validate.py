"""What a decision's edits come to in one layer, checked and made explicit before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvassay.cache.codec import WIDTHS
from kvassay.cache.data import LayerData
from kvassay.cache.edits import Bias, Edit, Evict, LowRank, Merge, Quantize
from kvassay.cache.rope import inverse_frequencies
from kvassay.errors import IllegalEdit
from kvassay.layout.model import KV, Layer


@dataclass(frozen=True)
class Plan:
    """One layer's edits, fit to be carried out; masks are bool [kv_heads, n] over the columns of `data`.

    targets: tokens that `merge` writes
    bias: log weights to add, float [kv_heads, n], with whether before the soft-cap
    codes: each encoding edit with the tokens it encodes, disjoint
    gone: tokens that leave: evicted, or at 0 bits
    """

    layer: int
    data: LayerData
    merge: Merge | None
    targets: Tensor
    bias: tuple[tuple[Tensor, bool], ...]
    codes: tuple[tuple[Quantize | LowRank, Tensor], ...]
    gone: Tensor


@dataclass(frozen=True)
class Ground:
    """What the edits of one layer stand on: the layer, its live tokens, how many tokens are committed."""

    layer: Layer
    data: LayerData
    committed: int

    @cached_property
    def editable(self) -> Tensor:
        """bool [kv_heads, n]: live and committed."""
        return self.data.alive & (self.data.positions < self.committed)

    @cached_property
    def raw(self) -> Tensor:
        """bool [kv_heads, n]: editable, and not encoded yet."""
        return self.editable if self.data.encoded is None else self.editable & ~self.data.encoded

    @property
    def shape(self) -> tuple[int, int]:
        """KV heads and tokens of the view."""
        return self.data.positions.shape[0], self.data.positions.shape[1]

    def mask(self, mask: Tensor, name: str) -> Tensor:
        """A mask [kv_heads, n] or [n] as [kv_heads, n]."""
        if mask.dtype != torch.bool or mask.shape not in (self.shape, self.shape[1:]):
            raise self.refusal(
                f"{name} is {mask.dtype} {list(mask.shape)}, bool {list(self.shape)} or [{self.shape[1]}] needed"
            )
        return mask.expand(self.shape)

    def floats(self, x: Tensor, name: str) -> Tensor:
        """A finite float tensor [kv_heads, n] (anything on padding)."""
        fits = x.shape == self.shape and x.is_floating_point()
        if not fits or not bool(torch.isfinite(x[self.data.alive]).all()):
            raise self.refusal(f"{name} is {x.dtype} {list(x.shape)}, finite float {list(self.shape)} needed")
        return x

    def refusal(self, what: str) -> IllegalEdit:
        """The error, with the layer named."""
        return IllegalEdit(f"layer {self.layer.index}: {what}")


def validate(ground: Ground, edits: Sequence[Edit], *, allow_window: bool) -> Plan:
    """Check one layer's edits, alone and together; `IllegalEdit` (or `LayoutError`) if one cannot be carried out."""
    window = ground.layer.window
    if window is not None and not allow_window:
        raise ground.refusal(f"bounded by a window of {window}, which the policy's card does not act on")
    foreign = [type(edit).__name__ for edit in edits if not isinstance(edit, Edit)]
    if foreign:
        raise ground.refusal(f"{foreign[0]} is not an edit")
    merges = [edit for edit in edits if isinstance(edit, Merge)]
    if len(merges) > 1:
        raise ground.refusal(f"{len(merges)} Merge edits, one takes all merges of a layer")
    codes, gone = _codes(ground, [edit for edit in edits if isinstance(edit, Quantize | LowRank)])
    for edit in edits:
        if isinstance(edit, Evict):
            gone = gone | (ground.data.alive & ~ground.mask(edit.keep, "Evict.keep"))
    _check_leaving(ground, gone)
    return Plan(
        ground.layer.index,
        ground.data,
        merges[0] if merges else None,
        _targets(ground, merges[0]) if merges else torch.zeros_like(ground.data.alive),
        tuple((_bias(ground, edit), edit.before_softcap) for edit in edits if isinstance(edit, Bias)),
        codes,
        gone,
    )


def _check_leaving(ground: Ground, gone: Tensor) -> None:
    uncommitted = gone & ~ground.editable
    if bool(uncommitted.any()):
        raise ground.refusal(f"Evict drops {int(uncommitted.sum())} uncommitted tokens")
    empty = (gone.any(1) & ~(ground.editable & ~gone).any(1)).nonzero().flatten()
    if len(empty):
        head = int(empty[0])
        raise ground.refusal(f"KV head {head} would keep 0 of {int(ground.editable[head].sum())} tokens")


def _targets(ground: Ground, edit: Merge) -> Tensor:
    """Which tokens some source names as its target."""
    into, (_, tokens) = edit.into, ground.shape
    if into.shape != ground.shape or into.is_floating_point():
        raise ground.refusal(f"Merge.into is {into.dtype} {list(into.shape)}, integer {list(ground.shape)} needed")
    if int(into.max()) >= tokens:
        raise ground.refusal(f"Merge.into names token {int(into.max())} of {tokens}")
    source = into >= 0
    target = torch.zeros(ground.shape, dtype=torch.int64).scatter_add_(1, into.long().clamp(min=0), source.long()) > 0
    if edit.values_only and not isinstance(ground.layer.kv, KV):
        raise ground.refusal("Merge of values alone: the value of a latent is part of its key")
    if bool((source & target).any()):
        raise ground.refusal("a token is merged away and merged into at once")
    if bool(((source | target) & ~ground.raw).any()):
        raise ground.refusal("Merge touches tokens that are encoded, uncommitted or not there")
    if bool((ground.floats(edit.weight, "Merge.weight")[source | target] <= 0).any()):
        raise ground.refusal("Merge.weight must be positive")
    return target


def _bias(ground: Ground, edit: Bias) -> Tensor:
    """Log weights with 0 on padding."""
    weight = ground.floats(edit.log_weight, "Bias.log_weight").masked_fill(~ground.data.alive, 0)
    if bool((weight[~ground.editable] != 0).any()):
        raise ground.refusal("Bias touches uncommitted tokens")
    return weight


def _codes(
    ground: Ground, edits: Sequence[Quantize | LowRank]
) -> tuple[tuple[tuple[Quantize | LowRank, Tensor], ...], Tensor]:
    """Each encoding edit with the tokens it encodes, and the tokens that 0 bits drop."""
    taken, gone = torch.zeros_like(ground.data.alive), torch.zeros_like(ground.data.alive)
    codes: list[tuple[Quantize | LowRank, Tensor]] = []
    for edit in edits:
        scope = _scope(ground, edit.tokens)
        if bool((scope & taken).any()):
            raise ground.refusal(f"{int((scope & taken).sum())} tokens are to be encoded by two edits at once")
        taken |= scope
        if isinstance(edit, Quantize):
            _check_widths(ground, edit)
            dropped = scope & _dropped(edit)
            gone, scope = gone | dropped, scope & ~dropped
        if not bool(scope.any()):
            raise ground.refusal(
                f"{type(edit).__name__} encodes no token: none in its scope is raw, or all have 0 bits"
            )
        if isinstance(edit, LowRank):
            _check_low_rank(ground, edit, scope)
        codes.append((edit, scope))
    return tuple(codes), gone


def _scope(ground: Ground, tokens: Tensor | None) -> Tensor:
    """The tokens to encode: those asked for, else all that are still raw."""
    if tokens is None:
        return ground.raw
    asked = ground.mask(tokens, "tokens") & ground.data.alive
    if bool((asked & ~ground.raw).any()):
        raise ground.refusal("tokens to encode are uncommitted or encoded already; encoded data is not re-encoded")
    return asked


def _dropped(edit: Quantize) -> Tensor:
    """Tokens that either side gives 0 bits: bool [kv_heads, n], or [] (False) where all have one width."""
    sides = [edit.value_bits] + ([edit.key_bits] if edit.key_axis == "token" else [])
    none = torch.tensor(False)
    for bits in sides:
        none = none | (bits == 0) if isinstance(bits, Tensor) else none
    return none


def _check_widths(ground: Ground, edit: Quantize) -> None:
    kv, widths = ground.layer.kv, (0, *WIDTHS, 16)
    if edit.key_axis not in ("channel", "token") or edit.number not in ("int", "fp8_e4m3"):
        raise ground.refusal(
            f"Quantize has key_axis={edit.key_axis!r} and number={edit.number!r}, "
            "allowed are 'channel' or 'token' and 'int' or 'fp8_e4m3'"
        )
    key_shape = (kv.kv_heads, kv.k_dim) if edit.key_axis == "channel" else ground.shape
    if not isinstance(kv, KV) and (edit.key_axis == "channel" or not _alike(edit.key_bits, edit.value_bits)):
        raise ground.refusal(
            "a latent is key and value in one and encoded once: Quantize needs key_bits as value_bits, key_axis 'token'"
        )
    for name, bits, shape in (("value_bits", edit.value_bits, ground.shape), ("key_bits", edit.key_bits, key_shape)):
        found = [bits] if isinstance(bits, int) else bits.unique().tolist()
        if isinstance(bits, Tensor) and (bits.shape != shape or bits.is_floating_point()):
            raise ground.refusal(f"Quantize.{name} is {bits.dtype} {list(bits.shape)}, integer {list(shape)} needed")
        if not set(found) <= set(widths) or found == [0]:
            raise ground.refusal(f"Quantize.{name} holds widths {found}, allowed are {widths}, not 0 throughout")
    if edit.number == "fp8_e4m3":
        if [edit.key_bits, edit.value_bits] != [8, 8]:
            raise ground.refusal(f"fp8_e4m3 has 8 bits for keys and values, not {edit.key_bits} and {edit.value_bits}")
        return
    sides = {"value": kv.v_dim} if isinstance(kv, KV) else {}
    sides |= {"key": kv.k_dim} if edit.key_axis == "token" else {}
    for side, dim in sides.items():
        if edit.group is not None and (edit.group < 1 or dim % edit.group):
            raise ground.refusal(f"Quantize.group={edit.group} does not divide the {side} dimension {dim}")


def _alike(one: int | Tensor, other: int | Tensor) -> bool:
    """Whether two widths are the same, token by token."""
    return bool((torch.as_tensor(one) == torch.as_tensor(other)).all())


def _check_low_rank(ground: Ground, edit: LowRank, scope: Tensor) -> None:
    kv = ground.layer.kv
    if not isinstance(kv, KV):
        raise ground.refusal("LowRank on a latent, which is a trained low-rank projection already")
    value_groups = edit.value_groups or edit.head_groups
    for field, groups in (("head_groups", edit.head_groups), ("value_groups", value_groups)):
        named = sorted(head for group in groups for head in group)
        if named != list(range(kv.kv_heads)):
            raise ground.refusal(f"LowRank.{field} name heads {named}, each of 0..{kv.kv_heads - 1} once needed")
    columns = scope.any(0)
    if bool((columns & ~scope.all(0)).any()):
        raise ground.refusal(f"LowRank needs the same tokens in every head, its scope has {scope.sum(1).tolist()}")
    for group in (*edit.head_groups, *value_groups):
        shared = ground.data.positions[list(group)][:, columns]
        if bool((shared != shared[:1]).any()):
            raise ground.refusal(f"LowRank needs the same tokens in heads {list(group)}, which share a basis")
    sides = {
        "key": (edit.head_groups, edit.key_encode, edit.key_decode, kv.k_dim),
        "value": (value_groups, edit.value_encode, edit.value_decode, kv.v_dim),
    }
    if all(encode is None for _, encode, _, _ in sides.values()):
        raise ground.refusal("LowRank encodes neither keys nor values")
    for side, (groups, encode, decode, dim) in sides.items():
        if (encode is None) != (decode is None):
            raise ground.refusal(f"LowRank gives one of {side}_encode and {side}_decode, both or neither needed")
        if encode is not None and decode is not None:
            _check_bases(ground, groups, side, encode, decode, dim)
    _check_affine(ground, edit)
    if edit.domain == "pre_rope" and ground.layer.rope is not None:
        inverse_frequencies(ground.layer.rope)


def _check_affine(ground: Ground, edit: LowRank) -> None:
    """Biases [kv_heads, dim], and a norm of the right width with a row per cached key."""
    kv = ground.layer.kv
    for side, bias, dim in (("key", edit.key_bias, kv.k_dim), ("value", edit.value_bias, kv.v_dim)):
        if bias is not None and tuple(bias.shape) != (kv.kv_heads, dim):
            raise ground.refusal(f"LowRank.{side}_bias {list(bias.shape)}, {[kv.kv_heads, dim]} needed")
    if edit.key_norm is None:
        return
    if edit.domain != "pre_rope" or edit.key_encode is None:
        raise ground.refusal("LowRank.key_norm comes before the rotation: domain 'pre_rope' and key bases needed")
    rows, needed = edit.key_norm.rows, ground.data.k.shape
    if rows.shape != needed or tuple(edit.key_norm.weight.shape) != (kv.k_dim,):
        raise ground.refusal(
            f"LowRank.key_norm has rows {list(rows.shape)} and weight {list(edit.key_norm.weight.shape)}, "
            f"{list(needed)} and {[kv.k_dim]} needed"
        )


def _check_bases(
    ground: Ground,
    groups: tuple[tuple[int, ...], ...],
    side: str,
    encode: tuple[Tensor, ...],
    decode: tuple[Tensor, ...],
    dim: int,
) -> None:
    """One [heads * dim, rank] and one [rank, heads * dim] per head group."""
    if not len(encode) == len(decode) == len(groups):
        raise ground.refusal(f"LowRank has {len(encode)} {side} bases for {len(groups)} head groups")
    for group, into, back in zip(groups, encode, decode, strict=True):
        width = len(group) * dim
        if into.dim() != 2 or into.shape[0] != width or back.shape != into.shape[::-1]:
            raise ground.refusal(
                f"LowRank {side} bases {list(into.shape)} and {list(back.shape)}, "
                f"[{width}, rank] and [rank, {width}] needed"
            )
