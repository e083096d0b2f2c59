"""`python -m tests.benchmarks.scale_server DATABASE PORT DIRECTORY`: the HTTP server, without a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from service.api import create_app
from service.store import Store
from tests.service.site import FakeCluster, Preflight


def main(database: str, port: str, directory: str) -> None:
    app = create_app(Store(database), cluster=FakeCluster(), data_dir=Path(directory), preflight=Preflight())
    uvicorn.run(app, port=int(port), log_level="critical")


if __name__ == "__main__":
    main(*sys.argv[1:])
