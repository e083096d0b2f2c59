"""Messages between two processes over a connected socket, with limits of time and size.

A message on the socket is the length, in 8 bytes, followed by the content. If one of the processes is untrusted, it can
neither keep the other one waiting nor fill the other one's memory, because calls have time limits and a message has at
most MAX_MESSAGE bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

__all__ = ["Channel"]

MAX_MESSAGE = 1 << 30
PIECE = 1 << 20  # bytes that are read at once
TURN_S = 1.0  # seconds between two calls of `meanwhile`
LENGTH = struct.Struct("!Q")


class Channel:
    """One end of a connection that carries messages.

    In all methods, `limit_s` is a time limit in seconds; None is no limit.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: bytes, *, limit_s: float | None = None) -> None:
        """Send a message, and wait until the connection has taken all of its bytes.

        Raises TimeoutError after `limit_s` seconds, and ConnectionError if the other end is closed.
        """
        self._connection.settimeout(limit_s)
        self._connection.sendall(LENGTH.pack(len(message)))
        self._connection.sendall(message)

    def receive(self, *, limit_s: float | None = None, meanwhile: Callable[[], None] = lambda: None) -> bytes:
        """Wait for the next message, and return it; `meanwhile` is called about every second while waiting.

        Raises TimeoutError after `limit_s` seconds, EOFError if the other end is closed, and ValueError for a message
        that is too large.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size, deadline, meanwhile))
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length:,} bytes; at most {MAX_MESSAGE:,} are accepted")
        return self._exactly(length, deadline, meanwhile)

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, size: int, deadline: float | None, meanwhile: Callable[[], None]) -> bytes:
        found = bytearray()
        while len(found) < size:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._connection.settimeout(TURN_S if left is None else min(TURN_S, left))
            try:
                piece = self._connection.recv(min(PIECE, size - len(found)))
            except TimeoutError:
                meanwhile()
                continue
            if not piece:
                raise EOFError
            found += piece
        return bytes(found)
