"""A second model as a drafter: a dense cache of its own over the same context."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvassay.cache.ops import group_specs
from kvassay.cache.paged import PagedCache
from kvassay.errors import ExperimentError
from kvassay.policy.base import Memory
from kvassay.policy.budget import Allowance
from kvassay.record.load import LoadedModel
from kvassay.replay.arms import Arm
from kvassay.replay.drafting import Speaker, forked
from kvassay.replay.engine import Engine
from kvassay.replay.feeding import feed
from kvassay.replay.lane import Lane, scope_of
from kvassay.replay.protocol import Protocol
from kvassay.trace.reader import Trace


class DraftModel:
    """A loaded model that has read a trace's context."""

    def __init__(
        self, model: LoadedModel, target: LoadedModel, trace: Trace, dense: Arm, protocol: Protocol, lanes: int
    ) -> None:
        """Prefill `model` with the context of `trace`, which `target` was recorded on; room for `lanes` drafters.

        Raises `ExperimentError` if the two models do not share tokenizer and vocabulary, or the draft model was
        made for shorter texts.
        """
        longest = max(branch.tokens for branch in trace.branches) + protocol.free_tokens
        _check(model, target, trace.prefix.tokens + longest, protocol)
        groups = group_specs(model.layout, protocol.block_size)
        context = sum(-(-trace.prefix.tokens // group.block_size) + 4 for group in groups)
        each = sum(-(-longest // group.block_size) + 4 for group in groups)
        blocks = 1 + context + (lanes + 1) * each
        self.engine = Engine(model.model, PagedCache(model.layout, groups, blocks, device=model.device))
        self.lane = Lane(
            dense,
            self.engine.cache.create([])[0],
            self.engine.cache,
            Allowance.resolve(dense.budget, trace.prefix.tokens, dense.protection),
            Memory(rng=torch.Generator().manual_seed(protocol.seed)),
            scope_of(model.layout, dense.policy),
        )
        ids = trace.prefix.token_ids.tolist()
        for first in range(0, len(ids), trace.header.prefill_chunk):
            feed(self.engine, [self.lane], [ids[first : first + trace.header.prefill_chunk]], last=0)

    def drafters(self, question: Sequence[int], count: int) -> list[Speaker]:
        """`count` drafters that stand before the question's last token."""
        asked = self.lane.fork()
        if len(question) > 1:
            feed(self.engine, [asked], [question[:-1]], last=0)
        found = forked(self.engine, [asked] * count, question[-1])
        asked.free()
        return found


def _check(model: LoadedModel, target: LoadedModel, tokens: int, protocol: Protocol) -> None:
    mine, theirs = model.identity, target.identity
    if mine.tokenizer_sha256 != theirs.tokenizer_sha256:
        raise ExperimentError(
            f"{mine.name} cannot draft for {theirs.name}: its tokenizer ({mine.tokenizer_sha256[:12]}) is not the "
            f"same ({theirs.tokenizer_sha256[:12]})"
        )
    if model.layout.vocab_size != target.layout.vocab_size:
        raise ExperimentError(
            f"{mine.name} cannot draft for {theirs.name}: a vocabulary of {model.layout.vocab_size}, "
            f"not {target.layout.vocab_size}"
        )
    if tokens > model.layout.native_context and not protocol.allow_beyond_native:
        raise ExperimentError(
            f"{mine.name} cannot draft here: {tokens} tokens exceed its native context of {model.layout.native_context}"
        )
