"""Checks of the URLs of webhooks, and connections that reach public addresses only.

A webhook is a URL that a user chooses and the server requests: without limits, users could reach programs that only the
server can reach. Each host name is resolved once, and the connection is made to the address that was checked. No proxy
is used and no redirect is followed, because both lead to other addresses. The operator may allow single hosts that are
not public.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpcore

__all__ = ["MAX_URL", "NotReachable", "PublicNetwork", "address_refusal", "url_problem"]

MAX_URL = 2000

# The addresses of IPv6 that the Internet routes. Among them, addresses of the mechanisms 6to4 and Teredo contain other
# addresses.
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")

# Seconds for the connection to one address.
CONNECT_S = 5.0


class NotReachable(Exception):
    """Raised if requests may not be sent to a webhook's address, or the host has no address; the message says why."""


def url_problem(url: str, *, allowed: Collection[str]) -> str | None:
    """Reason why `url` is not accepted as the URL of a webhook; None if it is accepted.

    `allowed` are the hosts, in lower case, that webhooks may reach even if the host has a private address or the URL is
    http. The addresses of other hosts are checked when a request is sent.
    """
    shown = f"{url!r:.120}"
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        return f"{shown} is not accepted; give at most {MAX_URL} characters of ASCII without spaces"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"{shown} is not a URL: {error}"
    if parts.scheme not in ("https", "http") or not host or port == 0:
        return f"{shown} is not a URL of a webhook; give one such as https://ci.example.org/mergesearch"
    if parts.username is not None or parts.password is not None or parts.fragment:
        return f"{shown} has a user, a password or a fragment; a webhook is authenticated by its signature"
    if host in allowed:
        return None
    if parts.scheme == "http":
        return f"{shown} is not https; only hosts that the operator names (--webhook-allow) may be reached over http"
    try:
        refusal = address_refusal(host)
    except ValueError:  # a name
        return None
    return None if refusal is None else f"{shown} is not accepted: {refusal}"


def address_refusal(address: str) -> str | None:
    """Reason why requests to webhooks may not be sent to the IP address `address`; None if they may be sent.

    Raises ValueError if the text is no IP address.
    """
    ip = ipaddress.ip_address(address)
    inner = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    if inner is not None:
        return address_refusal(str(inner))
    if isinstance(ip, ipaddress.IPv6Address):
        is_public = ip in GLOBAL_UNICAST and ip.is_global and ip.sixtofour is None and ip.teredo is None
    else:
        is_public = ip.is_global and not ip.is_multicast and not ip.is_reserved
    if is_public:
        return None
    return f"{address} is not a public address; the operator can allow the host (--webhook-allow)"


class PublicNetwork(httpcore.AsyncNetworkBackend):
    """Network backend of an HTTP client that connects only to public addresses, and to the hosts in `allowed`.

    A host in `allowed` may have any address. `resolvers` are the threads in which host names are resolved, so that a
    slow name server delays nothing else.
    """

    def __init__(self, *, allowed: Collection[str], resolvers: ThreadPoolExecutor) -> None:
        self._allowed = allowed
        self._resolvers = resolvers
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve `host` once, and connect to the first of its addresses that answers.

        The arguments are those of httpcore's method of this name. Raises NotReachable if the host has no address, or if
        the host is not allowed and has an address that is not public.
        """
        addresses = await self._addresses(host, port)
        if host.lower() not in self._allowed:
            for address in addresses:
                if (refusal := address_refusal(address)) is not None:
                    raise NotReachable(f"host {host}: {refusal}")
        for index, address in enumerate(addresses):
            try:
                return await self._network.connect_tcp(
                    address, port, timeout=CONNECT_S, local_address=local_address, socket_options=socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if index == len(addresses) - 1:
                    raise
        raise NotReachable(f"host {host}: has no address")

    async def _addresses(self, host: str, port: int) -> list[str]:
        def resolved() -> list[Any]:
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)

        try:
            found = await asyncio.get_running_loop().run_in_executor(self._resolvers, resolved)
        except (socket.gaierror, UnicodeError) as error:
            raise NotReachable(f"host {host}: cannot be resolved: {error}") from error
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
