"""kvassay: which long-context KV-cache policy deserves an implementation, and which does not."""

from kvassay.runtime import prepare

__version__ = "0.1.0"

prepare()
