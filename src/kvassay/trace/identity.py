"""When two recordings are of the same context and the same question: same weights, same tokens, whatever recorded them.

K and V may differ in their last bits (another machine, another recorder), and names and folders say nothing.
"""

from __future__ import annotations

import hashlib
import json

from kvassay.trace.schema import PREFIX, TraceHeader, branch_name


def context_sha256(header: TraceHeader) -> str:
    """Of the model's weights and the context's tokens."""
    return _sha256(header.model.weights_sha256, _tokens(header, PREFIX))


def question_sha256(header: TraceHeader, branch: int) -> str:
    """Of a branch's tokens, where its question ends, and which tokens of the answer are scored."""
    entry = header.branches[branch]
    return _sha256(_tokens(header, branch_name(branch)), entry.question_tokens, entry.meta.get("scored"))


def _tokens(header: TraceHeader, segment: str) -> str:
    return header.shards[f"{segment}/tokens.safetensors"].sha256


def _sha256(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
