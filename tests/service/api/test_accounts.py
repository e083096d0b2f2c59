"""Accounts over HTTP: tokens on several servers, teams, sharing, the audit log, limits, and secrets in answers."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sqlite3
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.exc import OperationalError

from search_spaces.errors import InvalidStudy
from search_spaces.study.models import AnotherStudy
from service.api.limits.headers import HEADERS
from service.api.limits.rates import Rate, RateLimits
from service.api.preflight_process import PreflightProcess
from service.api.routes import events as event_routes
from service.auth.authenticator import Authenticator
from service.errors import NotFound
from service.jobs.base import Accepted, RequestContext
from service.jobs.search.request import accept
from service.store.accounts import AccountStore
from service.studies.chains import on_server
from service.types import Account, JobState, Role, Scope, Sharing
from tests.service.api.accounts import OPERATOR, Company, bearer
from tests.service.api.harness import ApiServer, document, finished_study, stored_study
from workers.file_access import FileAccess
from workers.telemetry.logs import JsonLines


@pytest.fixture
def company(server: ApiServer) -> Company:
    return Company.on(server)


def test_without_a_user_no_token_is_needed(server: ApiServer, http: httpx.Client) -> None:
    """A server without users is open; from the first user on, within a second, requests need a token."""
    job = http.post("/v1/studies", json=document()).json()
    assert (job["owner"], job["team"], job["sharing"]) == (None, None, "team")
    assert http.get("/v1/me").json() == {"user": None, "token": None}
    refused = http.post("/v1/users", json={"name": "eve", "is_admin": True})
    assert refused.status_code == 403
    assert "`mergesearch users add NAME --admin`" in refused.json()["detail"]
    company = Company.on(server)
    deadline = time.monotonic() + 1.0
    while (answer := http.get("/v1/studies")).status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="mergesearch"')
    assert "send `Authorization: Bearer TOKEN`" in answer.json()["detail"]
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
        assert http.get(path).status_code == 200
    with company.http("root") as root:
        assert root.get(f"/v1/studies/{job['id']}").json()["owner"] == "root"


def test_nobody_is_let_in_until_the_database_has_answered(
    server: ApiServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not know yet whether it has accounts accepts no request, also none that reads no database."""

    def away() -> bool:
        raise OperationalError("SELECT 1", None, Exception("the server is away"))

    authenticator = Authenticator(AccountStore(server.store))
    monkeypatch.setattr(authenticator._accounts, "has_users", away)
    monkeypatch.setattr(server.app.state, "guard", replace(server.app.state.guard, authenticator=authenticator))
    for path in ("/v1/me", "/ray/api/jobs/", "/metrics"):
        assert http.get(path).status_code == 503, path
    monkeypatch.setattr(authenticator._accounts, "has_users", lambda: False)
    assert http.get("/v1/me").status_code == 200
    authenticator._looked_at = -1.0
    monkeypatch.setattr(authenticator._accounts, "has_users", away)
    assert http.get("/v1/me").status_code == 200, "what was known before holds"


def test_a_server_told_to_has_no_accounts(tmp_path: Path) -> None:
    """With `has_accounts` False, users of the database change nothing, and nobody can manage accounts."""
    with ApiServer(tmp_path, has_accounts=False) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        Company.on(server)
        assert http.get("/v1/studies").status_code == 200
        assert http.get("/v1/users").status_code == 403


def test_revoked_tokens_end_on_all_servers(server: ApiServer, company: Company) -> None:
    """Two servers share a database: both refuse a token within a second after one of them revoked it."""
    with (
        ApiServer(server.data_dir) as other,
        company.http("root") as root,
        httpx.Client(base_url=other.url, headers=bearer(company.tokens["owner", Scope.READ])) as elsewhere,
    ):
        assert elsewhere.get("/v1/studies").status_code == 200
        (token,) = (t for t in root.get("/v1/tokens?user=owner").json()["tokens"] if t["name"] == "owner-read")
        revoked_at = time.monotonic()
        assert root.delete(f"/v1/tokens/{token['id']}").json()["revoked_at"] is not None
        with company.http("owner", Scope.READ) as here:
            assert here.get("/v1/studies").status_code == 401  # the server that revoked it: at once
        while elsewhere.get("/v1/studies").status_code == 200:
            assert time.monotonic() - revoked_at < 1.0
            time.sleep(0.01)


def test_a_check_takes_less_than_a_millisecond(server: ApiServer, company: Company) -> None:
    """Finding the user of a token takes less than a millisecond at the median, after the first time."""
    authenticator = server.app.state.services.authenticator

    async def measured() -> list[float]:
        times = []
        for _ in range(300):
            begun = time.perf_counter()
            assert await authenticator.authenticate(company.tokens["owner", Scope.READ]) is not None
            times.append(time.perf_counter() - begun)
            await asyncio.sleep(0.002)
        return times

    assert statistics.median(asyncio.run(measured())[1:]) < 0.001


def test_a_stream_of_events_ends_with_its_token(server: ApiServer, company: Company) -> None:
    """Once a token is revoked, or the job is not shared any more, an open stream sends no further event."""
    record = company.own(stored_study(server.store))
    writer = server.store.open_attempt(record.id)
    with company.http("viewer") as viewer, viewer.stream("GET", f"/v1/studies/{record.id}/events") as response:
        lines = response.iter_lines()
        assert any("created" in line for line in lines)
        company.own(record, sharing=Sharing.PRIVATE)
        time.sleep(1.2)
        writer.add_event("note", {"text": "secret of the team"})
        assert not any("secret of the team" in line for line in lines)
    writer.set_state(JobState.CANCELLED)


def test_a_user_has_a_limited_number_of_streams(company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with many open streams does not keep others from theirs; a stream that is closed counts no more."""
    monkeypatch.setattr(event_routes, "MAX_STREAMS", 2)
    record = company.own(stored_study(company.server.store))
    hub, path = company.server.app.state.services.hub, f"/v1/studies/{record.id}/events"
    with company.http("owner") as owner, company.http("member") as member, ExitStack() as first:
        streams = [first.enter_context(owner.stream("GET", each)).iter_lines() for each in (path, "/v1/events")]
        for lines in streams:
            next(lines)
        for refused in (owner.get(path), owner.get("/v1/events")):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
            assert "owner: has 2 open streams of events" in refused.json()["detail"]
        assert owner.get(path, headers={"Accept": "application/json"}).status_code == 200
        with member.stream("GET", path) as response:
            assert response.status_code == 200
        first.close()
        deadline = time.monotonic() + 30
        while hub.num_streams("owner") and time.monotonic() < deadline:
            company.server.store.open_attempt(record.id).add_event("note", {"text": "wakes the streams"})
            time.sleep(0.1)
        with owner.stream("GET", path) as response:
            assert response.status_code == 200


@pytest.mark.parametrize(
    ("user", "rights"), [("viewer", []), ("member", ["use"]), ("owner", ["use", "change"]), ("root", ["use", "change"])]
)
def test_a_job_says_what_its_reader_may_do(server: ApiServer, company: Company, user: str, rights: list[str]) -> None:
    """`rights` of a job are those of the user who reads it, and its routes grant exactly these."""
    record = company.own(finished_study(server.store, num_trials=5))
    with company.http(user, Scope.SUBMIT) as http:
        assert http.get(f"/v1/studies/{record.id}").json()["rights"] == rights
        exported = http.post(f"/v1/studies/{record.id}/exports", json={"trial": 1, "dtype": "float32"})
        edited = http.put(f"/v1/studies/{record.id}/trials/1/validity", json={"is_valid": True})
        assert (exported.status_code != 403, edited.status_code != 403) == ("use" in rights, "change" in rights)


def test_jobs_belong_to_user_and_team(company: Company) -> None:
    """A job belongs to its sender and the sender's only team; the sender of several teams names one of them."""
    with company.http("member", Scope.SUBMIT) as member:
        job = member.post("/v1/studies", json=document()).json()
        assert (job["owner"], job["team"], job["sharing"]) == ("member", "red", "team")
        private = member.post("/v1/studies?sharing=private", json=document()).json()
        wrong = member.post("/v1/studies?team=blue", json=document())
        assert (wrong.status_code, wrong.json()["problems"][0]["field"]) == (422, "team")
    company.accounts.set_role("blue", "member", Role.MEMBER, actor=OPERATOR)
    time.sleep(0.6)
    with company.http("member", Scope.SUBMIT) as member:
        missing = member.post("/v1/studies", json=document())
        assert missing.json()["problems"] == [
            {"field": "team", "message": "is missing; name one of your teams: blue, red"}
        ]
        assert member.post("/v1/studies?team=blue", json=document()).json()["team"] == "blue"
    with company.http("owner") as owner, company.http("stranger") as stranger, company.http("loner") as loner:
        assert [study["id"] for study in owner.get("/v1/studies").json()["studies"]] == [job["id"]]
        assert [study["team"] for study in stranger.get("/v1/studies").json()["studies"]] == ["blue"]
        alone = loner.post("/v1/studies", json=document()).json()
        assert (alone["owner"], alone["team"]) == ("loner", None)
        assert owner.get(f"/v1/studies/{private['id']}").status_code == 404
        assert owner.get(f"/v1/studies/{alone['id']}").status_code == 404


def test_sharing_opens_and_closes_a_job(company: Company) -> None:
    """A job that is shared with all is read by all and changed by none of them; its team is one of the sender's."""
    study = company.own(stored_study(company.server.store))
    path = f"/v1/studies/{study.id}"
    with company.http("owner") as owner, company.http("stranger") as stranger:
        assert stranger.get(path).status_code == 404
        assert owner.put(f"{path}/sharing", json={"sharing": "all"}).json()["sharing"] == "all"
        assert stranger.get(path).status_code == 200
        refused = stranger.post(f"{path}:cancel")
        assert (refused.status_code, "only its owner and administrators" in refused.text) == (403, True)
        for body, field in (
            ({"sharing": "x"}, "sharing"),
            ({"sharing": "team", "team": "blue"}, "team"),
            ({}, "sharing"),
        ):
            answer = owner.put(f"{path}/sharing", json=body)
            assert (answer.status_code, answer.json()["problems"][0]["field"]) == (422, field), body
        assert owner.put(f"{path}/sharing", json={"sharing": "private"}).json()["team"] == "red"
        assert stranger.get(path).status_code == 404
    entries = company.accounts.audit(target=f"job {study.id}")
    assert [entry.action for entry in entries] == ["job.share", "job.share"]
    assert entries[0].before == {"team": "red", "sharing": "team"}
    assert entries[1].after == {"team": "red", "sharing": "private"}
    assert entries[0].user == "owner"
    assert entries[0].origin == "127.0.0.1"


def test_only_administrators_take_jobs_out_of_teams(company: Company) -> None:
    """A job without a team has no quotas, so that neither its owner nor a team's administrator may make it one."""
    study = company.own(stored_study(company.server.store))
    path, body = f"/v1/studies/{study.id}/sharing", {"sharing": "team", "team": None}
    for user in ("owner", "manager"):
        with company.http(user) as http:
            (problem,) = http.put(path, json=body).json()["problems"]
        assert problem["field"] == "team"
        assert "only an administrator of the server can take a job out of its team" in problem["message"]
    assert company.server.store.job(study.id).team == "red"
    with company.http("root") as root:
        assert root.put(path, json=body).json()["team"] is None
    with company.http("owner") as owner:
        assert owner.put(path, json=body).status_code == 200, "it has no team already"
        assert owner.put(path, json={"sharing": "team", "team": "red"}).json()["team"] == "red"


def test_members_submit_no_job_without_a_team(company: Company) -> None:
    """Whatever a member names as the team, the job is in a team of the member, or is refused."""
    with company.http("owner") as owner:
        assert owner.post("/v1/studies", json=document()).json()["team"] == "red"
        for team in ("", "null", "none"):
            assert owner.post(f"/v1/studies?team={team}", json=document()).status_code == 422, team
    assert {job.team for job in company.server.store.jobs()} == {"red"}


def test_viewers_submit_no_job(company: Company) -> None:
    """A viewer of a team cannot submit a job without a team either, which would have no quotas."""
    with company.http("viewer") as viewer:
        for team in ("", "?team=red"):
            (problem,) = viewer.post(f"/v1/studies{team}", json=document()).json()["problems"]
            assert problem["field"] == "team", team
        assert viewer.post("/v1/studies", json=document()).json()["problems"][0]["message"] == (
            "is missing; you are only a viewer of red, and members and administrators of a team submit jobs"
        )
    assert company.server.store.jobs() == ()


@pytest.mark.parametrize("change", ["leaves", "is disabled", "team removed"])
def test_rights_are_those_of_when_a_job_is_stored(
    company: Company, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """The checks of a job take time, in which its sender may leave the team, or the team may be removed."""
    preflight = company.server.preflight
    accept = preflight.accept

    async def slow(*arguments: Any, **options: Any) -> Accepted:
        accepted = await accept(*arguments, **options)
        if change == "leaves":
            company.accounts.set_role("red", "owner", None, actor=OPERATOR)
        elif change == "is disabled":
            company.accounts.change_user("owner", is_disabled=True, actor=OPERATOR)
        else:
            company.accounts.remove_team("red", actor=OPERATOR)
        return accepted

    monkeypatch.setattr(preflight, "accept", slow)
    with company.http("owner") as owner:
        (problem,) = owner.post("/v1/studies", json=document()).json()["problems"]
    assert problem["field"] == "team"
    assert "disabled or removed from the team while the job was checked" in problem["message"]
    assert company.server.store.jobs() == ()


@pytest.mark.parametrize("role", [None, Role.VIEWER])
def test_who_leaves_a_team_steers_its_jobs_no_more(company: Company, role: Role | None) -> None:
    """The work on a job uses its team's quotas, so that an owner who has left the team may only read the job."""
    study = company.finished()
    company.accounts.set_role("red", "owner", role, actor=OPERATOR)
    company.server.app.state.services.authenticator.forget()
    path = f"/v1/studies/{study.id}"
    with company.http("owner") as owner, company.http("manager") as manager:
        assert owner.get(path).json()["rights"] == []
        assert owner.get(f"{path}/trials").status_code == 200
        assert study.id in [each["id"] for each in owner.get("/v1/studies").json()["studies"]]
        for answer in (
            owner.post(f"{path}:resume"),
            owner.patch(path, json={"notes": "mine"}, headers={"If-Match": "*"}),
            owner.put(f"{path}/sharing", json={"sharing": "private"}),
            owner.delete(path),
            owner.post(f"{path}/trials/1:serve"),
            owner.post(f"{path}/exports", json={"trial": 1, "dtype": "float32"}),
        ):
            assert answer.status_code == 403, answer.request.url
            assert "belongs to team red, for which you may no longer submit jobs" in answer.json()["detail"]
        assert manager.patch(path, json={"notes": "ours"}, headers={"If-Match": "*"}).status_code == 200
    company.accounts.set_role("red", "owner", Role.MEMBER, actor=OPERATOR)
    company.server.app.state.services.authenticator.forget()
    with company.http("owner") as owner:
        assert owner.get(path).json()["rights"] == ["use", "change"]


def test_idempotency_keys_are_of_a_user(company: Company) -> None:
    """The same key of two users makes two jobs; a user's second request gets the job of the first."""
    key = {"Idempotency-Key": "nightly"}
    with company.http("member") as member, company.http("stranger") as stranger:
        first = member.post("/v1/studies", json=document(), headers=key)
        again = member.post("/v1/studies", json=document(), headers=key)
        other = stranger.post("/v1/studies", json=document("other"), headers=key)
    assert [answer.status_code for answer in (first, again, other)] == [201, 200, 201]
    assert again.json()["id"] == first.json()["id"] != other.json()["id"]


@pytest.mark.slow
def test_another_study_is_read_by_right(company: Company) -> None:
    """A study may name one that its sender may read; another team's is refused as an unknown id is."""
    study = company.finished()
    context = RequestContext(store_url=company.server.store.url, data_dir=company.server.data_dir)

    def refusal(user: str, named: str) -> str:
        request = document()
        request["models"]["experts"]["merged"] = {"from_study": {"id": named}}
        account = company.accounts.user(user).account
        with pytest.raises(InvalidStudy) as refused:  # the stored study has made-up models, which nobody can merge
            accept(request, replace(context, reader=account))
        return str(refused.value).replace(named, "ID")

    unknown = refusal("stranger", "0" * 32)
    assert "study 'ID': there is no such study" in unknown
    assert company.server.store.place not in unknown
    for user, may_read in (("stranger", False), ("loner", False), ("viewer", True), ("owner", True), ("root", True)):
        assert (refusal(user, study.id) != unknown) is may_read, user


def test_drivers_read_with_the_owners_rights(company: Company) -> None:
    """A driver opens other studies with the present rights of its job's owner."""
    study, store = company.finished(), company.server.store
    for owner, may_read in (("stranger", False), ("viewer", True), (None, True)):
        reader = company.accounts.account_of(replace(study, owner=owner))
        open_study = on_server(store, reader=reader)
        if may_read:
            with open_study(AnotherStudy(id=study.id)) as (_, record):
                assert record.id == study.id
        else:
            with pytest.raises(NotFound, match="no such study"), open_study(AnotherStudy(id=study.id)):
                pass


def test_users_may_not_name_the_servers_files(tmp_path: Path) -> None:
    """For users, the data directory is closed, whatever the operator allows; without accounts it is as before."""
    preflight = PreflightProcess(RequestContext(FileAccess((str(tmp_path),)), "sqlite:///x", tmp_path))
    for reader, is_closed in ((None, False), (Account("eve", is_admin=True), True)):
        context = preflight._context_of(reader)
        assert context.access is not None
        assert (context.access.refusal(tmp_path / "exports" / "x") is not None) is is_closed
        assert context.reader == reader


def test_a_token_is_shown_once(company: Company) -> None:
    """The response that creates a token has it, and no other response has."""
    with company.http("owner") as owner, company.http("root") as root:
        created = owner.post("/v1/tokens", json={"name": "ci", "scope": "read", "expires_in_days": 1})
        assert created.status_code == 201
        secret = created.json()["token"]
        assert owner.get("/v1/studies", headers=bearer(secret)).status_code == 200
        shown = [http.get(path).text for http in (owner, root) for path in ("/v1/me", "/v1/tokens")]
        shown += [root.get(path).text for path in ("/v1/audit", "/v1/users", "/metrics")]
        assert not any(secret in text for text in shown)
        assert secret[:10] in shown[1]
        assert owner.post("/v1/tokens", json={"name": "x", "user": "member"}).status_code == 403
        assert owner.get("/v1/tokens?user=member").status_code == 403
        wrong = owner.post("/v1/tokens", json={"name": "A b", "scope": "all", "expires_in_days": 0, "more": 1})
        assert {problem["field"] for problem in wrong.json()["problems"]} == {
            "name",
            "scope",
            "expires_in_days",
            "more",
        }


def test_administrators_manage_users_and_teams(company: Company) -> None:
    """Administrators add and disable users; the last one stays; administrators of a team set its members."""
    with company.http("root") as root, company.http("manager") as manager, company.http("owner") as owner:
        assert root.post("/v1/users", json={"name": "zoe"}).status_code == 201
        assert root.post("/v1/users", json={"name": "zoe"}).status_code == 409
        last = root.patch("/v1/users/root", json={"is_admin": False})
        assert (last.status_code, "is the last administrator" in last.json()["detail"]) == (409, True)
        assert manager.put("/v1/teams/red/members/zoe", json={"role": "viewer"}).json()["members"]["zoe"] == "viewer"
        assert manager.put("/v1/teams/red/members/nobody", json={"role": "viewer"}).status_code == 404
        assert [team["name"] for team in manager.get("/v1/teams").json()["teams"]] == ["red"]
        assert manager.delete("/v1/teams/red/members/zoe").json()["members"].keys() == {
            "owner",
            "viewer",
            "member",
            "manager",
        }
        assert root.patch("/v1/users/owner", json={"is_disabled": True}).json()["is_disabled"] is True
        assert owner.get("/v1/me").status_code == 401
        actions = [entry["action"] for entry in root.get("/v1/audit?user=manager").json()["entries"]]
    assert actions == ["team.change", "team.change"]


def test_a_refused_change_of_a_user_changes_nothing(company: Company) -> None:
    """An administrator who cannot be demoted is not unbound from an identity by the same request."""
    company.accounts.bind_identity("root", "https://login.example.org 1", actor=OPERATOR)
    with company.http("root") as root:
        assert root.patch("/v1/users/root", json={"identity": None, "is_admin": False}).status_code == 409
        assert company.accounts.user("root").identity == "https://login.example.org 1"
        assert "user.unbind" not in [entry.action for entry in company.accounts.audit()]
        assert root.patch("/v1/users/root", json={"identity": None, "is_admin": True}).status_code == 200
    assert company.accounts.user("root").identity is None


def test_changes_of_jobs_are_in_the_audit_log(company: Company) -> None:
    """Each change of a job has an entry: who, with which token, from where, and the state before and after."""
    with company.http("owner", Scope.SUBMIT) as owner:
        job = owner.post("/v1/studies", json=document("audited")).json()
        owner.post(f"/v1/studies/{job['id']}:cancel")
        owner.delete(f"/v1/studies/{job['id']}")
    found = company.accounts.audit(target=f"job {job['id']}")
    described = {"kind": "search", "name": "audited"}
    assert [(entry.action, entry.before, entry.after) for entry in found] == [
        ("job.create", None, {**described, "state": "CREATED"}),
        ("job.cancel", {**described, "state": "CREATED"}, {**described, "state": "CANCELLED"}),
        ("job.delete", {**described, "state": "CANCELLED"}, None),
    ]
    assert {entry.token for entry in found} == {company.tokens["owner", Scope.SUBMIT][:10]}


def test_every_response_has_secure_headers(company: Company, http: httpx.Client) -> None:
    study = company.own(finished_study(company.server.store, num_trials=5))
    with company.http("owner") as owner:
        for answer in (
            http.get("/healthz"),
            http.get("/v1/studies"),
            owner.get("/v1/studies"),
            http.get("/none"),
            owner.get(f"/v1/studies/{study.id}/report"),
            http.get("/docs"),
        ):
            assert {name.lower() for name in HEADERS} <= set(answer.headers)
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "strict-transport-security" not in answer.headers
        assert "sandbox" in owner.get(f"/v1/studies/{study.id}/report").headers["content-security-policy"]


def test_too_many_requests_are_refused(tmp_path: Path) -> None:
    """A token has a burst and a rate; requests without a valid token have a limit of their address."""
    rates = RateLimits(tokens=Rate(5.0, 10), refused=Rate(0.5, 3))
    with ApiServer(tmp_path, rates=rates) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        company = Company.on(server)
        with company.http("owner") as owner, company.http("member") as member:
            answers = [owner.get("/v1/me") for _ in range(15)]
            assert [answer.status_code for answer in answers[:10]] == [200] * 10
            assert answers[-1].status_code == 429
            assert int(answers[-1].headers["retry-after"]) == 1
            assert member.get("/v1/me").status_code == 200
            time.sleep(0.3)
            assert owner.get("/v1/me").status_code == 200
        statuses = [http.get("/v1/me").status_code for _ in range(5)]
        assert statuses == [401, 401, 401, 429, 429]
        assert http.get("/healthz").status_code == 200


def test_metrics_are_for_administrators(company: Company, http: httpx.Client) -> None:
    """The metrics name all jobs: administrators may read them, or everybody if the operator says so."""
    assert http.get("/metrics").status_code == 401
    with company.http("root", Scope.READ) as root, company.http("owner") as owner:
        assert owner.get("/metrics").status_code == 403
        assert "mergesearch_" in root.get("/metrics").text
    with ApiServer(company.server.data_dir, has_open_metrics=True) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert httpx.get(f"{server.url}/v1/studies").status_code == 401


def test_last_uses_are_stored(server: ApiServer, company: Company) -> None:
    with company.http("owner", Scope.READ) as owner:
        owner.get("/v1/me")
    server.app.state.services.authenticator.store_uses()
    used = [token.name for token in company.accounts.tokens("owner") if token.last_used_at is not None]
    assert used == ["owner-read"]


def test_planted_secrets_are_shown_nowhere(
    server: ApiServer, company: Company, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tokens in requests, valid or not, are in no log, response, event, report, file or table of the server."""
    caplog.set_level(logging.DEBUG)
    json_lines = logging.StreamHandler(io.StringIO())
    json_lines.setFormatter(JsonLines())
    logging.getLogger().addHandler(json_lines)
    wrong = "mst_" + "w" * 43
    planted = [*company.tokens.values(), company.expired, wrong]
    study = company.own(finished_study(server.store, num_trials=5))
    shown = []
    for secret in planted:
        with httpx.Client(base_url=server.url, headers=bearer(secret), timeout=60) as http:
            for path in ("summary", "report", "log", "pareto", "trials", "none"):
                shown.append(http.get(f"/v1/studies/{study.id}/{path}").text)
            events = {"Accept": "application/json"}
            shown.append(http.get(f"/v1/studies/{study.id}/events", headers=events).text)
            shown += [http.get(path).text for path in ("/v1/me", "/v1/tokens", "/v1/audit", "/v1/users", "/metrics")]
            shown.append(http.post("/v1/studies", content=b"{", headers={"Content-Type": "application/json"}).text)
            shown.append(http.post("/v1/tokens", json={"name": secret}).text if secret == wrong else "")
    server.app.state.services.authenticator.store_uses()
    logging.getLogger().removeHandler(json_lines)
    captured = capfd.readouterr()
    shown += [captured.out, captured.err, caplog.text, json_lines.stream.getvalue()]
    assert json.loads(json_lines.stream.getvalue().splitlines()[0])["logger"]
    shown += [json.dumps([str(entry) for entry in company.accounts.audit()])]
    with sqlite3.connect(server.data_dir / "mergesearch.db") as connection:
        shown += connection.iterdump()
    files = [file.read_bytes() for file in server.data_dir.rglob("*") if file.is_file()]
    assert len(files) > 1
    for secret in planted:
        assert not any(secret in text for text in shown)
        assert not any(secret.encode() in content for content in files)
        assert any(secret[:10] in text for text in shown) or secret == wrong


def test_only_administrators_put_jobs_first(company: Company) -> None:
    """The owner of a job may let it wait longer than others, not shorter."""
    path = f"/v1/studies/{company.own(stored_study(company.server.store)).id}"
    headers = {"If-Match": "*"}
    with company.http("owner") as owner, company.http("root") as root:
        refused = owner.patch(path, json={"priority": 1}, headers=headers)
        assert (refused.status_code, refused.json()["detail"]) == (
            403,
            "priority: 1 is above 0, which only an administrator of the server may give",
        )
        assert owner.patch(path, json={"priority": -1}, headers=headers).json()["priority"] == -1
        assert root.patch(path, json={"priority": 1}, headers=headers).json()["priority"] == 1
