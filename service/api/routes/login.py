"""Routes of logins of browsers, with an identity provider or a token, and of their sessions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import RedirectResponse, Response

from search_spaces.errors import Problem
from service.api.dependencies import Context, Reader, Services
from service.api.permissions import Credential, logs_in, shows_session
from service.api.presenters import rfc_3339, user_document
from service.api.problems import InvalidRequest, Json, Refusal, Unauthorized, refusals
from service.api.protocols import Principal
from service.api.requests import body_of, read_object
from service.auth.logins import LOGIN_S, Logins, log_in_with_token, login_cookie, next_problem
from service.auth.sessions import COOKIE, LIFETIME_S, csrf_token_of
from service.errors import LoginRefused, ProviderUnavailable
from service.schemas.api import LogoutDocument, SessionDocument
from service.store.accounts import Actor
from service.threads import Work, in_thread

__all__ = ["router"]

logger = logging.getLogger(__name__)

router = APIRouter(tags=["login"])

CALLBACK = "/v1/login/callback"

# Where a browser goes after a login that names no other path: the web page.
DEFAULT_NEXT = "/"

# The view of the web page that shows why a login has failed.
LOGIN_VIEW = "/login"

# Largest number of characters of a value that the provider sends with the browser, and of a token.
MAX_VALUE = 8192

# The address of the sender.
Address = Annotated[str, logs_in()]


class TokenLogin(BaseModel):
    """Body of the request that begins a session with an API token."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token: Annotated[str, Field(min_length=1, max_length=MAX_VALUE, repr=False, description="An API token.")]


@dataclass(frozen=True)
class _Site:
    """The address of this server as browsers see it.

    `origin` is scheme, host and port, such as `https://search.example.org`. `path` is the path below which the server
    is reached, without a slash at its end; it is empty for the root. `is_https` says whether browsers use HTTPS.
    """

    origin: str
    path: str
    is_https: bool

    @classmethod
    def of(cls, request: Request, public_url: str | None) -> _Site:
        if public_url is not None:
            parts = urlsplit(public_url)
            return cls(f"{parts.scheme}://{parts.netloc}", parts.path, parts.scheme == "https")
        scheme = request.scope["scheme"]
        root = request.scope.get("root_path", "")
        return cls(f"{scheme}://{request.headers.get('host', '')}", root, scheme == "https")

    def set_cookie(self, response: Response, name: str, value: str, *, max_age_s: float, path: str = "") -> None:
        response.set_cookie(
            name,
            value,
            max_age=int(max_age_s),
            path=f"{self.path}{path}" or "/",
            secure=self.is_https,
            httponly=True,
            samesite="lax",
        )


def _site(request: Request, services: Services) -> _Site:
    settings = services.notifier.settings if services.logins is None else services.logins.settings
    return _Site.of(request, settings.public_url)


def _site_of_page(request: Request, services: Services) -> _Site:
    """The address of this server as the browser that sends `request` uses it, from the request's header Origin.

    The session's cookie is set for this address, because the browser drops cookies for other addresses. The address may
    differ from the public URL, for example if the browser uses an SSH tunnel to the server.
    """
    site, origin = _site(request, services), request.headers.get("origin")
    if origin is None or origin == site.origin:
        return site
    return _Site(origin, request.scope.get("root_path", ""), origin.startswith("https:"))


def _redirect(request: Request, path: str) -> Response:
    """Redirect a browser to `path` of this server, below the path prefix that the browser uses for the server."""
    # A path that begins with the prefix gets it from the middleware.
    path = path.removeprefix(request.scope.get("root_path", ""))
    return RedirectResponse(path if path.startswith("/") else f"/{path}", status_code=303)


def _shown(request: Request, site: _Site, error: LoginRefused | ProviderUnavailable) -> Response:
    """Redirect a browser to the login of the web page, which shows why a login failed; raise `error` for programs.

    A program is a client that does not accept HTML; it gets `error` as a problem document. The address of the page has
    only a code for the reason, and the page has a text for each code. Therefore nobody can make a link that shows
    another text on the page. `site` is the address of this server as the browser sees it.
    """
    if "text/html" not in request.headers.get("accept", ""):
        raise error
    logger.warning("a login has failed: %s", error)
    code = error.code if isinstance(error, LoginRefused) else "unavailable"
    return _redirect(request, f"{site.path}{LOGIN_VIEW}?problem={code}")


def _logins(services: Services) -> Logins:
    if services.logins is None:
        raise Refusal(
            404,
            "this server has no login for browsers: send a token, or let the server's operator name an identity "
            "provider with --oidc-issuer",
        )
    return services.logins


@router.get(
    "/login",
    status_code=303,
    response_model=None,
    response_class=RedirectResponse,
    responses={303: {"description": "The identity provider's page."}, **refusals(404, 422, 503)},
)
async def begin_login(
    request: Request,
    services: Context,
    _: Address,
    next_path: Annotated[
        str | None,
        Query(alias="next", description="Path of this server to which the browser goes after the login."),
    ] = None,
) -> Response:
    """Begin a login: send the browser to the identity provider, which sends it back to /v1/login/callback.

    The parameter `next` is the path of this server to which the browser goes after the login; by default, the web page.
    """
    logins, site = _logins(services), _site(request, services)
    target = f"{site.path}{DEFAULT_NEXT}" if next_path is None else next_path
    if problem := next_problem(target, below=site.path):
        raise InvalidRequest((Problem("next", problem),))
    try:
        begun = await logins.begin(redirect_uri=f"{site.origin}{site.path}{CALLBACK}", next_path=target)
    except ProviderUnavailable as error:
        return _shown(request, site, error)
    response = RedirectResponse(begun.url, status_code=303)
    site.set_cookie(response, login_cookie(begun.state), begun.browser, max_age_s=LOGIN_S, path="/v1/login")
    return response


@router.get(
    "/login/callback",
    status_code=303,
    response_model=None,
    response_class=RedirectResponse,
    responses={303: {"description": "The path that the login named."}, **refusals(404, 422, 503)},
)
async def finish_login(
    request: Request,
    services: Context,
    address: Address,
    state: Annotated[str | None, Query(description="The state of the login.", max_length=MAX_VALUE)] = None,
    code: Annotated[str | None, Query(description="The provider's code.", max_length=MAX_VALUE)] = None,
    error: Annotated[str | None, Query(description="The provider's refusal.", max_length=MAX_VALUE)] = None,
) -> Response:
    """End a login with the answer of the identity provider, and begin a session of the user in the browser.

    The identity provider sends the browser here. A login can end only once, within ten minutes, and in the browser that
    began it. The response sets the cookie of the session. A browser whose login is refused is sent to the login of the
    web page, which shows the reason; other clients get a problem document.
    """
    logins, site = _logins(services), _site(request, services)
    if state is None:
        raise InvalidRequest((Problem("state", "is missing; begin a login at /v1/login"),))
    if code is None and error is None:
        raise InvalidRequest((Problem("code", "is missing; begin a login at /v1/login"),))
    try:
        ended = await logins.finish(
            state=state, browser=request.cookies.get(login_cookie(state)), code=code, error=error, address=address
        )
    except (LoginRefused, ProviderUnavailable) as refused:
        return _shown(request, site, refused)
    await _end_previous(request, services, address)
    services.authenticator.forget()  # the user's teams may be others
    response = _redirect(request, ended.next)
    site.set_cookie(response, COOKIE, ended.secret, max_age_s=LIFETIME_S)
    site.set_cookie(response, login_cookie(state), "", max_age_s=0, path="/v1/login")
    return response


async def _end_previous(request: Request, services: Services, address: str) -> None:
    """End the earlier session of the browser that logs in; do nothing if there is no such session.

    The cookie of the new session replaces the cookie of the earlier session. `address` is the network address from
    which the request came, for the audit log.
    """
    secret = request.cookies.get(COOKIE)
    found = None if secret is None else await services.authenticator.authenticate_session(secret)
    if found is not None and found.session is not None:
        actor = Actor(found.account.user, address, found.session.label)
        await in_thread(Work.WRITE, services.accounts.end_session, found.session, actor=actor)


@router.get("/session", response_model=None, responses={200: {"model": SessionDocument}})
async def get_session(
    request: Request, services: Context, sender: Annotated[Principal | None, shows_session()]
) -> Response:
    """Show who is logged in, and the session's CSRF token (requests that change something must send it).

    Everybody may send this request: without a valid token or session, `user` is null, and the response says only
    whether the server has accounts and an identity provider.
    """
    return Json(await run_in_threadpool(_session_document, services, sender, request.cookies.get(COOKIE)))


@router.post(
    "/session",
    status_code=201,
    response_model=None,
    responses={
        201: {"model": SessionDocument, "description": "The session, whose cookie the response sets."},
        **refusals(404, 409, 413, 415, 422),
    },
    openapi_extra=body_of(TokenLogin),
)
async def begin_session(request: Request, services: Context, address: Address) -> Response:
    """Begin a session of a browser with an API token of its user.

    The session has the rights of the token, and ends when the token is revoked or expires, at the latest after 12
    hours. The browser needs to keep only the cookie, which scripts cannot read. A server without accounts has no
    sessions (404). A page of another server may not send this request (403).
    """
    if not await services.authenticator.needs_token():
        raise Refusal(404, "this server has no accounts, so that requests need neither a token nor a session")
    token = (await read_object(request, TokenLogin)).token
    secret = await log_in_with_token(services.accounts, services.authenticator, token, address=address)
    if secret is None:
        raise Unauthorized("the token is not valid: it is unknown, revoked or expired, or its user is disabled")
    sender = await services.guard.identify(
        Credential(session=secret), address
    )  # it may refuse, so nothing is ended yet
    await _end_previous(request, services, address)
    response = Json(await run_in_threadpool(_session_document, services, sender, secret), status_code=201)
    _site_of_page(request, services).set_cookie(response, COOKIE, secret, max_age_s=LIFETIME_S)
    return response


def _session_document(services: Services, sender: Principal | None, secret: str | None) -> SessionDocument:
    """Build the JSON document about the sender of a request; `secret` is the value of the session's cookie."""
    document: SessionDocument = {
        "has_accounts": sender is None or sender.account is not None,
        "has_identity_provider": services.logins is not None,
        "may_read_dashboard": sender is not None and services.guard.may_read_dashboard(sender),
        "user": None,
        "scope": None,
        "expires_at": None,
        "csrf_token": None,
    }
    if sender is None or sender.account is None:
        return document
    document["user"] = user_document(services.accounts.user(sender.account.user))
    if sender.scope is not None:
        document["scope"] = sender.scope.value
    if sender.session is not None and secret is not None:
        document["expires_at"] = rfc_3339(sender.session.expires_at)
        document["csrf_token"] = csrf_token_of(secret)
    return document


@router.post("/logout", response_model=None, responses={200: {"model": LogoutDocument}})
async def log_out(request: Request, services: Context, sender: Reader) -> Response:
    """End the session of the browser. All servers that share the database refuse the session within a second.

    A request with an API token instead of a session changes nothing: the token stays valid.
    """
    was_logged_in = False
    if sender.session is not None:
        was_logged_in = await in_thread(Work.WRITE, services.accounts.end_session, sender.session, actor=sender.actor)
        services.authenticator.forget()
    response = Json(LogoutDocument(was_logged_in=was_logged_in))
    _site_of_page(request, services).set_cookie(response, COOKIE, "", max_age_s=0)
    return response
