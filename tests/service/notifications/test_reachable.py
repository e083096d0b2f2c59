"""Guards of webhooks: requests reach only public addresses, whatever the URL, the name server or a proxy says."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
import trustme

from service.notifications import reachable
from service.notifications.reachable import PublicNetwork, address_refusal, url_problem
from service.notifications.webhooks import Outcome, send_webhook
from tests.service.notifications.receiver import receiver

PRIVATE = (
    "127.0.0.1",
    "127.8.8.8",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::1",
    "2001:0:7f00:1::1",
    "2001:db8::1",
    "fc00::1",
    "fd12:3456::1",
    "fe80::1",
    "fe80::1%1",
    "fec0::1",
    "ff02::1",
)
PUBLIC = ("93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:8.8.8.8")


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_refused(address: str) -> None:
    """No address of this machine, of a private network, of a link, or of a group of machines is accepted."""
    assert "is not a public address" in (address_refusal(address) or "")
    host = f"[{address.replace('%', '%25')}]" if ":" in address else address
    assert url_problem(f"https://{host}/", allowed=()) is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_accepted(address: str) -> None:
    """Addresses of the Internet are accepted, also in the form that maps IPv4 to IPv6."""
    assert address_refusal(address) is None
    assert url_problem(f"https://{f'[{address}]' if ':' in address else address}/", allowed=()) is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.org/", "is not https; only hosts that the operator names"),
        ("ftp://example.org/", "is not a URL of a webhook"),
        ("https://", "is not a URL of a webhook"),
        ("example.org", "is not a URL of a webhook"),
        ("https://ann:secret@example.org/", "has a user, a password or a fragment"),
        ("https://example.org/#part", "has a user, a password or a fragment"),
        ("https://example.org:0/", "is not a URL of a webhook"),
        ("https://example.org:99999/", "is not a URL: "),
        ("https://[::1/", "is not a URL: "),
        ("https://example.org/a b", "give at most 2000 characters of ASCII without spaces"),
        ("https://example.org/\r\nX: 1", "give at most 2000 characters of ASCII without spaces"),
        ("https://exämple.org/", "give at most 2000 characters of ASCII without spaces"),
        (f"https://example.org/{'a' * 2000}", "give at most 2000 characters of ASCII without spaces"),
    ],
)
def test_other_urls_are_refused(url: str, message: str) -> None:
    """A URL that is no webhook's is refused with the reason."""
    assert message in (url_problem(url, allowed=()) or "")


def test_the_operator_allows_a_host() -> None:
    """A host that is named may be reached over http and at any address, and no other one."""
    assert url_problem("http://10.1.2.3/", allowed=("10.1.2.3",)) is None
    assert url_problem("http://CI.internal:8000/x", allowed=("ci.internal",)) is None
    assert url_problem("http://ci.internal.example.org/", allowed=("ci.internal",)) is not None


def sent(url: str, *allowed: str, tls: ssl.SSLContext | None = None, total_s: float = 10.0) -> Outcome:
    """The outcome of a request to `url`."""

    async def send() -> Outcome:
        with ThreadPoolExecutor(2) as resolvers:
            network = PublicNetwork(allowed=allowed, resolvers=resolvers)
            context = tls or httpx.create_ssl_context()
            return await send_webhook(url, b"{}", headers={}, network=network, tls=context, total_s=total_s)

    return asyncio.run(send())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::ffff:127.0.0.1]", "127.1", "0x7f000001", "2130706433"])
def test_no_connection_to_this_machine(host: str) -> None:
    """Whatever the form of the address, no connection is made to a host that was not allowed."""
    with receiver() as target:
        outcome = sent(target.url(host))
        assert outcome.status is None
        assert "is not a public address" in (outcome.error or "")
        assert target.connections == 0


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Let a name server give `answers`, one for each question; returns the list of names asked for."""
    asked: list[str] = []
    left = list(answers)

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (left.pop(0), port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_the_checked_address_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that answers a public address first and then a private one gains nothing: it is asked once."""
    monkeypatch.setattr(reachable, "CONNECT_S", 0.3)
    with receiver() as target:
        asked = resolving(monkeypatch, "203.0.114.1", "127.0.0.1", "127.0.0.1")
        assert sent(target.url("rebinding.test")).error is not None
        assert asked == ["rebinding.test"]
        assert target.connections == 0


def test_one_private_answer_of_several_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a public and a private address is refused."""
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 1)) for address in ("8.8.8.8", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert "127.0.0.1 is not a public address" in (sent("http://both.test:1/").error or "")


def test_tls_is_for_the_name_in_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate must be that of the URL's host, whose name the request has; another one is refused."""
    authority = trustme.CA()
    serving, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("hook.test").configure_cert(serving)
    authority.configure_trust(trusting)
    names: list[Any] = []
    serving.sni_callback = lambda _, name, __: names.append(name)
    with receiver(serving) as target:
        resolving(monkeypatch, "127.0.0.1", "127.0.0.1", "127.0.0.1")
        assert sent(target.url("hook.test", scheme="https"), "hook.test", tls=trusting) == Outcome(204)
        assert target.received[0].headers["host"] == f"hook.test:{target.port}"
        assert names == ["hook.test"]
        assert "CERTIFICATE_VERIFY" in (
            sent(target.url("other.test", scheme="https"), "other.test", tls=trusting).error or ""
        )
        assert "CERTIFICATE_VERIFY" in (sent(target.url("hook.test", scheme="https"), "hook.test").error or "")
        assert len(target.received) == 1


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of proxies neither lead requests elsewhere nor past the check of addresses."""
    with receiver() as proxy, receiver() as target:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(path=""))
            monkeypatch.setenv(name.lower(), proxy.url(path=""))
        assert "is not a public address" in (sent(target.url()).error or "")
        assert "is not a public address" in (sent(target.url(scheme="https")).error or "")
        assert sent(target.url(), "127.0.0.1") == Outcome(204)
        assert (proxy.connections, target.connections) == (0, 1)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    """A redirect is a failure, and nothing is sent to its target."""
    with receiver() as elsewhere, receiver(statuses=[status], headers={"Location": elsewhere.url()}) as target:
        assert sent(target.url(), "127.0.0.1") == Outcome(status, f"status {status}")
        assert elsewhere.connections == 0


def test_little_of_a_response_is_kept() -> None:
    """Of a long response, a short part without control characters is kept."""
    with receiver(statuses=[500], content=b"no\x00room\r\n" + b"x" * 10_000) as target:
        outcome = sent(target.url(), "127.0.0.1")
    assert outcome.status == 500
    assert (outcome.error or "").startswith("status 500; the response begins with 'no room xxx")
    assert len(outcome.error or "") < 300


def test_a_slow_response_is_a_failure() -> None:
    """A try ends after its time, however the receiver drags it out."""
    with receiver(stall_s=1.0) as target:
        outcome = sent(target.url(), "127.0.0.1", total_s=0.2)
    assert outcome == Outcome(error="no complete response within 0.2 s")


Sender = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answered(send: Sender, *, total_s: float) -> Outcome:
    """Outcome of a request to a receiver that responds by `send`, with the status 500 and a body without end."""

    async def respond(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Error\r\nContent-Length: 1000000000000\r\n\r\n")
        with suppress(OSError):
            while True:
                await send(writer)
                await writer.drain()

    async def request() -> Outcome:
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with ThreadPoolExecutor(1) as resolvers:
            network = PublicNetwork(allowed=("127.0.0.1",), resolvers=resolvers)
            url, tls = f"http://127.0.0.1:{port}/", httpx.create_ssl_context()
            outcome = await send_webhook(url, b"{}", headers={}, network=network, tls=tls, total_s=total_s)
        server.close()
        return outcome

    return asyncio.run(request())


def test_a_response_without_end_is_cut_off() -> None:
    """Of a response that never ends, the first bytes are read, and the connection is closed."""

    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 10_000)

    outcome = answered(flood, total_s=5.0)
    assert outcome.status == 500
    assert (outcome.error or "").startswith("status 500; the response begins with 'xxx")


def test_drip_fed_response_is_a_failure() -> None:
    """A receiver that sends a byte from time to time does not hold a try for longer than its time."""

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        await asyncio.sleep(0.05)

    assert answered(drip, total_s=0.5) == Outcome(error="no complete response within 0.5 s")


def test_unreachable_receivers_are_failures() -> None:
    """A name without an address, a closed port, and a receiver that speaks no HTTP are failures with a reason."""
    with receiver() as target:
        port = target.port
    assert "ConnectError" in (sent(f"http://127.0.0.1:{port}/", "127.0.0.1").error or "")
    assert "cannot be resolved" in (sent("https://no-such-host.invalid/").error or "")
    assert "Error" in (sent(f"https://127.0.0.1:{port}/", "127.0.0.1").error or "")
