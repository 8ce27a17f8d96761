"""Saved and live streams, byte for byte."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

from kvassay.cli.main import cli
from kvassay.errors import TraceError
from kvassay.trace.kv_events.frames import Frame, listen, read_frames, save_frames
from tests.trace.kv_events.build import message, stored

FRAMES = [Frame(0, b"one"), Frame(1, b""), Frame(2**40, bytes(range(256)))]


def test_a_saved_stream_reads_back(tmp_path: Path) -> None:
    assert save_frames(tmp_path / "s", FRAMES) == 3
    assert list(read_frames(tmp_path / "s")) == FRAMES
    assert (tmp_path / "s").read_bytes()[:15] == bytes(8) + b"\0\0\0\3one"


@pytest.mark.parametrize("cut", [1, 100, 267])
def test_a_cut_stream_is_an_error(tmp_path: Path, cut: int) -> None:
    save_frames(tmp_path / "s", FRAMES)
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:-cut])
    with pytest.raises(TraceError, match="ends inside the message that begins at byte 27"):
        list(read_frames(tmp_path / "s"))


def test_a_missing_stream_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        list(read_frames(tmp_path / "none"))


def test_listening_to_a_publisher(tmp_path: Path) -> None:
    """The publisher repeats itself until the subscription is there; other topics are not for us."""
    endpoint = f"ipc://{tmp_path / 'kv'}"
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    socket.bind(endpoint)
    stop = threading.Event()

    def publish() -> None:
        number = 0
        while not stop.is_set():
            socket.send_multipart((b"other", number.to_bytes(8, "big"), b"no"))
            socket.send_multipart((b"kv", number.to_bytes(8, "big"), b"yes"))
            number += 1
            stop.wait(0.01)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        heard = []
        for frame in listen(endpoint, 10.0, "kv"):
            heard.append(frame)
            if len(heard) == 3:
                break
    finally:
        stop.set()
        thread.join()
        socket.close(linger=0)
        context.term()
    assert [frame.payload for frame in heard] == [b"yes"] * 3
    assert [frame.number - heard[0].number for frame in heard] == [0, 1, 2]


def test_an_endpoint_that_is_none_is_named() -> None:
    with pytest.raises(TraceError, match="nowhere: "):
        list(listen("nowhere", 0.1))


def test_the_command_shows_the_index_and_refuses_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "s"
    save_frames(path, [message(0, stored([11], [1, 2])), message(2, stored([12], [3, 4]))])
    refused = CliRunner().invoke(cli, ["trace", "kv-events", str(path)])
    assert isinstance(refused.exception, TraceError)
    shown = CliRunner().invoke(cli, ["trace", "kv-events", str(path), "--on-gap", "forget", "--json"])
    data = json.loads(shown.output)
    assert (data["gaps"], data["groups"][0]["blocks"]) == ([[1, 1]], 1)
