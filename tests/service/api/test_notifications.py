"""Routes of webhooks and e-mail addresses: permissions, refused values, and sent messages."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from standardwebhooks import Webhook

from service.cli.main import NOTICES
from service.notifications.settings import MailSettings, NotificationSettings
from service.schemas.api import NoticeName
from service.store.accounts import AccountStore
from service.types import JobState, NoticeKind, Scope
from tests.service.api.accounts import Company
from tests.service.api.harness import ApiServer, finished_study, stored_study
from tests.service.notifications.receiver import receiver, wait_until

PASSWORD = "planted-password"
MAIL = MailSettings("127.0.0.1", 9, "server@example.org", requires_tls=False, user="u", password=PASSWORD)
SETTINGS = NotificationSettings(frozenset({"127.0.0.1"}), mail=MAIL)
URL = "https://ci.example.org/mergesearch"


@pytest.fixture
def server(tmp_path: Path, database: str) -> Iterator[ApiServer]:
    with ApiServer(tmp_path, database=database, notifications=SETTINGS) as server:
        yield server


@pytest.fixture
def company(server: ApiServer) -> Company:
    return Company.on(server)


@pytest.fixture(scope="module")
def open_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server without accounts and webhooks, which no test changes."""
    with (
        ApiServer(tmp_path_factory.mktemp("open")) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def owner_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the user "owner" of a server with a mail server, which no test changes."""
    with (
        ApiServer(tmp_path_factory.mktemp("staffed"), notifications=SETTINGS) as server,
        Company.on(server).http("owner") as owner,
    ):
        yield owner


def problems_of(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    return {problem["field"]: problem["message"] for problem in answer.json()["problems"]}


def test_without_accounts_a_webhook_covers_all_jobs(server: ApiServer, http: httpx.Client) -> None:
    """A webhook of a server without accounts is nobody's, and receives the end of every job, once."""
    with receiver() as target:
        added = http.post("/v1/webhooks", json={"url": target.url(), "events": ["failed", "complete"]})
        assert added.status_code == 201
        hook = added.json()
        shown = {key: hook[key] for key in ("owner", "covers", "team", "events", "disabled_at")}
        expected = {"owner": None, "covers": "all", "team": None, "events": ["complete", "failed"], "disabled_at": None}
        assert shown == expected
        assert http.get("/v1/webhooks").json() == {
            "webhooks": [{key: value for key, value in hook.items() if key != "secret"}]
        }
        study = finished_study(server.store, num_trials=5)
        (received,) = target.wait()
        Webhook(hook["secret"]).verify(received.body, received.headers)
        assert received.document["data"]["id"] == study.id
        path = f"/v1/webhooks/{hook['id']}/deliveries"
        wait_until(lambda: http.get(path).json()["deliveries"][0]["state"] == "DELIVERED")
        (delivery,) = http.get(path).json()["deliveries"]
        assert delivery["id"] == received.headers["webhook-id"]
        assert (delivery["event"], delivery["job"], delivery["status"]) == ("job.complete", study.id, 204)
        assert http.delete(f"/v1/webhooks/{hook['id']}").json() == {"deleted": hook["id"]}
        assert http.get("/v1/webhooks").json() == {"webhooks": []}
        assert http.get(path).status_code == 404


def test_a_test_is_sent_and_its_outcome_shown(http: httpx.Client) -> None:
    """A test is sent once; the list of deliveries says whether it arrived, and why not."""
    with receiver(statuses=[503], content=b"closed") as target:
        hook = http.post("/v1/webhooks", json={"url": target.url()}).json()
        path = f"/v1/webhooks/{hook['id']}"
        for state, error in (("FAILED", "status 503; the response begins with 'closed'"), ("DELIVERED", None)):
            sent = http.post(f"{path}:test")
            assert sent.status_code == 202
            wait_until(lambda: http.get(f"{path}/deliveries").json()["deliveries"][0]["state"] != "WAITING")
            found = http.get(f"{path}/deliveries", params={"limit": 1}).json()["deliveries"]
            assert [(each["id"], each["event"], each["job"]) for each in found] == [(sent.json()["id"], "test", None)]
            assert (found[0]["state"], found[0]["attempts"], found[0]["error"]) == (state, 1, error)
        assert [each.document["type"] for each in target.received] == ["test", "test"]
    assert http.post(f"/v1/webhooks/{'0' * 32}:test").status_code == 404


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({}, "url", "field required"),
        ({"url": ""}, "url", "string should have at least 1 character"),
        (
            {"url": "http://ci.example.org/"},
            "url",
            "'http://ci.example.org/' is not https; only hosts that the operator",
        ),
        ({"url": "https://10.0.0.1/"}, "url", "10.0.0.1 is not a public address; the operator can allow the host"),
        ({"url": "https://[::ffff:a00:1]/"}, "url", "10.0.0.1 is not a public address"),
        ({"url": "file:///etc/passwd"}, "url", "is not a URL of a webhook; give one such as https://"),
        ({"url": URL, "events": []}, "events", "list should have at least 1 item"),
        ({"url": URL, "events": ["done"]}, "events.0", "input should be 'complete', 'failed'"),
        ({"url": URL, "covers": "some"}, "covers", "input should be 'own', 'team' or 'all'"),
        ({"url": URL, "covers": "own"}, "covers", "'own' is not accepted: the server has no accounts"),
        ({"url": URL, "team": "red"}, "team", "is not accepted: the server has no accounts"),
        ({"url": URL, "secret": "whsec_x"}, "secret", "extra inputs are not permitted"),
    ],
)
def test_each_wrong_field_is_named(open_http: httpx.Client, body: dict[str, Any], field: str, message: str) -> None:
    """A webhook with a wrong field is refused with the field and what is accepted."""
    found = problems_of(open_http.post("/v1/webhooks", json=body))
    assert message in found[field]
    assert open_http.get("/v1/webhooks").json() == {"webhooks": []}


def test_who_may_have_which_webhook(company: Company) -> None:
    """Users have webhooks for their jobs, administrators of a team for the team's, those of the server for all."""
    answers: dict[tuple[str, str], int] = {}
    for user in ("owner", "manager", "stranger", "root"):
        with company.http(user, Scope.SUBMIT if user != "root" else Scope.ADMIN) as http:
            for name, body in (("own", {}), ("red", {"team": "red"}), ("all", {"covers": "all"})):
                answers[user, name] = http.post("/v1/webhooks", json={"url": URL, **body}).status_code
    assert answers == {
        ("owner", "own"): 201,
        ("owner", "red"): 403,
        ("owner", "all"): 403,
        ("manager", "own"): 201,
        ("manager", "red"): 201,
        ("manager", "all"): 403,
        ("stranger", "own"): 201,
        ("stranger", "red"): 404,
        ("stranger", "all"): 403,
        ("root", "own"): 201,
        ("root", "red"): 201,
        ("root", "all"): 201,
    }
    with company.http("owner") as http:
        (hook,) = http.get("/v1/webhooks").json()["webhooks"]
        assert (hook["owner"], hook["covers"], hook["team"]) == ("owner", "own", None)
        body = {"url": URL, "covers": "team"}
        assert problems_of(http.post("/v1/webhooks", json=body)) == {"team": "is missing"}
        body = {"url": URL, "covers": "own", "team": "red"}
        assert "is not accepted with covers='own'" in problems_of(http.post("/v1/webhooks", json=body))["team"]
    with company.http("root") as http:
        assert len(http.get("/v1/webhooks").json()["webhooks"]) == 7
        assert http.post("/v1/webhooks", json={"url": URL, "team": "none"}).status_code == 404
        assert http.delete(f"/v1/webhooks/{hook['id']}").status_code == 200
    with company.http("owner", Scope.READ) as http:
        assert http.post("/v1/webhooks", json={"url": URL}).status_code == 403


def test_only_own_jobs_are_sent(server: ApiServer, company: Company) -> None:
    """A user's webhook receives the user's jobs, and not those of others in the same team."""
    with receiver() as target, company.http("member") as member, company.http("owner") as owner:
        for http, path in ((member, "/member"), (owner, "/owner")):
            assert http.post("/v1/webhooks", json={"url": target.url(path=path)}).status_code == 201
        job = company.own(stored_study(server.store))
        server.store.open_attempt(job.id).set_state(JobState.FAILED, "no engine")
        target.wait()
        wait_until(lambda: not server.app.state.services.notifications.expand(lambda *_: "{}"))
    assert [(each.path, each.document["data"]["owner"]) for each in target.received] == [("/owner", "owner")]


def test_users_set_their_addresses(company: Company) -> None:
    """Users set, show and remove their own address; administrators those of all; nobody else."""
    with company.http("owner", Scope.SUBMIT) as owner, company.http("root") as root, company.http("member") as member:
        nothing: dict[str, Any] = {
            "user": "owner",
            "address": None,
            "events": [],
            "disabled_at": None,
            "disabled_reason": None,
        }
        path = "/v1/users/owner/mail"
        assert owner.get(path).json() == nothing
        body = {"address": "owner@example.org", "events": ["failed"]}
        found = {**nothing, **body}
        assert owner.put(path, json=body).json() == found
        assert root.get(path).json() == owner.get(path).json() == found
        assert root.put(path, json={"address": "o@example.org"}).json()["events"] == ["complete", "failed", "waiting"]
        assert owner.delete(path).json() == nothing
        for method in ("GET", "PUT", "DELETE"):
            assert member.request(method, path).status_code == 404
        assert root.get("/v1/users/none/mail").status_code == 404
    actions = [(entry.user, entry.action, entry.target) for entry in company.accounts.audit()]
    changes = [(user, "mail.change", "user owner") for user in ("owner", "root", "owner")]
    assert [entry for entry in actions if entry[1] == "mail.change"] == changes


@pytest.mark.parametrize(
    "address",
    [
        "",
        "ann",
        "ann@",
        "@example.org",
        "ann@example.org\r\nBcc: all@example.org",
        "ann@example.org\n",
        "ann@example.org, bob@example.org",
        "Ann <ann@example.org>",
        "ann bob@example.org",
        "änn@example.org",
        f"{'a' * 65}@example.org",
        "ann@exa_mple.org",
    ],
)
def test_what_is_no_address_is_refused(owner_http: httpx.Client, address: str) -> None:
    """An address that could add a header or another receiver is refused, with the field."""
    found = problems_of(owner_http.put("/v1/users/owner/mail", json={"address": address}))
    assert set(found) == {"address"}
    assert owner_http.get("/v1/users/owner/mail").json()["address"] is None


def test_without_a_mail_server_no_address_is_taken(tmp_path: Path) -> None:
    """A server that sends no mails says so; one without accounts has no users with addresses."""
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.get("/v1/users/ann/mail").status_code == 404
        Company.on(server)
    with ApiServer(tmp_path) as server:
        company = Company(server, AccountStore(server.store))
        company.tokens["owner", Scope.ADMIN] = company.add_token("owner", Scope.ADMIN)
        with company.http("owner") as owner:
            answer = owner.put("/v1/users/owner/mail", json={"address": "owner@example.org"})
        assert (answer.status_code, "its operator can name a mail server (--smtp-url)" in answer.text) == (409, True)


def test_webhooks_of_nobody_end_with_accounts(server: ApiServer, http: httpx.Client) -> None:
    """A webhook from before the first user receives nothing once the server has accounts; administrators remove it."""
    with receiver() as target:
        hook = http.post("/v1/webhooks", json={"url": target.url()}).json()
        company = Company.on(server)
        finished_study(server.store, num_trials=5)
        company.own(stored_study(server.store))
        notifications = server.app.state.services.notifications
        wait_until(lambda: not notifications.expand(lambda *_: "{}"))
        wait_until(lambda: not notifications.deliveries(hook["id"], limit=1))
        assert target.received == []
        with company.http("owner") as owner, company.http("root") as root:
            wait_until(lambda: http.get("/v1/webhooks").status_code == 401)  # the server knows that it has accounts
            assert owner.delete(f"/v1/webhooks/{hook['id']}").status_code == 404
            assert root.delete(f"/v1/webhooks/{hook['id']}").status_code == 200


def test_planted_secrets_of_notifications(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Secrets of webhooks and the mail server's password are in no log, answer, event, report or audit entry.

    Only the table of subscriptions has the secret, as it is needed to sign.
    """
    caplog.set_level(logging.DEBUG)
    with ApiServer(tmp_path, notifications=SETTINGS) as server, receiver(statuses=[500, 410]) as target:
        company = Company.on(server)
        shown: list[str] = []
        with company.http("owner") as owner, company.http("root") as root:
            hook = owner.post("/v1/webhooks", json={"url": target.url(path="/planted-path")}).json()
            secret = hook["secret"]
            assert owner.put("/v1/users/owner/mail", json={"address": "o@example.org"}).status_code == 200
            study = company.own(finished_study(server.store, num_trials=5))
            server.store.open_attempt(study.id).set_state(JobState.FAILED, "no engine")
            target.wait()
            mail = server.app.state.services.notifications.mail("owner")
            wait_until(lambda: server.app.state.services.notifications.deliveries(mail.id, limit=1)[0].error)
            hooks = f"/v1/webhooks/{hook['id']}"
            owner.post(f"{hooks}:test")
            for http in (owner, root):
                for path in ("summary", "report", "pareto", "log"):
                    shown.append(http.get(f"/v1/studies/{study.id}/{path}").text)
                shown.append(http.get(f"/v1/studies/{study.id}/events", headers={"Accept": "application/json"}).text)
                shown += [
                    http.get(path).text for path in (f"{hooks}/deliveries", "/v1/webhooks", "/v1/users/owner/mail")
                ]
                shown += [
                    http.get(path).text for path in ("/v1/audit", "/v1/users", "/v1/me", "/metrics", "/openapi.json")
                ]
            shown += [json.dumps(received.document) for received in target.received]
            shown.append(owner.delete(hooks).text)
        captured = capfd.readouterr()
        logs = [captured.out, captured.err, caplog.text, json.dumps([str(entry) for entry in company.accounts.audit()])]
        assert repr(server.app.state.services.notifier.settings).count(PASSWORD) == 0
        with sqlite3.connect(server.data_dir / "mergesearch.db") as connection:
            dump = list(connection.iterdump())
        for planted in (secret, PASSWORD, secret.removeprefix("whsec_")):
            assert not any(planted in text for text in [*shown, *logs, *dump])
        assert not any("planted-path" in text for text in logs)
        assert any("planted-path" in text for text in shown)


def test_events_have_the_names_of_notices() -> None:
    """The names in the API and in the command are those of the kinds of notices."""
    assert list(get_args(NoticeName)) == list(NOTICES) == [kind.value for kind in NoticeKind]
