"""Calibration: the context of another trace, which policies that learn offline are fitted on before a replay."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvassay.cache.data import LayerData
from kvassay.errors import EvidenceMissing, PolicyError
from kvassay.layout.model import Layer
from kvassay.policy.answers import answering
from kvassay.policy.base import Artefact, Policy
from kvassay.policy.budget import Protection
from kvassay.policy.card import Evidence, When
from kvassay.policy.views import LayerView, Meter
from kvassay.policy.weights import CalibrationPass, LayerWeights, Occlusions, Projection
from kvassay.replay.evidence import after_prefill, recorded_queries, sinks_of
from kvassay.replay.lane import scope_of
from kvassay.replay.occlusion import occlusions
from kvassay.replay.projections import calibration_pass, layer_weights, output_projection
from kvassay.trace.reader import Segment, Trace

SHARED_RUN = 64
"""Tokens in a row that two texts may not share: longer than a chat template's opening or an instruction."""

Ids = NDArray[np.signedinteger[Any]]
FitKey = tuple[str, str]
"""Label of the policy that is fitted, and the digest of the calibration trace, which covers model and text."""


class Fits:
    """What has been learnt, in memory."""

    def __init__(self) -> None:
        self._known: dict[FitKey, Artefact] = {}

    def learnt(self, key: FitKey, fit: Callable[[], Artefact]) -> Artefact:
        """The artefact of a key, fitted now if it is not known yet."""
        if key not in self._known:
            self._known[key] = fit()
        return self._known[key]


_KEPT: ContextVar[Fits | None] = ContextVar("kvassay_fits", default=None)


@contextmanager
def fitting_once(fits: Fits | None = None) -> Iterator[None]:
    """Within the block, a policy is fitted once per calibration trace, however many traces are replayed; `fits` may
    know some already."""
    token = _KEPT.set(fits or Fits())
    try:
        yield
    finally:
        _KEPT.reset(token)


class TraceCalibration:
    """The layers of a trace's context in a policy's scope, with the evidence that its card declares.

    sha256: of the context's token ids, int32 little-endian
    model: the transformers model that was recorded, for policies that learn from its weights
    """

    def __init__(self, trace: Trace, policy: Policy, model: Any = None) -> None:
        self.trace, self.policy, self.model = trace, policy, model
        self.sha256 = hashlib.sha256(_ids(trace.prefix).astype("<i4").tobytes()).hexdigest()

    def layers(self) -> Iterator[tuple[int, LayerView]]:
        """Each layer's view over the calibration tokens, one at a time."""
        for index in sorted(scope_of(self.trace.layout, self.policy)):
            yield index, self._view(index)

    def weights(self) -> Mapping[int, LayerWeights]:
        """Key and value projections by layer; `EvidenceMissing` undeclared, `PolicyError` without a model."""
        return {layer.index: layer_weights(self._model(), layer) for layer in self._scope()}

    def outputs(self) -> Mapping[int, Projection]:
        """Output projections by layer; raises as `weights`."""
        return {layer.index: output_projection(self._model(), layer) for layer in self._scope()}

    def passes(self, samples: int, tokens: int) -> Iterator[CalibrationPass]:
        """The model run over pieces of the context, one after the other; raises as `weights`."""
        model, ids, gradients = self._model(), self.trace.prefix.token_ids.long(), self._declares(Evidence.GRADIENTS)
        for number in range(max(1, min(samples, len(ids) // tokens))):
            piece = ids[number * tokens : (number + 1) * tokens]
            yield calibration_pass(model, piece, self._scope(), gradients)

    def occlusions(self, tokens: int, width: int, stride: int) -> Occlusions:
        """What pieces of the context's last `tokens` tokens are to the answer of the first question; raises as
        `weights`, and `PolicyError` for a text without a question or shorter than a piece."""
        model, branches = self._model(Evidence.OCCLUSION), self.trace.branches
        text = self.trace.prefix.token_ids.long()[-tokens:]
        if not branches or len(text) < width:
            raise PolicyError(
                f"{self.trace.path}: {len(text)} tokens and {len(branches)} questions; a question and a piece of "
                f"{width} tokens to blank are needed"
            )
        ids = branches[0].token_ids.long()
        return occlusions(model, text, ids, len(ids) - branches[0].question_tokens, width, stride)

    def _scope(self) -> list[Layer]:
        return [self.trace.layout.layers[index] for index in sorted(scope_of(self.trace.layout, self.policy))]

    def _declares(self, evidence: Evidence) -> bool:
        return evidence in self.policy.card.evidence

    def _model(self, evidence: Evidence = Evidence.WEIGHTS) -> Any:
        name = self.policy.card.name
        if not self._declares(evidence):
            raise EvidenceMissing(f"policy '{name}' touched the model's {evidence} without declaring it in its card")
        if self.model is None:
            raise PolicyError(f"policy '{name}' learns from the model's {evidence}, and this replay has no model")
        return self.model

    def _view(self, index: int) -> LayerView:
        layout, prefix = self.trace.layout, self.trace.prefix
        taps = after_prefill(self.trace).rows
        return LayerView(
            layout.layers[index],
            self.policy.card,
            lambda: LayerData.dense(_heads_first(prefix.k(index)), _heads_first(prefix.v(index))),
            length=prefix.tokens,
            protection=Protection(0, 0),
            meter=Meter(layout.element_bytes),
            queries={Evidence.QUERIES: lambda: recorded_queries(prefix, index)},
            rows=taps(index) if taps is not None else None,
            sinks=sinks_of(self.trace).get(index),
        )


def fit_offline(
    policies: Sequence[Policy], trace: Trace, calibration: Trace | None, model: Any = None
) -> dict[str, Artefact]:
    """Fit every policy that learns offline, once each, a twin with its original; returns the artefacts by label.

    model: the transformers model both were recorded from, where there is one
    What an enclosing `fitting_once` has seen before is not fitted again.
    Raises `PolicyError` if one needs a calibration and there is none, or if it is of another model or not
    disjoint from the trace under test.
    """
    offline = {policy.label: policy for policy in policies if When.OFFLINE in policy.card.when}
    if not offline:
        return {}
    if calibration is None:
        raise PolicyError(
            f"{', '.join(sorted(offline))}: learns offline, so a calibration trace of other text is needed"
        )
    check_disjoint(trace, calibration)
    fits = _KEPT.get() or Fits()

    def fit(policy: Policy) -> Artefact:
        with answering(policy, "fit"):
            return policy.fit(TraceCalibration(calibration, policy, model))

    return {
        label: fits.learnt((policy.fitted_by.label, calibration.digest), partial(fit, policy.fitted_by))
        for label, policy in offline.items()
    }


def check_disjoint(trace: Trace, calibration: Trace) -> None:
    """Raise `PolicyError` unless the two traces are of one model and of different text.

    Different: not of one recipe, and no `SHARED_RUN` tokens in a row of the calibration's context are in the
    test's context, questions or answers (nor all of a shorter calibration).
    """
    place = f"{calibration.path}: cannot calibrate for {trace.path.name}"
    mine, theirs = trace.header.model, calibration.header.model
    if mine.weights_sha256 != theirs.weights_sha256:
        raise PolicyError(
            f"{place}: it is of {theirs.name} (weights {str(theirs.weights_sha256)[:12]}), "
            f"not of {mine.name} ({str(mine.weights_sha256)[:12]})"
        )
    recipe = trace.header.recipe
    if recipe == calibration.header.recipe:
        raise PolicyError(f"{place}: both hold the text of '{recipe.name}', seed {recipe.seed}, index {recipe.index}")
    width = min(SHARED_RUN, calibration.prefix.tokens)
    known = {row.tobytes() for row in _runs(_ids(calibration.prefix), width)}
    for start, text in _texts(trace):
        for at, row in enumerate(_runs(text, width)):
            if row.tobytes() in known:
                raise PolicyError(f"{place}: tokens {start + at} to {start + at + width - 1} of the test are in it")


def _texts(trace: Trace) -> Iterator[tuple[int, Ids]]:
    """Every text under test with its first position; a branch is read on from the end of the context."""
    context = _ids(trace.prefix)
    yield 0, context
    tail = context[-(SHARED_RUN - 1) :]
    for branch in trace.branches:
        yield len(context) - len(tail), np.concatenate([tail, _ids(branch)])


def _runs(ids: Ids, width: int) -> Ids:
    """Every `width` tokens in a row: [runs, width]."""
    if len(ids) < width:
        return np.empty((0, width), dtype=ids.dtype)
    return np.lib.stride_tricks.sliding_window_view(ids, width)


def _ids(segment: Segment) -> Ids:
    return np.asarray(segment.token_ids.numpy(), dtype=np.int32)


def _heads_first(rows: Tensor) -> Tensor:
    return rows.transpose(0, 1).float()
