#!/usr/bin/python
"""Stand-in for `mergesearch` in the image of test_pods.py: prints its arguments, and what the kernel lets it do.

`serve` answers probes, too. Only the standard library is there.
"""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import sys

PLACES = ("/", "/usr", "/tmp", "/home/mergesearch", "/cache", "/var/lib/mergesearch", "/models", "/dev/shm")


def may_write(place: str) -> bool:
    probe = pathlib.Path(place, ".probe")
    try:
        probe.write_text("x")
        probe.unlink()
    except OSError:
        return False
    return True


def seen() -> dict[str, object]:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {
        "arguments": sys.argv[1:],
        "user": [os.getuid(), os.getgid()],
        "capabilities": [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")],
        "no_new_privileges": status["NoNewPrivs"],
        "seccomp": status["Seccomp"],
        "writable": [place for place in PLACES if may_write(place)],
        "environment": dict(os.environ),
    }


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


if __name__ == "__main__":
    print(json.dumps(seen()), flush=True)
    if sys.argv[1:2] == ["serve"]:
        http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
