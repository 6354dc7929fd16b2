"""A client that reads as slowly as it likes, and leaves when it likes."""

import json
import socket
from urllib.parse import urlsplit

# About 700 tokens of the built-in vocabulary.
LONG = "\n".join(f"def function_{i}(a, b):\n    return a * {i} + b\n" for i in range(38))


class Stream:
    """One POST /completion over a bare socket."""

    def __init__(self, url: str, *, window: int | None = None, prompt: str = "import os\n", **fields: object) -> None:
        parts = urlsplit(url)
        self._socket = socket.socket()
        if window is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        self._socket.settimeout(120)
        self._socket.connect((parts.hostname, parts.port))
        body = json.dumps({"prompt": prompt, **fields}).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode() + body)
        self.data = b""

    def read_some(self) -> bytes:
        """Whatever comes next."""
        piece = self._socket.recv(1 << 16)
        self.data += piece
        return piece

    def count(self) -> int:
        """Pieces of the answer that have arrived by now."""
        self._socket.setblocking(False)
        try:
            while self.read_some():
                pass
        except BlockingIOError:
            pass
        finally:
            self._socket.settimeout(120)
        return self.data.count(b"data: ")

    def read_all(self) -> bytes:
        """All that comes."""
        while self.read_some():
            pass
        return self.data

    def close(self) -> None:
        """Leave, whatever is still to come."""
        self._socket.close()
