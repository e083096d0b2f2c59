"""An identity provider (OpenID Connect) on this machine, and browsers that log in with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import flask
import httpx
import oidc_provider_mock

from service.auth.sessions import COOKIE
from service.auth.settings import OidcSettings

__all__ = ["CLIENT", "SECRET", "Browser", "IdentityProvider", "identity_provider", "parameters_of"]

CLIENT = "mergesearch"
SECRET = "the-client-secret-of-tests"


@dataclass(frozen=True)
class IdentityProvider:
    """The provider at `url`. A user's claims in the ID token replace the correct ones.

    - `metadata`, `user_info`: what its metadata, and its user info, have in place of what they should
    - `token_requests`: the requests for tokens that it received
    """

    url: str
    metadata: dict[str, Any] = field(default_factory=dict)
    user_info: dict[str, Any] = field(default_factory=dict)
    token_requests: list[dict[str, str]] = field(default_factory=list)

    def settings(self, **changes: Any) -> OidcSettings:
        return OidcSettings(**{"issuer": self.url, "client_id": CLIENT, "client_secret": SECRET, **changes})

    def add_user(self, subject: str, **claims: Any) -> None:
        httpx.put(f"{self.url}/users/{subject}", json=claims, verify=False).raise_for_status()


@contextmanager
def identity_provider() -> Iterator[IdentityProvider]:
    with oidc_provider_mock.run_server_in_thread() as server:
        provider = IdentityProvider(f"http://localhost:{server.server_port}")

        @server.app.after_request
        def change(response: flask.Response) -> flask.Response:
            path = flask.request.path
            changes = {"/.well-known/openid-configuration": provider.metadata, "/userinfo": provider.user_info}
            if path == "/oauth2/token":
                provider.token_requests.append(flask.request.form.to_dict())
            if changes.get(path):
                response.set_data(json.dumps({**json.loads(response.get_data()), **changes[path]}))
            return response

        yield provider


class Browser(httpx.Client):
    """A browser that has the server at `url` open: it keeps cookies, and follows no redirect by itself."""

    def __init__(self, url: str, **options: Any) -> None:
        # Certificates would be loaded for each browser, and there is no HTTPS.
        super().__init__(base_url=url, timeout=30, follow_redirects=False, verify=False, **options)

    def begin(self, **parameters: str) -> httpx.Response:
        return self.get("/v1/login", params=parameters)

    def authorize(self, page: str, subject: str) -> httpx.URL:
        """Log in as `subject` on the provider's page. Returns the address to which the provider sends the browser."""
        answer = self.post(page, data={"sub": subject})
        assert answer.status_code == 302, answer.text
        return httpx.URL(answer.headers["location"])

    def log_in(self, subject: str, **parameters: str) -> httpx.Response:
        """The server's answer to a whole login."""
        begun = self.begin(**parameters)
        assert begun.status_code == 303, begun.text
        return self.get(self.authorize(begun.headers["location"], subject))

    @property
    def session(self) -> str | None:
        return self.cookies.get(COOKIE)

    def csrf(self) -> dict[str, str]:
        """The header that requests with changes need."""
        return {"X-CSRF-Token": self.get("/v1/session").raise_for_status().json()["csrf_token"]}


def parameters_of(url: str | httpx.URL) -> dict[str, str]:
    return {name: value for name, (value,) in parse_qs(urlsplit(str(url)).query).items()}
