"""`mergesearch serve`: the HTTP server in one process, and Ray in others.

It answers requests while Ray is still starting. All its state is in the database and the data directory: a server that
was killed continues when it is restarted.
"""

from __future__ import annotations

import errno
import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from service.disk import artifacts_dir, locked
from service.errors import Conflict
from service.jobs.base import RequestContext
from workers.file_access import FileAccess

__all__ = ["bind", "serve"]

logger = logging.getLogger(__name__)

# Seconds for requests to finish once the server stops; event streams end then.
SHUTDOWN_S = 5


def serve(
    data_dir: Path,
    *,
    database: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    dashboard_host: str = "127.0.0.1",
    dashboard_port: int | None = None,
    allow_dirs: Sequence[Path] = (),
    trust_dirs: Sequence[Path] = (),
    allow_hosts: Sequence[str] = (),
    export_days: float = 7.0,
    export_quota_bytes: int | None = None,
    files: str | None = None,
    artifact_quota_bytes: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    `database` is the URL of the database; `service.store.database_url` says which one is used by default.
    Jobs may read files in `allow_dirs` (none: the data directory, the working directory and the hub's cache) and in
    `trust_dirs`, where task files may also name Python functions. `allow_hosts` are the server's names besides the
    loopback names, `host` and the address that it listens on. Exports are removed after `export_days`, and earlier if
    they take more than `export_quota_bytes` (None: a tenth of the disk). Experts and policies are stored at `files`, a
    directory or the URL of an object store (None: in the data directory). A fine-tuning is refused if they would take
    more than `artifact_quota_bytes` (None: a tenth of the disk, and no limit in an object store).

    Raises:
        Conflict: The port or the data directory is taken, or the database or `files` cannot be used.
        DatabaseUnavailable: The database does not answer.
    """
    import uvicorn

    from service.api import create_app
    from service.api.limits.exports import DAY_S, ExportLimits
    from service.api.preflight_process import PreflightProcess, default_access
    from service.cluster.reconciler import RayCluster
    from service.store import Store
    from service.store.blobs import check_location
    from service.store.database_url import VARIABLE, database_url, has_password, parse_url, remember

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    data_dir = data_dir.resolve()
    readable, trusted = _directories("--allow-dir", allow_dirs), _directories("--trust-dir", trust_dirs)
    access = FileAccess(readable or default_access(data_dir).readable, trusted)
    if database is not None and has_password(parse_url(database)):
        logger.warning("every user of this machine can read the password in --database; give the URL in %s", VARIABLE)
    with locked(data_dir), bind(host, port) as listener:
        check_location(files or artifacts_dir(data_dir))
        address = database_url(data_dir, database)
        store = Store(address)
        try:
            remember(data_dir, address)
            cluster = RayCluster(
                store, data_dir, files=files, dashboard_host=dashboard_host, dashboard_port=dashboard_port
            )
            app = create_app(
                store,
                cluster=cluster,
                data_dir=data_dir,
                preflight=PreflightProcess(RequestContext(access, store.url, data_dir, files)),
                hosts=(host, *allow_hosts),
                keep=ExportLimits(export_days * DAY_S, export_quota_bytes),
                files=files,
                artifact_quota_bytes=artifact_quota_bytes,
            )
            url = "http://{}:{}".format(*listener.getsockname()[:2])
            places = f"data in {data_dir}, database {store.place}"
            print(f"mergesearch: {url}, documentation under /docs, {places}", flush=True)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S)
            server = uvicorn.Server(config)
            for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again once it has shut down
                signal.signal(number, lambda *_: setattr(server, "should_exit", True))
            server.run(sockets=[listener])
        finally:
            store.close()


def _directories(option: str, directories: Sequence[Path]) -> tuple[str, ...]:
    """Absolute paths of `directories`. Raises Conflict if one is not a directory."""
    for directory in directories:
        if not directory.is_dir():
            raise Conflict(f"{option} {directory}: is not a directory; give one that exists")
    return tuple(str(directory.resolve()) for directory in directories)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free port. Raises Conflict if the address cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError) as error:
        raise Conflict(f"--host {host} --port {port}: no such address: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        reason = "in use by another program; give another --port" if is_taken else f"not available: {error.strerror}"
        raise Conflict(f"port {port} of {host}: {reason}") from error
    return listener
