"""What must be settled before any test module is imported."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several test processes, which share the cores
    torch.set_num_threads(1)
if not torch.cuda.is_available():  # Triton decides when it is imported, which transformers does, too
    os.environ.setdefault("TRITON_INTERPRET", "1")
