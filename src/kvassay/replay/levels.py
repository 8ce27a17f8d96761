"""The four levels of "how much" for one compressed lane: from tokens to blocks that can really be freed."""

from __future__ import annotations

import numpy as np

from kvassay.cache.reclaim import MODES, count
from kvassay.measure.result import KEPT_BINS
from kvassay.replay.lane import Lane


def freed_blocks(lane: Lane) -> dict[str, float]:
    """Blocks each reclaim mode frees of the context as it is now, for a sole owner, net of encoded segments.

    Tokens in encoded segments have left their slots, but their codes fill memory again: the blocks they come
    to are taken off. Everything is in equivalents of a shared-table block. Groups that a window bounds are
    left out.
    """
    ledger, layout = lane.cache.ledger, lane.cache.layout
    groups = [group for group in ledger.groups if group.window is None]
    if not groups:  # windows bound every layer
        return dict.fromkeys(MODES, 0.0)
    keep, cost = {}, {}
    encoded = 0.0
    for group in groups:
        segments = 0
        for layer in group.layers:
            view = ledger.slots(lane.seq, layer)
            mask = np.zeros((view.positions.shape[0], lane.length), dtype=np.bool_)
            head, column = np.nonzero(view.positions >= 0)
            mask[head, view.positions[head, column]] = True
            keep[layer] = mask
            kv = layout.layers[layer].kv
            cost[layer] = kv.row * layout.element_bytes
            segments += sum(segment.nbytes for segment in ledger.segments(lane.seq, layer))
        block = group.block_size * sum(cost[layer] * group.heads(layer) for layer in group.layers)
        encoded += segments / block
    reclaim = count(keep, groups, slot_bytes=cost)
    return {mode: reclaim[mode].blocks - encoded for mode in MODES}


def kept_by_position(lane: Lane, bins: int = KEPT_BINS) -> tuple[float, ...]:
    """Share of the tokens so far that is held, by stretch of positions, as `BranchResult.kept` defines it."""
    ledger, length = lane.cache.ledger, lane.length
    bins = min(bins, length)
    heads = [head for layer in lane.scope for head in ledger.live(lane.seq, layer)]
    held = np.bincount(np.concatenate(heads) * bins // length, minlength=bins)
    sizes = np.bincount(np.arange(length) * bins // length, minlength=bins)
    return tuple((held / (sizes * len(heads))).tolist())


def blocks_held(lane: Lane) -> int:
    """Blocks the lane's tables hold now in groups that no window bounds; null entries are not held."""
    ledger = lane.cache.ledger
    return sum(
        sum(block != 0 for block in ledger.table(lane.seq, group.index))
        for group in ledger.groups
        if group.window is None
    )
