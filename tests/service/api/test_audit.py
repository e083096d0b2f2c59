"""A change and its entry in the audit log are stored together: without room for the entry, nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from service.store import Store, schema
from service.store.accounts import AccountStore
from service.store.connection import transaction
from service.store.steering import SteeringStore
from service.types import JobRecord, Sharing, Steering, TrialState
from tests.service.api.accounts import Company
from tests.service.api.harness import ApiServer, document, finished_study, stored_study
from tests.service.api.test_benchmarks import sums

# Tables that the server changes beside requests.
BY_THE_WAY = ("commit_tokens", "deliveries", "notices", "sessions", "tokens", "waits")

REFUSE = "CREATE TRIGGER no_room BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'no room'); END"

Send = Callable[[httpx.Client, Store, JobRecord], httpx.Response]


def edit(http: httpx.Client, _: Store, study: JobRecord) -> httpx.Response:
    return http.patch(f"/v1/studies/{study.id}", json={"notes": "new"}, headers={"If-Match": "*"})


def evaluate(http: httpx.Client, store: Store, study: JobRecord) -> httpx.Response:
    number = next(trial.number for trial in store.trials(study.id, state=TrialState.PRUNED))
    return http.post(f"/v1/studies/{study.id}/trials/{number}:evaluate")


def export(http: httpx.Client, _: Store, study: JobRecord) -> httpx.Response:
    return http.post(f"/v1/studies/{study.id}/exports", json={"trial": 3, "dtype": "float32"})


def post(path: str, body: Mapping[str, Any] | None = None) -> Send:
    return lambda http, _, study: http.post(f"/v1/studies/{study.id}{path}", json=body)


def put(path: str, body: Mapping[str, Any]) -> Send:
    return lambda http, _, study: http.put(f"/v1/studies/{study.id}{path}", json=body)


OF_RUNNING: dict[str, Send] = {
    "job.create": lambda http, _, study: http.post("/v1/studies", json=document("another")),
    "job.pause": post(":pause"),
    "job.stop": post(":stop"),
    "job.cancel": post(":cancel"),
    "job.resume": post(":resume"),
    "job.edit": edit,
    "job.share": put("/sharing", {"sharing": "all"}),
}
OF_COMPLETE: dict[str, Send] = {
    "job.delete": lambda http, _, study: http.delete(f"/v1/studies/{study.id}"),
    "job.create": lambda http, _, study: http.post("/v1/served", json={"study": study.id}),
    "job.create by :serve": post("/trials/3:serve"),
    "job.add_benchmarks": post("/benchmarks", {"benchmarks": [sums()]}),
    "export.create": export,
    "trial.enqueue": post("/trials", {"label": "by hand", "configuration": {"x": 0.5}}),
    "trial.validity": put("/trials/3/validity", {"is_valid": False, "reason": "why"}),
    "trial.evaluate": evaluate,
}


def rows(store: Store) -> dict[str, list[Any]]:
    tables = [table for table in schema.metadata.sorted_tables if table.name not in BY_THE_WAY]
    with store.reading() as connection:
        return {table.name: sorted(map(str, connection.execute(sa.select(table)))) for table in tables}


def check(server: ApiServer, study: JobRecord, action: str, send: Send) -> None:
    company = Company.on(server)
    company.own(study)
    store, accounts = server.store, AccountStore(server.store)
    before, num_entries = rows(store), len(accounts.audit())
    with transaction(store.engine) as connection:
        connection.exec_driver_sql(REFUSE)
    with company.http("root") as http:
        assert send(http, store, study).status_code == 503
        assert rows(store) == before
        with transaction(store.engine) as connection:
            connection.exec_driver_sql("DROP TRIGGER no_room")
        answer = send(http, store, study)
        assert answer.is_success, answer.text
    (entry,) = accounts.audit()[num_entries:]
    assert entry.action == action.partition(" ")[0]
    assert rows(store) != before


@pytest.mark.parametrize("action", OF_RUNNING)
def test_a_change_of_a_job_needs_its_audit_entry(server: ApiServer, action: str) -> None:
    """Requests about an unfinished study store nothing if the audit log refuses the entry, and later both."""
    study = stored_study(server.store)
    if action == "job.resume":
        SteeringStore(server.store).pause(study.id, steering=Steering("pause", "owner"))
    check(server, study, action, OF_RUNNING[action])


@pytest.mark.parametrize("action", OF_COMPLETE)
def test_a_change_of_a_result_needs_its_audit_entry(server: ApiServer, action: str) -> None:
    """Requests about a COMPLETE study store nothing if the audit log refuses the entry, and later both."""
    check(server, finished_study(server.store), action, OF_COMPLETE[action])


def test_deleting_an_export_needs_its_audit_entry(server: ApiServer) -> None:
    """The export and its record stay if the audit log refuses the entry."""
    study = finished_study(server.store)
    company = Company.on(server)
    record = company.exported(study)

    def send(http: httpx.Client, _: Store, study: JobRecord) -> httpx.Response:
        return http.delete(f"/v1/studies/{study.id}/exports/{record.id}")

    with transaction(server.store.engine) as connection:
        connection.exec_driver_sql(REFUSE)
    before = rows(server.store)
    with company.http("root") as http:
        assert send(http, server.store, study).status_code == 503
    assert rows(server.store) == before
    assert server.app.state.services.exports.files(record) is not None


def test_a_study_is_shared_with_what_serves_it(server: ApiServer) -> None:
    """If the second of two changes of sharing fails, the first is not stored either."""
    company = Company.on(server)
    study = company.own(finished_study(server.store))
    with company.http("owner") as http:
        served = http.post("/v1/served", json={"study": study.id}).json()["id"]
        with transaction(server.store.engine) as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER no_room BEFORE INSERT ON audit WHEN new.target = 'job " + served + "' "
                "BEGIN SELECT RAISE(ABORT, 'no room'); END"
            )
        assert http.put(f"/v1/studies/{study.id}/sharing", json={"sharing": "all"}).status_code == 503
    assert [server.store.job(each).sharing for each in (study.id, served)] == [Sharing.TEAM, Sharing.TEAM]
    assert company.accounts.audit(target=f"job {study.id}", user="owner") == ()
