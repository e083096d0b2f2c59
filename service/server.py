"""`mergesearch serve`: the HTTP server in one process, and Ray in others.

It answers requests while Ray is still starting. All its state is in the data directory: a server that was killed
continues when it is restarted.
"""

from __future__ import annotations

import errno
import logging
import signal
import socket
from pathlib import Path

from service.disk import locked
from service.errors import Conflict

__all__ = ["bind", "serve"]

# Open event streams end when the server does; other requests may finish.
SHUTDOWN_S = 5


def serve(
    data_dir: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    dashboard_host: str = "127.0.0.1",
    dashboard_port: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Raises Conflict if the port or the data directory is taken."""
    import uvicorn

    from service.api import create_app
    from service.cluster.reconciler import RayCluster
    from service.jobs.search import DATABASE
    from service.store import Store

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    data_dir = data_dir.resolve()
    with locked(data_dir), bind(host, port) as listener:
        store = Store(f"sqlite:///{data_dir / DATABASE}")
        try:
            cluster = RayCluster(store, data_dir, dashboard_host=dashboard_host, dashboard_port=dashboard_port)
            app = create_app(store, cluster=cluster, data_dir=data_dir)
            url = "http://{}:{}".format(*listener.getsockname()[:2])
            print(f"mergesearch: {url}, documentation under /docs, data in {data_dir}", flush=True)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S)
            server = uvicorn.Server(config)
            for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again once it has shut down
                signal.signal(number, lambda *_: setattr(server, "should_exit", True))
            server.run(sockets=[listener])
        finally:
            store.close()


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
