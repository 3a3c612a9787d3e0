import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optiml import frames
from optiml.frames import Channel, FrameError, Unsendable


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """A raw socket that may say anything, and the channel that must not believe it."""
    raw, other = socket.socketpair()
    channel = Channel(other, limit_bytes=1 << 20)
    with raw:
        yield raw, channel
    channel.close()


def pass_through(header: dict[str, object], blobs: list[object]) -> tuple[dict[str, object], list[memoryview]]:
    one, two = (Channel(end) for end in socket.socketpair())
    sender = threading.Thread(target=one.send, args=(header, blobs))
    sender.start()
    received = two.receive()
    sender.join()
    one.close()
    two.close()
    return received


FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | FINITE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.lists(st.binary(max_size=100), max_size=4))
def test_any_json_object_and_any_blobs_arrive_as_they_were_sent(header: dict[str, object], blobs: list[bytes]) -> None:
    received, parts = pass_through(header, list(blobs))
    assert received == header
    assert [bytes(part) for part in parts] == blobs


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float16).reshape(3, 4),
        np.arange(6, dtype=np.complex64),
        np.arange(24).reshape(4, 6)[:, ::2],
        np.zeros((0, 5), dtype=np.float32),
        np.array(3.5),
        np.array([True, False]),
        np.ones(3_000_000, dtype=np.uint8),
    ],
    ids=["two axes", "complex", "strided", "empty", "no axes", "bool", "large"],
)
def test_an_array_arrives_as_its_bytes_in_c_order(array: np.ndarray) -> None:
    _, (blob,) = pass_through({}, [array])
    assert bytes(blob) == array.tobytes()


def test_received_memory_can_be_written() -> None:
    for size in (10, 2 << 20):
        _, (blob,) = pass_through({}, [bytes(size)])
        np.frombuffer(blob, dtype=np.uint8)[:] = 7
        assert blob[size - 1] == 7


def test_a_contiguous_array_is_sent_from_its_own_memory() -> None:
    array = np.arange(6, dtype=np.float32)
    array_again = np.frombuffer(frames._flat(array), dtype=np.float32)
    assert np.shares_memory(array, array_again)


@pytest.mark.parametrize("header", [{"x": float("nan")}, {"x": float("inf")}, {"x": b"bytes"}, {"x": object()}])
def test_a_header_that_json_cannot_hold_is_refused_before_anything_is_sent(
    ends: tuple[socket.socket, Channel], header: dict[str, object]
) -> None:
    raw, channel = ends
    with pytest.raises(Unsendable):
        channel.send(header)
    channel.send({"fine": 1})
    assert raw.recv(4) == b"OML1"


def test_a_message_over_the_limit_is_refused_on_both_sides(ends: tuple[socket.socket, Channel]) -> None:
    raw, channel = ends
    with pytest.raises(Unsendable, match="limit is 1048576"):
        channel.send({}, [bytes(1 << 20)])
    raw.sendall(struct.pack("!4sIIQ", b"OML1", 2, 1, 1 << 62) + b"{}")
    with pytest.raises(FrameError, match="limit is 1048576"):
        channel.receive()


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        (b"HTTP/1.1 200 OK\r\n", "magic"),
        (struct.pack("!4sII", b"OML1", 2, 70_000), "70000 blobs"),
        (struct.pack("!4sII", b"OML1", (64 << 20) + 1, 0), "header has"),
        (struct.pack("!4sII", b"OML1", 2, 0) + b"[]", "not a JSON object"),
        (struct.pack("!4sII", b"OML1", 2, 0) + b"{x", "not JSON"),
        (struct.pack("!4sII", b"OML1", 2, 0) + b"\xff\xff", "not JSON"),
        (struct.pack("!4sII", b"OML1", 9, 0) + b'{"x":NaN}', "not JSON"),
        (struct.pack("!4sII", b"OML1", 100_000, 0) + b"[" * 100_000, "not JSON"),
        (struct.pack("!4sII", b"OML1", 10_006, 0) + b'{"x":' + b"9" * 10_000 + b"}", "not JSON"),
    ],
    ids=["magic", "blobs", "header", "list", "syntax", "encoding", "nan", "depth", "digits"],
)
def test_what_is_not_a_message_is_refused(ends: tuple[socket.socket, Channel], wire: bytes, why: str) -> None:
    raw, channel = ends
    raw.sendall(wire)
    with pytest.raises(FrameError, match=why):
        channel.receive()


def test_the_end_of_the_channel_is_told_between_and_within_messages(ends: tuple[socket.socket, Channel]) -> None:
    raw, channel = ends
    raw.sendall(struct.pack("!4sIIQ", b"OML1", 2, 1, 10) + b"{}" + b"half")
    raw.close()
    with pytest.raises(EOFError):
        channel.receive()
    with pytest.raises(EOFError):
        channel.receive()


def test_a_deadline_ends_the_wait_for_a_message_and_for_room_to_send_one() -> None:
    raw, other = socket.socketpair()
    channel = Channel(other)
    with raw, pytest.raises(TimeoutError):
        channel.receive(deadline=time.monotonic() + 0.01)
    raw, other = socket.socketpair()
    channel = Channel(other)
    with raw, pytest.raises(TimeoutError):
        channel.send({}, [bytes(64 << 20)], deadline=time.monotonic() + 0.01)
    with pytest.raises(TimeoutError):
        channel.receive(deadline=time.monotonic() - 1)
    channel.close()


def test_the_header_is_plain_json_on_the_wire(ends: tuple[socket.socket, Channel]) -> None:
    raw, channel = ends
    channel.send({"name": "é", "n": [1, 2.5, None]}, [b"xy"])
    magic, size, count, blob = struct.unpack("!4sIIQ", raw.recv(20))
    assert (magic, count, blob) == (b"OML1", 1, 2)
    assert json.loads(raw.recv(size)) == {"name": "é", "n": [1, 2.5, None]}
    assert raw.recv(2) == b"xy"
