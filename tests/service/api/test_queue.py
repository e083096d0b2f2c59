"""The queue over HTTP: its content for each reader, moves, and the weights, quotas and usage of teams."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from service.api.export_queue import export_id
from service.api.problems import Refusal
from service.cluster.queue import Choice, Reason, Waiting
from service.cluster.reconciler import QueueState
from service.disk import artifacts_dir
from service.jobs.base import Accepted, JobKind
from service.store.artifacts import ArtifactStore
from service.store.exports import ExportStore
from service.types import Account, ExportRecord, ExportState, JobRecord, JobState, Role, Scope, Sharing
from tests.service.api.accounts import OPERATOR, Company
from tests.service.api.harness import ApiServer, QuickPreflight, document, finetuning, stored_study

LIMITS = {
    "weight": 1.0,
    "max_running": None,
    "max_replicas": None,
    "max_served": 4,
    "gpu_hours": None,
    "artifact_bytes": None,
    "export_bytes": None,
    "requests_per_minute": None,
}


@pytest.fixture
def company(server: ApiServer) -> Company:
    return Company.on(server)


@pytest.fixture
def queued(company: Company) -> dict[str, JobRecord]:
    """Jobs of two teams: `runs` and `mine` are of red, `theirs`, `secret` and `open` of blue; all but one wait."""
    places = {
        "runs": ("owner", "red", Sharing.TEAM),
        "theirs": ("stranger", "blue", Sharing.TEAM),
        "mine": ("owner", "red", Sharing.TEAM),
        "secret": ("stranger", "blue", Sharing.PRIVATE),
        "open": ("stranger", "blue", Sharing.ALL),
    }
    jobs = {
        name: company.own(stored_study(company.server.store, name=name), owner=owner, team=team, sharing=sharing)
        for name, (owner, team, sharing) in places.items()
    }
    waiting = [jobs[name].id for name in ("theirs", "mine", "secret", "open")]
    choice = Choice(waiting={job: Waiting(number, Reason.PLACE) for number, job in enumerate(waiting, start=1)})
    estimates = {jobs["mine"].id: 1000.0, jobs["theirs"].id: 500.0}
    company.server.cluster.state = QueueState(1, (jobs["runs"].id,), choice, estimates)
    company.server.cluster.reason = "a place"
    return jobs


def test_the_queue_shows_others_as_positions(company: Company, queued: dict[str, JobRecord]) -> None:
    """A member sees the jobs of the team and those shared with all; of others, only that somebody is before."""
    with company.http("member", Scope.READ) as http:
        answer = http.get("/v1/queue")
    document = answer.json()
    assert (document["places"], document["not_ready"]) == (1, "a place")
    assert [entry["job"]["name"] for entry in document["running"]] == ["runs"]
    assert [entry["position"] for entry in document["waiting"]] == [1, 2, 3, 4]
    names = [entry["job"] and entry["job"]["name"] for entry in document["waiting"]]
    assert names == [None, "mine", None, "open"]
    assert document["waiting"][1] == {
        "position": 2,
        "job": {
            "id": queued["mine"].id,
            "kind": "search",
            "name": "mine",
            "state": "CREATED",
            "owner": "owner",
            "team": "red",
            "priority": 0,
            "created_at": document["waiting"][1]["job"]["created_at"],
            "link": f"/v1/studies/{queued['mine'].id}",
        },
        "waiting_for": "a place",
        "estimated_start": "1970-01-01T00:16:40.000Z",
    }
    nothing = {"job": None, "waiting_for": None, "estimated_start": None}
    assert document["waiting"][0] == {"position": 1, **nothing}
    assert document["waiting"][2] == {"position": 3, **nothing}
    for name in ("theirs", "secret"):
        assert name not in answer.text
        assert queued[name].id not in answer.text
    with company.http("loner") as http:
        shown = http.get("/v1/queue").json()
    assert [entry["job"] for entry in shown["running"]] == [None]
    assert [entry["job"] and entry["job"]["name"] for entry in shown["waiting"]] == [None, None, None, "open"]
    with company.http("root") as http:
        shown = http.get("/v1/queue").json()
    assert [entry["job"]["name"] for entry in shown["waiting"]] == ["theirs", "mine", "secret", "open"]


def test_a_job_shows_its_place_in_the_queue(company: Company, queued: dict[str, JobRecord]) -> None:
    with company.http("owner") as http:
        waits = http.get(f"/v1/studies/{queued['mine'].id}").json()
        runs = http.get(f"/v1/studies/{queued['runs'].id}").json()
    assert waits["queue"] == {"position": 2, "length": 4, "estimated_start": "1970-01-01T00:16:40.000Z"}
    assert runs["queue"] is None


def test_the_reader_decides_what_a_reason_tells(
    company: Company, queued: dict[str, JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every document of a job has the reason for the user who reads it."""
    asked: list[Account | None] = []

    def waiting_for(job: JobRecord, *, reader: Account | None = None) -> str:
        asked.append(reader)
        return "x"

    monkeypatch.setattr(company.server.cluster, "waiting_for", waiting_for)
    path = f"/v1/studies/{queued['mine'].id}"
    with company.http("owner") as http:
        etag = http.get(path).headers["ETag"]
        http.get("/v1/studies")
        http.get("/v1/queue")
        http.patch(path, json={"notes": "n"}, headers={"If-Match": etag})
        http.put(f"{path}/sharing", json={"sharing": "team"})
        http.post(f"{path}:pause")
    assert {None if reader is None else reader.user for reader in asked} == {"owner"}


def test_administrators_move_waiting_jobs(company: Company, queued: dict[str, JobRecord]) -> None:
    """The move is stored with who and why; everybody else is refused, whether or not the job exists."""
    mine, theirs = queued["mine"].id, queued["theirs"].id
    with company.http("root", Scope.SUBMIT) as http:
        moved = http.post("/v1/queue:move", json={"job": mine, "before": theirs, "reason": "a deadline"})
        assert (moved.status_code, moved.json()["places"]) == (200, 1)
        for body, status, text in (
            ({"job": "0" * 32}, 404, "there is no such job"),
            ({"job": queued["runs"].id}, 409, "does not wait for a place"),
            ({"job": mine, "before": queued["runs"].id}, 409, "does not wait for a place"),
            ({"job": mine, "before": mine}, 409, "cannot be moved before itself"),
            ({"job": "x"}, 422, "job: "),
        ):
            refused = http.post("/v1/queue:move", json=body)
            assert (refused.status_code, text in refused.json()["detail"]) == (status, True), body
    store = company.server.store
    assert store.job(mine).moved_before == theirs
    event = store.events(mine)[-1]
    assert (event.kind, event.payload) == ("steered", {"action": "move", "user": "root", "reason": "a deadline"})
    assert company.accounts.audit(target=f"job {mine}")[-1].after == {"before": theirs}
    for user in ("manager", "stranger"):
        with company.http(user) as http:
            answers = [http.post("/v1/queue:move", json={"job": job}) for job in (mine, theirs, "0" * 32)]
        assert {answer.status_code for answer in answers} == {403}
        assert len({answer.text for answer in answers}) == 1


def test_only_equal_priorities_are_moved(company: Company, queued: dict[str, JobRecord]) -> None:
    with company.http("root") as http:
        path = f"/v1/studies/{queued['mine'].id}"
        http.patch(path, json={"priority": 3}, headers={"If-Match": "*"})
        refused = http.post("/v1/queue:move", json={"job": queued["mine"].id, "before": queued["theirs"].id})
    assert refused.status_code == 409
    assert "has the priority 3, and the other job 0" in refused.json()["detail"]


def test_a_server_without_users_has_a_queue(server: ApiServer, http: httpx.Client) -> None:
    job = stored_study(server.store)
    waiting = Choice(waiting={job.id: Waiting(1, Reason.PLACE)})
    server.cluster.state = QueueState(4, (), waiting)
    assert http.post("/v1/queue:move", json={"job": job.id}).status_code == 200
    (entry,) = http.get("/v1/queue").json()["waiting"]
    assert entry["job"]["id"] == job.id


def test_limits_are_changed_by_administrators(company: Company) -> None:
    """Omitted limits stay, null lifts a quota, and the audit log has both values; members see the limits."""
    with company.http("root") as http:
        assert http.get("/v1/teams/red").json()["limits"] == LIMITS
        changed = http.patch("/v1/teams/red", json={"weight": 2, "gpu_hours": 500.5, "max_running": 2})
        expected = {**LIMITS, "weight": 2.0, "gpu_hours": 500.5, "max_running": 2}
        assert (changed.status_code, changed.json()["limits"]) == (200, expected)
        assert http.patch("/v1/teams/red", json={"gpu_hours": None}).json()["limits"]["gpu_hours"] is None
        for body in ({"weight": 0}, {"weight": None}, {"max_running": 0}, {"gpu_hours": -1}, {"x": 1}, {"weight": "2"}):
            assert http.patch("/v1/teams/red", json=body).status_code == 422, body
        assert http.patch("/v1/teams/none", json={"weight": 2}).status_code == 404
    last = company.accounts.audit(target="team red")[-1]
    assert (last.action, last.user) == ("team.limit", "root")
    assert last.before is not None
    assert last.after is not None
    assert (last.before["limits"]["gpu_hours"], last.after["limits"]["gpu_hours"]) == (500.5, None)
    with company.http("viewer", Scope.READ) as http:
        assert http.get("/v1/teams/red").json()["limits"]["weight"] == 2.0
        (team,) = http.get("/v1/teams").json()["teams"]
        assert team["limits"]["weight"] == 2.0
    with company.http("manager") as http:
        assert http.patch("/v1/teams/red", json={"weight": 9}).status_code == 403


def test_usage_is_shown_beside_the_limits(company: Company, queued: dict[str, JobRecord], tmp_path: Path) -> None:
    """What runs, waits, and was used and stored; an artifact that two jobs have counts once."""
    store = company.server.store
    writer = store.open_attempt(queued["runs"].id)
    writer.heartbeat(wall_clock_s=5400.0, num_gpus=2)
    artifacts = ArtifactStore(store, artifacts_dir(company.server.data_dir))
    expert = tmp_path / "expert"
    expert.mkdir()
    (expert / "weights").write_bytes(b"x" * 1000)
    for name in ("runs", "mine", "theirs"):
        artifacts.put(queued[name].id, "math", expert)
    company.exported(queued["mine"])
    company.accounts.set_limits("red", {"gpu_hours": 4.0}, actor=OPERATOR)
    with company.http("viewer", Scope.READ) as http:
        assert http.get("/v1/teams/red/usage").json() == {
            "team": "red",
            "limits": {**LIMITS, "gpu_hours": 4.0},
            "running": 1,
            "waiting": 1,
            "replicas": 1,
            "served": 0,
            "gpu_hours": 3.0,
            "recent_gpu_hours": 3.0,
            "artifact_bytes": 1000,
            "export_bytes": 2,
        }
        refused, unknown = http.get("/v1/teams/blue/usage"), http.get("/v1/teams/none/usage")
    assert (refused.status_code, unknown.status_code) == (404, 404)
    assert refused.text.replace("blue", "X") == unknown.text.replace("none", "X")


class SizedPreflight(QuickPreflight):
    """Preflight that expects each fine-tuning's experts to take a GiB."""

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        accepted = await super().accept(content, is_json=is_json, kind=kind, client=client, reader=reader)
        size = 2**30 if kind.name == "finetune" else 0
        return Accepted(accepted.name, accepted.document, accepted.facts, artifact_bytes=size)


@pytest.fixture
def sized(tmp_path: Path) -> Iterator[Company]:
    with ApiServer(tmp_path, preflight=SizedPreflight(), artifact_quota_bytes=2**40) as server:
        yield Company.on(server)


def test_bytes_of_artifacts_are_limited_for_a_team(sized: Company) -> None:
    """A fine-tuning beyond the quota is refused with both numbers; studies and other teams are not concerned."""
    sized.accounts.set_limits("red", {"artifact_bytes": 3 * 2**29}, actor=OPERATOR)
    with sized.http("owner") as http:
        first = http.post("/v1/finetunes", json=finetuning("a"))
        assert first.status_code == 201
        refused = http.post("/v1/finetunes", json=finetuning("b"))
        assert refused.status_code == 403
        assert refused.json()["detail"] == (
            "quota artifact_bytes of team red: 1.0 GiB of 1.5 GiB are used, and the experts need 1.0 GiB; delete jobs "
            "that are no longer needed"
        )
        assert http.post("/v1/studies", json=document()).status_code == 201
        http.post(f"/v1/finetunes/{first.json()['id']}:cancel")
        assert http.post("/v1/finetunes", json=finetuning("b")).status_code == 201
    with sized.http("stranger") as http:
        assert http.post("/v1/finetunes", json=finetuning("a")).status_code == 201


def test_a_job_moves_only_where_its_artifacts_fit(sized: Company, tmp_path: Path) -> None:
    """A move to a team counts what the job has stored and will store, but not what the team has already."""
    sized.accounts.set_role("blue", "owner", Role.MEMBER, actor=OPERATOR)
    sized.accounts.set_limits("blue", {"artifact_bytes": 2**29}, actor=OPERATOR)
    artifacts = ArtifactStore(sized.server.store, artifacts_dir(sized.server.data_dir))
    expert = tmp_path / "expert"
    expert.mkdir()
    (expert / "weights").write_bytes(b"x" * 1000)
    with sized.http("owner") as http:
        job = http.post("/v1/finetunes?team=red", json=finetuning("a")).json()["id"]
        path, body = f"/v1/finetunes/{job}/sharing", {"sharing": "team", "team": "blue"}
        refused = http.put(path, json=body)
        assert refused.status_code == 403
        assert "quota artifact_bytes of team blue: 0.0 GiB of 0.5 GiB are used, and the exp" in refused.json()["detail"]
        http.post(f"/v1/finetunes/{job}:cancel")
        artifacts.put(job, "export-sql", expert)  # an expert may have the name of an export
        sized.accounts.set_limits("blue", {"artifact_bytes": 999}, actor=OPERATOR)
        assert http.put(path, json=body).status_code == 403
        assert http.put(path, json={"sharing": "all"}).status_code == 200, "the job stays in its team"
        assert sized.server.store.job(job).team == "red"
        other = sized.own(stored_study(sized.server.store), owner="stranger", team="blue")
        artifacts.put(other.id, "math", expert)
        assert http.put(path, json=body).json()["team"] == "blue", "the same files count once"


def test_a_job_moves_only_where_its_exports_fit(company: Company) -> None:
    study = company.finished()
    company.exported(study)
    company.accounts.set_role("blue", "owner", Role.MEMBER, actor=OPERATOR)
    company.accounts.set_limits("blue", {"export_bytes": 1}, actor=OPERATOR)
    path, body = f"/v1/studies/{study.id}/sharing", {"sharing": "team", "team": "blue"}
    with company.http("owner") as http:
        refused = http.put(path, json=body)
        assert refused.status_code == 403
        assert "quota export_bytes of team blue" in refused.json()["detail"]
        company.accounts.set_limits("blue", {"export_bytes": 2}, actor=OPERATOR)
        assert http.put(path, json=body).json()["team"] == "blue"


def test_bytes_of_exports_are_limited_for_a_team(company: Company) -> None:
    """An export that would exceed the quota is refused with both numbers; one that is there is answered."""
    study = company.finished()
    with company.server.store.engine.begin() as connection:
        facts = json.dumps({**study.accepted, "export_parameters": 2**29})
        connection.exec_driver_sql("UPDATE studies SET facts = ?", (facts,))
    company.accounts.set_limits("red", {"export_bytes": 2**30 + 10}, actor=OPERATOR)
    name = export_id(study.id, 1, "bfloat16")
    path = f"/v1/studies/{study.id}/exports"
    with company.http("owner") as http:
        company.exported(study, name)
        known = http.post(path, json={"trial": 1, "dtype": "bfloat16"})
        assert (known.status_code, known.json()["id"]) == (202, name)
        refused = http.post(path, json={"trial": 1, "dtype": "float32"})
        assert refused.status_code == 403
        assert refused.json()["detail"] == (
            "quota export_bytes of team red: 0.0 GiB of 1.0 GiB are used, and the model needs 2.0 GiB; delete exports "
            "that are no longer needed"
        )
        waiting = ExportRecord("f" * 32, study.id, 2, "float16", ExportState.WAITING, created_at=1.0)
        ExportStore(company.server.store).add_export(waiting)
        refused = http.post(path, json={"trial": 1, "dtype": "float16"})
        assert refused.status_code == 403, "an export that waits counts"
        assert len(ExportStore(company.server.store).exports(study.id)) == 2


def is_locked(company: Company) -> bool:
    """Whether the database is locked for longer than another writer would lock it: by the thread that asks."""
    with closing(sqlite3.connect(company.server.data_dir / "mergesearch.db", timeout=3, isolation_level=None)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


def test_exports_are_measured_while_nobody_waits(company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a team's exports are measured before the admission of another export, and of a job that moves."""
    study = company.finished()
    company.exported(study)
    company.accounts.set_role("blue", "owner", Role.MEMBER, actor=OPERATOR)
    for team in ("red", "blue"):
        company.accounts.set_limits(team, {"export_bytes": 1}, actor=OPERATOR)
    exports, measured = company.server.app.state.services.exports, []
    num_bytes = exports.num_bytes

    def measure(export: ExportRecord) -> int | None:
        measured.append(is_locked(company))
        found: int | None = num_bytes(export)
        return found

    monkeypatch.setattr(exports, "num_bytes", measure)
    with company.http("owner") as http:
        refused = http.post(f"/v1/studies/{study.id}/exports", json={"trial": 2, "dtype": "float16"})
        assert "quota export_bytes of team red" in refused.json()["detail"]
        assert measured == [False]
        refused = http.put(f"/v1/studies/{study.id}/sharing", json={"sharing": "team", "team": "blue"})
        assert "quota export_bytes of team blue" in refused.json()["detail"]
        assert measured == [False, False]


def test_an_export_that_is_new_since_counts(company: Company) -> None:
    """Exports that were not measured before the admission, or were written since, are measured in it."""
    study = company.finished()
    company.accounts.set_limits("red", {"export_bytes": 2}, actor=OPERATOR)
    sizes, record = company.server.app.state.services.team_bytes, company.server.store.job(study.id)
    measured = sizes.measure("red")
    sizes.check_export(record, "float32", measured)
    company.exported(study)
    with pytest.raises(Refusal, match="quota export_bytes of team red"):
        sizes.check_export(record, "float32", measured)


def test_artifacts_are_measured_while_nobody_waits(sized: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of all artifacts are measured before a fine-tuning is admitted; for a study they are not."""
    artifacts, measured = sized.server.app.state.services.artifacts, []
    num_bytes = artifacts.num_bytes

    def measure() -> int:
        measured.append(is_locked(sized))
        return int(num_bytes())

    monkeypatch.setattr(artifacts, "num_bytes", measure)
    with sized.http("owner") as http:
        assert http.post("/v1/finetunes", json=finetuning("a")).status_code == 201
        assert measured == [False]
        assert http.post("/v1/studies", json=document()).status_code == 201
        assert measured == [False]


def test_requests_of_a_team_are_limited(company: Company) -> None:
    """All members use the quota together; it names the quota, with both numbers; administrators can raise it."""
    company.accounts.set_role("red", "root", Role.MEMBER, actor=OPERATOR)
    company.accounts.set_limits("red", {"requests_per_minute": 3}, actor=OPERATOR)
    with company.http("owner") as owner, company.http("viewer") as viewer, company.http("stranger") as stranger:
        assert [owner.get("/v1/me").status_code for _ in range(2)] == [200, 200]
        assert viewer.get("/v1/me").status_code == 200
        refused = viewer.get("/v1/me")
        assert refused.status_code == 429
        assert refused.json()["detail"] == "quota requests_per_minute of team red: all 3 of 3 requests are used"
        assert int(refused.headers["Retry-After"]) in range(1, 21)
        assert stranger.get("/v1/me").status_code == 200
        with company.http("root") as root:
            assert root.patch("/v1/teams/red", json={"requests_per_minute": None}).status_code == 200
        assert owner.get("/v1/me").status_code == 200


def test_a_paused_or_ended_job_is_not_moved(company: Company, queued: dict[str, JobRecord]) -> None:
    company.server.store.open_attempt(queued["theirs"].id).set_state(JobState.COMPLETE)
    with company.http("root") as http:
        http.post(f"/v1/studies/{queued['mine'].id}:pause")
        answers = [http.post("/v1/queue:move", json={"job": queued[name].id}) for name in ("mine", "theirs")]
    assert [answer.status_code for answer in answers] == [409, 409]
