"""A stream of KV events as it comes over the wire: numbered messages, saved and read back byte for byte.

vLLM publishes three ZMQ frames: topic, sequence number (8 bytes, big endian), msgpack batch. A saved stream is the
last two of each message, one after the other: the number, the batch's length (4 bytes, big endian), the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvassay.errors import TraceError

NUMBER, LENGTH = 8, 4


class Frame(NamedTuple):
    """One message."""

    number: int
    payload: bytes


def save_frames(path: str | Path, frames: Iterable[Frame]) -> int:
    """Write a stream; returns how many messages. OSError passes through."""
    count = 0
    with Path(path).open("wb") as file:
        for count, frame in enumerate(frames, 1):  # noqa: B007
            file.write(frame.number.to_bytes(NUMBER, "big") + len(frame.payload).to_bytes(LENGTH, "big"))
            file.write(frame.payload)
    return count


def read_frames(path: str | Path) -> Iterator[Frame]:
    """The messages of a saved stream, in order; `TraceError` if the file cannot be read or ends inside one."""
    path, at = Path(path), 0
    try:
        with path.open("rb") as file:
            while head := file.read(NUMBER + LENGTH):
                length = int.from_bytes(head[NUMBER:], "big")
                payload = file.read(length)
                if len(head) < NUMBER + LENGTH or len(payload) < length:
                    raise TraceError(f"{path}: ends inside the message that begins at byte {at}")
                at += len(head) + length
                yield Frame(int.from_bytes(head[:NUMBER], "big"), payload)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None


def listen(endpoint: str, seconds: float, topic: str = "") -> Iterator[Frame]:
    """Messages published at a ZMQ endpoint (`ipc://...`, `tcp://host:port`) until `seconds` have passed without one.

    What was published before the subscription arrived is missed, and shows as a gap. `TraceError` without pyzmq, for
    an endpoint that ZMQ refuses, or for a message of another form.
    """
    try:
        import zmq
    except ModuleNotFoundError:
        raise TraceError("listening needs pyzmq: pip install 'kvassay[events]'") from None
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        socket.connect(endpoint)
        socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not socket.poll(int(left * 1000) + 1):
                return
            parts = socket.recv_multipart()
            if len(parts) != 3 or len(parts[1]) != NUMBER:
                raise TraceError(f"{endpoint}: a message of {len(parts)} frames, topic, number and batch expected")
            yield Frame(int.from_bytes(parts[1], "big"), parts[2])
            until = time.monotonic() + seconds
    except zmq.ZMQError as error:
        raise TraceError(f"{endpoint}: {error}") from None
    finally:
        socket.close(linger=0)
        context.term()
