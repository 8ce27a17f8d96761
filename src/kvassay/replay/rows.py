"""From one arm's answer to one question to its row of numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from kvassay.measure.result import BranchResult
from kvassay.measure.task import divergence_step, score_answer
from kvassay.replay.bytes import Held
from kvassay.replay.lane import Lane
from kvassay.trace.identity import context_sha256, question_sha256
from kvassay.trace.reader import Branch, Trace


@dataclass(frozen=True)
class Reference:
    """Dense's distribution over the scored tokens, worked out once for all arms: float64 [scored, vocab]."""

    probability: Tensor
    negative_entropy: Tensor
    best: Tensor

    def kl(self, logits: Tensor, norm: Tensor) -> Tensor:
        """KL(dense || arm) per token from the arm's logits [scored, vocab] and their logsumexp [scored].

        sum p (log p - log q) with log q = logits - norm, so that log q itself is never laid out.
        """
        return self.negative_entropy - (self.probability * logits).sum(-1) + norm


@dataclass
class Answer:
    """What one arm said: logits [answer tokens, vocab] teacher-forced, and its own greedy tokens."""

    logits: Tensor
    generated: list[int]
    held: Held
    lane: Lane
    freed: dict[str, float]
    blocks: int
    """Those of which `freed` are free."""
    kept: tuple[float, ...] = ()
    """As in the row."""
    _reference: Reference | None = None

    def reference(self, scored: Tensor) -> Reference:
        """This arm's distribution, for others to be compared with."""
        if self._reference is None:
            log_p = torch.log_softmax(self.logits[scored].double(), -1)
            p = log_p.exp()
            self._reference = Reference(p, (p * log_p).sum(-1), log_p.argmax(-1))
        return self._reference


def branch_result(
    tokenizer: Any, trace: Trace, index: int, branch: Branch, gold: list[int], arm: Answer, dense: Answer
) -> BranchResult:
    """The row of one (branch, arm), with `dense` answering the same question in the same replay."""
    scored = torch.tensor(_scored(branch, len(gold)))
    target = torch.tensor(gold)[scored]
    reference = dense.reference(scored)
    mine = arm.logits[scored].double()
    norm = mine.logsumexp(-1)
    best = mine.argmax(-1)
    reply, ended = _reply(arm.generated, tokenizer)
    text = tokenizer.decode(reply, skip_special_tokens=True)
    scope = arm.lane.scope
    traffic, base = arm.lane.traffic, dense.lane.traffic
    return BranchResult(
        trace=trace.path.name,
        workload=trace.header.recipe.name,
        branch=index,
        arm=arm.lane.arm.label,
        query_aware=trace.header.recipe.query_aware,
        context_tokens=trace.prefix.tokens,
        question_tokens=branch.question_tokens,
        answer_tokens=len(gold),
        nll=float((norm - mine.gather(1, target[:, None])[:, 0]).mean()),
        top1=float((best == target).double().mean()),
        kl=0.0 if arm is dense else float(reference.kl(mine, norm).mean()),
        agree=float((best == reference.best).double().mean()),
        task=score_answer(trace.header.recipe.name, text, branch.answer_text, branch.meta) if reply else None,
        divergence=_divergence(reply, _reply(dense.generated, tokenizer)[0]),
        wrong_step=_wrong_step(reply, gold, _ints(branch.meta.get("step_ends"))),
        generated=text,
        generated_tokens=len(reply),
        retained_bytes=arm.held.total,
        retained_fraction=arm.held.total / dense.held.total,
        retained_bytes_scope=arm.held.within(scope),
        retained_fraction_scope=arm.held.within(scope) / dense.held.within(scope),
        peak_bytes=max(arm.lane.peak_bytes, arm.held.total),
        selected_tokens=traffic.selected_per_token,
        blocks_total=arm.blocks,
        blocks_freed=arm.freed,
        read_bytes=traffic.bytes_per_token,
        read_fraction=traffic.bytes_per_token / base.bytes_per_token if base.tokens else 0.0,
        read_bytes_growing=traffic.growing_per_token,
        policy_bytes=arm.lane.touched,
        artefact_bytes=0.0 if arm.lane.memory.artefact is None else float(arm.lane.memory.artefact.nbytes),
        index_bytes=arm.held.index,
        index_read_bytes=traffic.index_per_token,
        pooled_bytes=arm.held.pooled,
        prefill=str(arm.lane.arm.prefill),
        ended="end_token" if ended else "length",
        policy_seconds=arm.lane.seconds,
        facts=json.dumps(dict(arm.lane.facts)),
        kept=arm.kept,
        context_sha256=context_sha256(trace.header),
        question_sha256=question_sha256(trace.header, index),
    )


def _scored(branch: Branch, answer: int) -> list[int]:
    """Indices of the answer tokens that count, as the workload recorded them (all, if it did not say)."""
    return _ints(branch.meta.get("scored")) or list(range(answer))


def _divergence(mine: list[int], dense: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip_longest(mine, dense)) if a != b), None)


def _reply(generated: list[int], tokenizer: Any) -> tuple[list[int], bool]:
    """The tokens up to the model's end token, and whether it came: all arms decode equally long, past their end."""
    end = getattr(tokenizer, "eos_token_id", None)
    return (generated[: generated.index(end) + 1], True) if end in generated else (generated, False)


def _ints(value: object) -> list[int]:
    return [int(x) for x in value] if isinstance(value, list) else []


def _wrong_step(generated: list[int], gold: list[int], ends: list[int]) -> int | None:
    """The step in which a reply leaves the answer, as far as it was generated."""
    wanted = gold[: len(generated)]
    if not ends or not wanted:
        return None
    return divergence_step(generated, wanted, [*(end for end in ends if end < len(wanted)), len(wanted)])
