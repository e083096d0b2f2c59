"""A judge behind HTTP: an endpoint with OpenAI's chat completions that prefers the answer with more characters."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["JudgeServer", "judge_server", "longer"]

ANSWERS = re.compile(r"\[Answer 1\]\n(.*?)\n\[End of answer 1\]\n\n\[Answer 2\]\n(.*?)\n\[End of answer 2\]", re.DOTALL)


def longer(prompt: str) -> str:
    """Answer of a judge that prefers the answer with more characters, to a prompt in the shipped form."""
    found = ANSWERS.search(prompt)
    assert found is not None, prompt
    first, second = map(len, found.groups())
    return f"The longer one. [[{'tie' if first == second else 1 if first > second else 2}]]"


@dataclass
class JudgeServer:
    """The server's requests so far, and its answers.

    - `answer`: the judge's answer to a prompt
    - `refusals`: (status, headers) of the next requests, in order, instead of an answer
    - `on_request`: called with the number of requests so far, before the answer
    """

    url: str = ""
    answer: Callable[[str], str] = longer
    refusals: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    on_request: Callable[[int], object] = lambda _: None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        return [request["messages"][0]["content"] for request in self.requests]


@contextmanager
def judge_server(port: int = 0) -> Iterator[JudgeServer]:
    state = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.requests.append(document)
                state.headers.append(dict(self.headers))
                state.now += 1
                state.most_at_once = max(state.most_at_once, state.now)
                refusal = state.refusals.pop(0) if state.refusals else None
            try:
                state.on_request(len(state.requests))
                if refusal is not None:
                    self._send(refusal[0], b"not now", refusal[1])
                    return
                text = state.answer(document["messages"][0]["content"])
                message = {"role": "assistant", "content": text}
                body = {"model": f"{document['model']}-0613", "choices": [{"index": 0, "message": message}]}
                self._send(200, json.dumps(body).encode(), {})
            finally:
                with state.lock:
                    state.now -= 1

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            """Say nothing: a client may have gone before its answer."""

    server = Server(("127.0.0.1", port), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
