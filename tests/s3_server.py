"""S3 on this machine: moto's HTTP server, with a record of its requests and faults on demand."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
_BODY = '<?xml version="1.0"?><Error><Code>{}</Code><Message>refused by the test</Message></Error>'


@dataclass
class S3:
    """The server's address and buckets.

    `requests` are those answered so far, as (method, path). `fault` gives the status and S3 error code of a request
    that is to fail, and None for others.
    """

    url: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    fault: Callable[[str, str], tuple[int, str] | None] = lambda *_: None
    _numbers: Iterator[int] = field(default_factory=count)

    def bucket(self) -> str:
        """URL of a new bucket."""
        import boto3

        name = f"bucket-{next(self._numbers)}"
        boto3.client("s3", endpoint_url=self.url).create_bucket(Bucket=name)
        return f"s3://{name}"

    def num(self, method: str) -> int:
        """Number of requests with this method so far."""
        return sum(each == method for each, _ in self.requests)


@contextmanager
def serving_s3(host: str = "127.0.0.1") -> Iterator[S3]:
    """Serve S3 at `host` until the end of the context, with the environment that makes S3's clients use it."""
    import fsspec
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = DomainDispatcherApplication(create_backend_app)

    def application(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}".rstrip("?")
        s3.requests.append((method, path))
        if (fault := s3.fault(method, path)) is None:
            return moto(environ, start_response)  # type: ignore[no-any-return]
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(f"{fault[0]} Refused", [("Content-Type", "application/xml")])
        return [_BODY.format(fault[1]).encode()]

    server = make_server(host, 0, application, threaded=True)
    s3 = S3(f"http://{host}:{server.port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    clients = fsspec.get_filesystem_class("s3")
    clients.clear_instance_cache()  # clients keep the address that they were made with
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3.url}.items():
            patch.setenv(name, value)
        try:
            yield s3
        finally:
            clients.clear_instance_cache()
            server.shutdown()
            thread.join()


@contextmanager
def failing(s3: S3, fault: Callable[[str, str], tuple[int, str] | None]) -> Iterator[None]:
    """Context in which requests fail if `fault` gives a status and error code for them."""
    before, s3.fault = s3.fault, fault
    try:
        yield
    finally:
        s3.fault = before
