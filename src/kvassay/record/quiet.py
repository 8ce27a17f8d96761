"""Silence for the libraries that load models: their progress bars and advice are not ours to print."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bars, log lines below `error` and Python warnings of transformers and the hub client.

    Everything is restored on leaving.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    with ExitStack() as undo:
        _only_errors(logging, undo)
        _only_errors(hub_logging, undo)
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()  # of both libraries
            undo.callback(logging.enable_progress_bar)
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def _only_errors(logging: Any, undo: ExitStack) -> None:
    undo.callback(logging.set_verbosity, logging.get_verbosity())
    logging.set_verbosity_error()
