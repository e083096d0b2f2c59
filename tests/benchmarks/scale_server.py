"""`python -m tests.benchmarks.scale_server DATABASE PORT DIRECTORY`: run the HTTP server without a cluster.

It imports what the real server imports, and no test helper that loads torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from service.api.app import create_app
from service.cluster.dashboard import RayDashboard
from service.cluster.reconciler import QueueState
from service.open_files import raise_limit
from service.server import KEEP_ALIVE_S
from service.store import Store
from service.types import Account, JobRecord


class NoCluster:
    """A cluster that runs no jobs."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def not_ready(self) -> str | None:
        return None

    def waiting_for(self, job: JobRecord, *, reader: Account | None = None) -> str | None:
        return None

    def queue(self) -> QueueState:
        return QueueState()

    def ray_job(self, job: JobRecord) -> str | None:
        return None

    def dashboard(self) -> RayDashboard | None:
        return None

    def log(self, job: JobRecord) -> str:
        return ""

    def is_leader(self) -> bool:
        return True

    def wake(self) -> None:
        pass


def main(database: str, port: str, directory: str) -> None:
    app = create_app(Store(database), cluster=NoCluster(), data_dir=Path(directory))
    raise_limit()
    uvicorn.run(app, port=int(port), log_level="critical", timeout_keep_alive=KEEP_ALIVE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
