from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from workers.evaluation.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_message_of_any_size_arrives(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    for message in (b"", b"x" * 5_000_000):
        thread = threading.Thread(target=Channel(theirs).send, args=(message,))
        thread.start()
        assert ours.receive(limit_s=10) == message
        thread.join()


def test_message_that_is_too_large_is_refused_unread(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(struct.pack("!Q", 1 << 40))
    with pytest.raises(ValueError, match="a message of 1,099,511,627,776 bytes; at most 1,073,741,824 are accepted"):
        ours.receive(limit_s=10)


def test_half_a_message_ends_at_the_limit(ends: tuple[Channel, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(struct.pack("!Q", 100) + b"half")
    with pytest.raises(TimeoutError):
        ours.receive(limit_s=0.05)


def test_partner_that_does_not_read_ends_at_the_limit(ends: tuple[Channel, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        ends[0].send(b"x" * 50_000_000, limit_s=0.05)


def test_partner_that_has_ended_is_noticed(ends: tuple[Channel, socket.socket]) -> None:
    ends[1].close()
    with pytest.raises(EOFError):
        ends[0].receive(limit_s=10)
