"""What must be settled before any test module is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():  # Triton decides when it is imported, which transformers does, too
    os.environ.setdefault("TRITON_INTERPRET", "1")
