"""Client of the identity provider (OpenID Connect), which logs browsers in and describes users by claims.

Authlib reads the provider's metadata and keys, exchanges the code of a login, and checks the ID token. This module
states the conditions of a login, and turns failures into two errors: LoginRefused and ProviderUnavailable.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from service.auth.settings import OidcSettings, is_protected
from service.errors import LoginRefused, ProviderUnavailable
from service.types import LoginRecord

__all__ = ["ALGORITHMS", "LEEWAY_S", "TIMEOUT_S", "Provider"]

logger = logging.getLogger(__name__)

# Seconds for all requests to the provider that one request to this server needs.
TIMEOUT_S = 10.0

# Seconds for which the provider's metadata and keys are used again.
METADATA_S = 3600.0

# Seconds by which the clocks of the provider and of this server may differ.
LEEWAY_S = 60

# Signatures of ID tokens that only the provider's private key can make.
ALGORITHMS = frozenset(
    ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
)

ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class Provider:
    """Client of the identity provider (OpenID Connect) that logs in users in browsers.

    `settings` describe the provider. `timeout_s` is the longest time, in seconds, for the requests to the provider that
    one method call sends. All coroutines must be called in one event loop.
    """

    def __init__(self, settings: OidcSettings, *, timeout_s: float = TIMEOUT_S) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._app: Any = None
        self._read_at = -math.inf

    async def login_url(self, login: LoginRecord, *, state: str) -> str:
        """The address at the identity provider where a browser logs in.

        `login` has the secrets of the login, such as its nonce, and `state` is its OAuth state. Raises
        ProviderUnavailable if the provider does not answer.
        """
        async with self._answering():
            app = await self._client()
            begun = await app.create_authorization_url(
                login.redirect_uri, state=state, nonce=login.nonce, code_verifier=login.verifier
            )
        return str(begun["url"])

    async def claims(self, login: LoginRecord, *, code: str) -> Mapping[str, Any]:
        """Exchange the `code` of a login for an ID token, check the token, and return its claims about the user.

        The ID token must have the signature of the provider, must be for this server and this `login`, and must not
        have expired. If the token lacks a claim that the settings need, the claims of the provider's user info are
        added.

        Raises:
            LoginRefused: The code or the ID token is not valid.
            ProviderUnavailable: The provider does not answer, or does not accept this server.
        """
        async with self._answering():
            app = await self._client()
            answer = await app.fetch_access_token(
                login.redirect_uri, code=code, code_verifier=login.verifier, grant_type="authorization_code"
            )
            if not isinstance(answer.get("id_token"), str):
                raise LoginRefused("the identity provider sent no ID token; --oidc-scopes must have openid")
            claims = dict(
                await app.parse_id_token(
                    answer,
                    nonce=login.nonce,
                    claims_options={
                        "iss": {"essential": True, "value": self._settings.issuer},
                        "aud": {"essential": True, "value": self._settings.client_id},
                    },
                    leeway=LEEWAY_S,
                )
            )
            if self._lacks(claims) and app.server_metadata.get("userinfo_endpoint"):
                more = await app.userinfo(token=answer)
                if more.get("sub") != claims["sub"]:
                    raise LoginRefused("the identity provider's user info is that of another user")
                claims = {**more, **claims}
        return claims

    def _lacks(self, claims: Mapping[str, Any]) -> bool:
        """Whether the claims of an ID token lack the user's name or, if the settings use groups, the user's groups.

        Some providers send these claims only as user info, in a separate answer, and not in the ID token.
        """
        settings = self._settings
        has_name = bool(
            claims.get(settings.user_claim)
            if settings.user_claim is not None
            else claims.get("preferred_username") or claims.get("email")
        )
        return not has_name or (settings.groups_claim is not None and settings.groups_claim not in claims)

    async def _client(self) -> Any:
        """Authlib's client of the identity provider, with the provider's metadata, such as its addresses and keys.

        The metadata are read again after an hour. Raises ProviderUnavailable if the metadata do not fit the settings.
        """
        if self._app is None or time.monotonic() - self._read_at > METADATA_S:
            app = _new_client(self._settings, self._timeout_s)
            metadata = await app.load_server_metadata()
            self._check(metadata)
            # Algorithms that the provider lists, but that prove nothing, such as "none", are not accepted.
            listed = metadata.get("id_token_signing_alg_values_supported") or ["RS256"]
            metadata["id_token_signing_alg_values_supported"] = sorted(ALGORITHMS & set(listed))
            methods = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
            if "client_secret_basic" not in methods and "client_secret_post" in methods:
                app.client_kwargs["token_endpoint_auth_method"] = "client_secret_post"
            self._app, self._read_at = app, time.monotonic()
        return self._app

    def _check(self, metadata: Mapping[str, Any]) -> None:
        if metadata.get("issuer") != self._settings.issuer:
            raise ProviderUnavailable(
                f"{self._place} calls itself {metadata.get('issuer')!r:.200}; the server's operator must give this as "
                "--oidc-issuer, if it is the right provider"
            )
        for name in (*ENDPOINTS, *({"userinfo_endpoint"} & metadata.keys())):
            if not is_protected(str(metadata.get(name, ""))):
                raise ProviderUnavailable(f"{self._place}: its {name} is {metadata.get(name)!r:.200}, not an https URL")
        if not ALGORITHMS & set(metadata.get("id_token_signing_alg_values_supported") or ["RS256"]):
            raise ProviderUnavailable(
                f"{self._place}: signs ID tokens by none of {', '.join(sorted(ALGORITHMS))}, which are accepted"
            )

    @property
    def _place(self) -> str:
        return f"the identity provider {self._settings.issuer}"

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Context that limits the time of requests to the identity provider, and converts their errors.

        Errors become LoginRefused or ProviderUnavailable. Their messages say what the provider did wrong, without
        secrets.
        """
        import httpx2
        from authlib.integrations.base_client import OAuthError
        from joserfc.errors import JoseError

        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except JoseError as error:
            logger.warning("%s: its ID token is refused: %s", self._place, error)
            raise LoginRefused(f"the ID token is not valid: {error!s:.200}") from None
        except OAuthError as error:
            reason = _code_of(error.error)
            logger.warning("%s: refuses a code: %s", self._place, reason)
            if reason == "invalid_grant":
                raise LoginRefused(
                    "the identity provider does not accept the code of this login: log in again"
                ) from None
            raise ProviderUnavailable(
                f"{self._place} refuses this server: {reason}; the server's operator can check client id and secret"
            ) from None
        except TimeoutError:
            logger.warning("%s: no answer within %g s", self._place, self._timeout_s)
            raise ProviderUnavailable(f"{self._place} does not answer within {self._timeout_s:g} s") from None
        except httpx2.HTTPStatusError as error:
            logger.warning("%s: %s answers with status %d", self._place, error.request.url, error.response.status_code)
            raise ProviderUnavailable(f"{self._place} answers with status {error.response.status_code}") from None
        except httpx2.HTTPError as error:
            logger.warning("%s: %s: %s", self._place, type(error).__name__, error)
            raise ProviderUnavailable(f"{self._place} does not answer ({type(error).__name__})") from None
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            if isinstance(error, LoginRefused):
                raise
            logger.warning("%s: its answer cannot be understood", self._place, exc_info=error)
            raise ProviderUnavailable(f"{self._place} sent what is not an answer of OpenID Connect") from None


def _new_client(settings: OidcSettings, timeout_s: float) -> Any:
    import httpx2
    from authlib.integrations.starlette_client import StarletteOAuth2App

    # At the level DEBUG, Authlib writes the verifier of PKCE to the log.
    logging.getLogger("authlib.integrations.base_client").setLevel(logging.INFO)
    return StarletteOAuth2App(
        None,
        "provider",
        client_id=settings.client_id,
        client_secret=settings.client_secret,
        server_metadata_url=f"{settings.issuer.rstrip('/')}/.well-known/openid-configuration",
        client_kwargs={
            "scope": settings.scopes,
            "code_challenge_method": "S256",
            "timeout": timeout_s,
            # Authlib makes a client for each request, and each would load all certificates (20 ms).
            "verify": httpx2.create_ssl_context(),
        },
    )


def _code_of(text: object) -> str:
    """OAuth 2.0 error code that the identity provider has sent as `text`, if it is safe to show in messages.

    Returns "unknown error" if `text` does not have the form of such a code.
    """
    text = str(text)
    return text if text.replace("_", "").isalpha() and text.isascii() and len(text) <= 40 else "unknown error"
