"""Who may send which request: every route of the OpenAPI document and every kind of sender.

The expected statuses follow from the rules that the routes declare, and from the rights of accounts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import get_dependant
from fastapi.routing import APIRoute

from service.api.limits.rates import Rate, RateLimits
from service.api.permissions import Right, Rule, check_rules, rule_of
from service.api.protocols import Principal
from service.auth.sessions import COOKIE, csrf_token_of, new_session_secret
from service.notifications.signatures import new_webhook_secret
from service.store import SampleText
from service.store.notifications import NotificationStore
from service.types import Account, Coverage, JobRecord, JobState, Role, Scope
from tests.service.api.accounts import EXPORT, OPERATOR, ROLES, Company, bearer
from tests.service.api.harness import ApiServer, analysed_fleet, stored_study
from tests.service.api.identity_provider import identity_provider
from tests.service.api.ray_dashboard.upstream import upstream
from tests.service.jobs.serving.local import served
from workers.types import Split

UNKNOWN = "0" * 32
SECRET = new_webhook_secret()

# Path parameters with ids of jobs.
JOBS = ("study_id", "finetune_id", "served_id")


@dataclass(frozen=True)
class Visitor:
    """A sender of requests: a user with a token of one scope or with a session, or nobody with an invalid credential.

    The sender of a session sends its CSRF token if `has_csrf`.
    """

    user: str | None
    scope: Scope | None = None
    token: str | None = None
    session: str | None = None
    has_csrf: bool = True

    def __str__(self) -> str:
        credential = "no token" if self.token is self.session is None else "token" if self.token else "session"
        return f"{self.user or 'nobody'}, {credential}, {self.scope}, {'' if self.has_csrf else 'no CSRF token'}"

    def headers(self) -> dict[str, str]:
        if self.session is None:
            return bearer(self.token)
        csrf = {"X-CSRF-Token": csrf_token_of(self.session)} if self.has_csrf else {}
        return {"Cookie": f"{COOKIE}={self.session}", **csrf}


@dataclass(frozen=True)
class Place:
    """The company, its jobs by path parameter, and the server's routes."""

    company: Company
    study: JobRecord
    created: JobRecord
    tuned: JobRecord
    begun: JobRecord
    served: JobRecord
    ended: JobRecord
    http: httpx.Client
    sessions: dict[str, str]

    @property
    def app(self) -> FastAPI:
        app: FastAPI = self.company.server.app
        return app

    @property
    def notifications(self) -> NotificationStore:
        return NotificationStore(self.company.server.store)

    @property
    def routes(self) -> list[APIRoute]:
        return [route for route in self.app.routes if isinstance(route, APIRoute) and route.include_in_schema]

    def visitors(self) -> list[Visitor]:
        tokens = self.company.tokens
        visitors = [Visitor(None), Visitor(None, None, self.company.expired), Visitor(None, None, "mst_wrong")]
        visitors += [Visitor("owner", scope, tokens["owner", scope]) for scope in Scope]
        others = [user for user in ROLES if user != "owner"]
        visitors += [Visitor(user, Scope.ADMIN, tokens[user, Scope.ADMIN]) for user in others]
        visitors.append(Visitor(None, None, session=new_session_secret()))
        for user in ("root", "owner", "stranger"):
            scope = Scope.ADMIN if user == "root" else Scope.SUBMIT
            visitors.append(Visitor(user, scope, session=self.sessions[user]))
            visitors.append(Visitor(user, scope, session=self.sessions[user], has_csrf=False))
        return visitors

    def parameters(self, route: APIRoute) -> dict[str, str]:
        """Path parameters of the route: objects of the team "red" that are new, or whose state refuses the change."""
        is_delete = "DELETE" in route.methods
        token = ""
        webhook = ""
        if "{webhook_id" in route.path:
            for before in self.notifications.webhooks("owner"):
                self.notifications.remove_webhook(before.id, actor=OPERATOR)
            webhook = self.notifications.add_webhook(
                "https://example.org/", secret=SECRET, events=(), owner="owner", covers=Coverage.OWN, actor=OPERATOR
            ).id
        if "{token_id" in route.path:
            self.company.add_token("owner", Scope.READ)
            token = self.company.accounts.tokens("owner")[-1].id
        if "{export_id" in route.path:
            self.company.exported(self.study)
        return {
            "study_id": (self.created if is_delete and "export_id" not in route.path else self.study).id,
            "finetune_id": (self.begun if is_delete else self.tuned).id,
            "served_id": (self.served if is_delete or "/openai/" in route.path else self.ended).id,
            "export_id": EXPORT,
            "number": "1",
            "name": "recipe",
            "split": "search",
            "objective": "math",
            "position": "0",
            "alias": "math",
            "team": "red",
            "user": "owner" if route.path.endswith("/mail") else "loner",
            "token_id": token,
            "path": "api/jobs/",
            "webhook_id": webhook,
        }

    def send(self, route: APIRoute, visitor: Visitor, **changes: str) -> httpx.Response:
        (method,) = route.methods
        path = route.path_format.format(**{**self.parameters(route), **changes})
        if route.path == "/v1/logout" and visitor.session in self.sessions.values():
            assert visitor.user is not None
            visitor = replace(visitor, session=self.company.add_session(visitor.user))
        self.http.cookies.clear()
        accept = {"Accept": "application/json"} if route.path == "/v1/events" else {}  # the stream has no end
        return self.http.request(method, path, headers={**visitor.headers(), **accept})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    unlimited = RateLimits(*(Rate(math.inf, math.inf) for _ in range(4)))
    with (
        identity_provider() as provider,
        ApiServer(tmp_path_factory.mktemp("api"), rates=unlimited, oidc=provider.settings()) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        upstream({"/api/jobs/": []}) as ray,
    ):
        server.cluster.ray = ray.dashboard
        company = Company.on(server)
        analysis = {"samples": 3, "fleets": [analysed_fleet("mergopt", 1, 2, 3, 4)]}
        tuned = company.tuned(server.data_dir, analysis=analysis)
        created = company.own(stored_study(server.store))
        sessions = {user: company.add_session(user) for user in ("root", "owner", "stranger")}
        study = company.finished()
        server.store.open_attempt(study.id).add_prompts(Split.SEARCH, "math", [SampleText("a.png", "cat", b"RIFF")])
        with served(server.store, study) as ended:
            server.store.open_attempt(ended.job.id).set_state(JobState.CANCELLED)
        with served(server.store, study) as chat:
            yield Place(company, study, created, tuned, company.begun(), chat.job, ended.job, http, sessions)


def account_of(user: str) -> Account:
    membership = ROLES[user]
    return Account(user, user == "root", {} if membership is None else {membership[0]: membership[1]})


def expected(rule: Rule, visitor: Visitor, job: JobRecord | None, *, method: str) -> int | None:
    """The expected status of a refused request; None if the sender may send it."""
    if rule.scope is None:
        return None
    if visitor.user is None or visitor.scope is None:
        return 401
    if not visitor.has_csrf and method not in ("GET", "HEAD"):
        return 403
    if not visitor.scope.allows(rule.scope):
        return 403
    account = account_of(visitor.user)
    if rule.is_for_admins and not account.is_admin:
        return 403
    if rule.right is Right.SEE:
        return None if account.is_admin or "red" in account.roles else 404
    if rule.right is Right.MANAGE:
        role = account.roles.get("red")
        return None if account.is_admin or role is Role.ADMIN else 404 if role is None else 403
    if rule.right is Right.OWN:
        return None if account.is_admin or account.user == "owner" else 404
    if job is None:
        assert rule.right is None
        return None
    if not account.may_read(job):
        return 404
    may = {Right.READ: account.may_read, Right.USE: account.may_use, Right.CHANGE: account.may_change}
    assert rule.right is not None
    return None if may[rule.right](job) else 403


def job_of(place: Place, route: APIRoute) -> JobRecord | None:
    parameters = place.parameters(route)
    for name in JOBS:
        if f"{{{name}" in route.path:
            return place.company.server.store.job(parameters[name])
    return None


def mistakes(place: Place, route: APIRoute) -> Iterator[str]:
    """Descriptions of wrong answers of a route to all visitors."""
    rule, job = rule_of(route), job_of(place, route)
    (method,) = route.methods
    for visitor in place.visitors():
        status, wanted = place.send(route, visitor).status_code, expected(rule, visitor, job, method=method)
        is_right = status not in (401, 403, 404) and status < 500 if wanted is None else status == wanted
        if not is_right:
            yield f"{route.methods} {route.path}, {visitor}: {status}, expected {wanted or 'no refusal'}"


def test_every_route_answers_as_declared(place: Place) -> None:
    """Every route refuses exactly the senders that its rule refuses, whatever the token or session."""
    documented = {
        (method.upper(), path)
        for path, operations in httpx.get(f"{place.company.server.url}/openapi.json").json()["paths"].items()
        for method in operations
    }
    assert documented == {(method, route.path_format) for route in place.routes for method in route.methods}
    assert len(documented) > 40
    assert {("GET", "/v1/login"), ("GET", "/v1/login/callback"), ("POST", "/v1/logout")} < documented
    assert [mistake for route in place.routes for mistake in mistakes(place, route)] == []


def test_another_teams_objects_do_not_exist(place: Place) -> None:
    """What a sender may not read is answered as an unknown id is, word for word."""
    stranger = Visitor("stranger", Scope.ADMIN, place.company.tokens["stranger", Scope.ADMIN])
    compared = 0
    for route in place.routes:
        rule = rule_of(route)
        if rule.right is None:
            continue
        names = ("token_id", "webhook_id", *JOBS, "team", "user")
        name = next(name for name in names if f"{{{name}" in route.path)
        real = place.parameters(route)[name]
        unknown = "unknown" if name in ("team", "user") else UNKNOWN
        there = place.send(route, stranger, **{name: real})
        not_there = place.send(route, stranger, **{name: unknown})
        assert there.status_code == not_there.status_code == 404, route.path
        assert there.text.replace(real, "X") == not_there.text.replace(unknown, "X"), route.path
        hidden = ("content-length", "date")
        assert {k: v for k, v in there.headers.items() if k not in hidden} == {
            k: v for k, v in not_there.headers.items() if k not in hidden
        }
        compared += 1
    assert compared > 25


@contextmanager
def without_check(place: Place, route: APIRoute) -> Iterator[None]:
    """Context in which a route does not check its sender: the object that the path names is taken as it is."""
    rule, company = rule_of(route), place.company

    async def unchecked(request: Request) -> Any:
        parameters = request.path_params
        if rule.right in (Right.MANAGE, Right.SEE):
            return company.accounts.team(parameters["team"])
        if "webhook_id" in parameters:
            return place.notifications.webhook(parameters["webhook_id"])
        if rule.right is Right.OWN and "user" in parameters:
            return company.accounts.user(parameters["user"])
        if rule.right is Right.OWN:
            return company.accounts.token(parameters["token_id"])
        if rule.right is None:
            return Principal("eve", "192.0.2.1", Account("root", True))
        named = next(parameters[name] for name in JOBS if name in parameters)
        return company.server.store.job(named)

    unchecked.rule = rule  # type: ignore[attr-defined]
    parts = list(declaring(route.dependant))
    replaced = [siblings[index] for siblings, index in parts]
    for (siblings, index), part in zip(parts, replaced, strict=True):
        siblings[index] = replace(get_dependant(path=route.path_format, call=unchecked), name=part.name)
    try:
        yield
    finally:
        for (siblings, index), part in zip(parts, replaced, strict=True):
            siblings[index] = part


def declaring(dependant: Dependant) -> Iterator[tuple[list[Dependant], int]]:
    """The places of the dependencies of a route that declare a rule: a list, and an index in it."""
    for index, part in enumerate(dependant.dependencies):
        if hasattr(part.call, "rule"):
            yield dependant.dependencies, index
        else:
            yield from declaring(part)


def test_without_its_check_a_route_is_found(place: Place) -> None:
    """If the check of any single route is removed, its answers are not those that are declared."""
    checked = [route for route in place.routes if rule_of(route).scope is not None]
    for route in checked:
        with without_check(place, route):
            assert next(mistakes(place, route), None), route.path
    assert len(checked) > 40
    assert list(mistakes(place, checked[0])) == []


def test_a_route_without_a_rule_is_refused() -> None:
    """The application cannot be created with a route that declares no rule."""
    router = APIRouter()

    @router.get("/v1/secrets")
    def secrets() -> str:
        return "all of them"

    with pytest.raises(TypeError, match=r"route GET /v1/secrets: declares 0 rules; it must depend on exactly one"):
        check_rules(list(router.routes))
