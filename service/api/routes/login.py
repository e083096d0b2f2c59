"""Routes of logins of browsers with an identity provider, and of their sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from search_spaces.errors import Problem
from service.api.dependencies import Context, Reader, Services
from service.api.permissions import credential_of, logs_in
from service.api.presenters import rfc_3339, user_document
from service.api.problems import InvalidRequest, Json, Refusal, refusals
from service.auth.logins import LOGIN_S, Logins, login_cookie, next_problem
from service.auth.sessions import COOKIE, LIFETIME_S, csrf_token_of
from service.schemas.api import LogoutDocument, SessionDocument
from service.store.accounts import Actor

__all__ = ["router"]

router = APIRouter(tags=["login"])

CALLBACK = "/v1/login/callback"

# Where a browser goes after a login that names no other path.
DEFAULT_NEXT = "/docs"

# Characters of what a provider sends with the browser.
MAX_VALUE = 8192

# The address of the sender.
Address = Annotated[str, logs_in()]


@dataclass(frozen=True)
class _Site:
    """The address of this server as browsers see it.

    `origin` is scheme, host and port, such as `https://search.example.org`. `path` is the path below which the server
    is reached; "" for the root. `is_https` says whether browsers use HTTPS.
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
    return _Site.of(request, None if services.logins is None else services.logins.settings.public_url)


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
    """Begin a login: send the browser to the identity provider, which sends it back to /v1/login/callback."""
    logins, site = _logins(services), _site(request, services)
    target = f"{site.path}{DEFAULT_NEXT}" if next_path is None else next_path
    if problem := next_problem(target, below=site.path):
        raise InvalidRequest((Problem("next", problem),))
    begun = await logins.begin(redirect_uri=f"{site.origin}{site.path}{CALLBACK}", next_path=target)
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

    A login can end only once, within ten minutes, and in the browser that began it. The cookie of the session is set in
    the response.
    """
    logins, site = _logins(services), _site(request, services)
    if state is None:
        raise InvalidRequest((Problem("state", "is missing; begin a login at /v1/login"),))
    if code is None and error is None:
        raise InvalidRequest((Problem("code", "is missing; begin a login at /v1/login"),))
    ended = await logins.finish(
        state=state, browser=request.cookies.get(login_cookie(state)), code=code, error=error, address=address
    )
    await _end_previous(request, services, address)
    services.authenticator.forget()  # the user's teams may be others
    # A path that begins with the prefix gets it from the middleware.
    root = request.scope.get("root_path", "")
    path = ended.next.removeprefix(root)
    response = RedirectResponse(path if path.startswith("/") else f"/{path}", status_code=303)
    site.set_cookie(response, COOKIE, ended.secret, max_age_s=LIFETIME_S)
    site.set_cookie(response, login_cookie(state), "", max_age_s=0, path="/v1/login")
    return response


async def _end_previous(request: Request, services: Services, address: str) -> None:
    """End the earlier session of the browser, if there is one, because a new session replaces its cookie.

    `address` is the address of the sender, for the audit log.
    """
    secret = request.cookies.get(COOKIE)
    found = None if secret is None else await services.authenticator.authenticate_session(secret)
    if found is not None and found.session is not None:
        actor = Actor(found.account.user, address, found.session.label)
        await run_in_threadpool(services.accounts.end_session, found.session, actor=actor)


@router.get("/session", response_model=None, responses={200: {"model": SessionDocument}})
def get_session(request: Request, services: Context, sender: Reader) -> Response:
    """Show who is logged in, and the CSRF token that requests of the session must send to change something."""
    if sender.account is None:
        return Json(SessionDocument(user=None, scope=None, expires_at=None, csrf_token=None))
    user = services.accounts.user(sender.account.user)
    document = SessionDocument(user=user_document(user), scope=None, expires_at=None, csrf_token=None)
    if sender.scope is not None:
        document["scope"] = sender.scope.value
    secret = credential_of(request, None).session
    if sender.session is not None and secret is not None:
        document["expires_at"] = rfc_3339(sender.session.expires_at)
        document["csrf_token"] = csrf_token_of(secret)
    return Json(document)


@router.post("/logout", response_model=None, responses={200: {"model": LogoutDocument}})
async def log_out(request: Request, services: Context, sender: Reader) -> Response:
    """End the session of the browser. Every server refuses the session within a second. A token stays valid."""
    was_logged_in = False
    if sender.session is not None:
        was_logged_in = await run_in_threadpool(services.accounts.end_session, sender.session, actor=sender.actor)
        services.authenticator.forget()
    response = Json(LogoutDocument(was_logged_in=was_logged_in))
    _site(request, services).set_cookie(response, COOKIE, "", max_age_s=0)
    return response
