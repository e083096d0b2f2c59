"""Studies over HTTP: created once, listed, looked at, cancelled."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from search_spaces.study.file import load_study, parse_study
from service.errors import StaleAttempt
from service.jobs.base import Accepted, JobKind
from service.resolved_study import ResolvedStudy
from service.store import blobs, schema
from service.store.accounts import AccountStore
from service.store.artifacts import ArtifactStore
from service.store.steering import SteeringStore
from service.types import Account, EventKind, JobRecord, JobState, Origin, TrialRecord, TrialState
from tests.s3_server import S3
from tests.service.api.family import image_document
from tests.service.api.harness import (
    ApiServer,
    QuickPreflight,
    document,
    finished_study,
    rung,
    stored_finetune,
    stored_study,
)
from tests.service.synthetic_run import run_record
from workers.object_store import ObjectStore
from workers.tiny_family import EXAMPLES, STUDY_FILE, family_dir, study_text

UNKNOWN = "0" * 32

ROOT = Path(__file__).parents[3]


def test_a_study_is_created_and_found_where_its_location_says(http: httpx.Client, server: ApiServer) -> None:
    answer = http.post("/v1/studies", json=document())
    assert answer.status_code == 201
    created = answer.json()
    assert answer.headers["location"] == created["links"]["self"] == f"/v1/studies/{created['id']}"
    assert http.get(answer.headers["location"]).json() == created
    assert (created["name"], created["state"], created["attempt"]) == ("math-text-lookup", "CREATED", 0)
    assert (created["trials"], created["progress"], created["job"]) == ({}, None, None)
    assert created["algorithm"] == server.store.job(created["id"]).accepted["algorithm"]
    assert server.cluster.num_wakes == 1
    for link in set(created["links"]) - {"events"}:
        assert http.get(created["links"][link]).status_code == 200, link


@pytest.mark.parametrize("media_type", ["application/yaml", "application/x-yaml", "text/yaml; charset=UTF-8"])
def test_yaml_makes_the_same_study_as_json(http: httpx.Client, media_type: str) -> None:
    headers = {"Content-Type": media_type}
    from_yaml = http.post("/v1/studies", content=yaml.safe_dump(document()), headers=headers)
    assert from_yaml.status_code == 201, from_yaml.text
    from_json = http.post("/v1/studies", json=document())
    files = [http.get(answer.json()["links"]["study"]).json() for answer in (from_yaml, from_json)]
    assert files[0] == files[1]
    assert http.post("/v1/studies", json=files[0]).status_code == 201


def test_fifty_requests_of_one_key_make_one_study(http: httpx.Client, server: ApiServer) -> None:
    def post(_: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/studies", json=document(), headers={"Idempotency-Key": "one"}, timeout=60)

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(post, range(50)))
    assert sorted(answer.status_code for answer in answers) == [200] * 49 + [201]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert len(http.get("/v1/studies").json()["studies"]) == 1


def test_a_key_names_one_body(http: httpx.Client, server: ApiServer) -> None:
    headers = {"Idempotency-Key": "one"}
    created = http.post("/v1/studies", json=document(), headers=headers).json()
    answer = http.post("/v1/studies", json=document("another"), headers=headers)
    assert answer.status_code == 409
    assert answer.json()["detail"] == (
        f"Idempotency-Key 'one' was sent before with another body, which created study {created['id']}; "
        "use another key for another study"
    )
    assert http.post("/v1/studies", json=document("another"), headers={"Idempotency-Key": "two"}).status_code == 201


def test_a_key_of_a_refused_request_may_be_used_again(http: httpx.Client) -> None:
    headers = {"Idempotency-Key": "one"}
    assert http.post("/v1/studies", json=document(objectives=[]), headers=headers).status_code == 422
    assert http.post("/v1/studies", json=document(), headers=headers).status_code == 201


def test_without_a_key_every_request_makes_a_study(http: httpx.Client) -> None:
    ids = {http.post("/v1/studies", json=document()).json()["id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "h\xe9"])
def test_keys_that_are_no_names_are_refused(http: httpx.Client, key: str) -> None:
    headers = {b"Idempotency-Key": key.encode("latin-1")}
    answer = http.post("/v1/studies", json=document(), headers=headers)
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["field"] == "Idempotency-Key"


def test_studies_are_listed_by_state_and_name_oldest_first(http: httpx.Client, server: ApiServer) -> None:
    made = [stored_study(server.store, name=name) for name in ("a", "b", "a")]
    server.store.open_attempt(made[1].id).set_state(JobState.RUNNING)

    def ids(**query: str) -> list[str]:
        return [study["id"] for study in http.get("/v1/studies", params=query).json()["studies"]]

    assert ids() == [record.id for record in made]
    assert ids(name="a") == [made[0].id, made[2].id]
    assert ids(state="RUNNING") == [made[1].id]
    assert ids(state="RUNNING", name="a") == []


def test_a_study_file_is_checked(http: httpx.Client, server: ApiServer) -> None:
    """A check says every problem with its field, has the plan if asked for, and stores nothing."""
    for level in ("syntax", "full"):
        wrong = http.post("/v1/studies:check", params={"level": level}, json=document(search={"max_trials": 0}, x=1))
        assert wrong.status_code == 200
        assert {problem["field"] for problem in wrong.json()["problems"]} == {"search.max_trials", "x"}
        assert (wrong.json()["is_valid"], wrong.json()["plan"]) == (False, None)
    headers = {"Content-Type": "application/yaml"}
    for torn in (b"name: [", b"- 1", b""):
        assert http.post("/v1/studies:check?level=syntax", content=torn, headers=headers).status_code == 422
    assert http.post("/v1/studies:check?level=syntax", json=document()).json() == {
        "is_valid": True,
        "problems": [],
        "plan": None,
    }
    absent = document(models={"base": str(server.data_dir / "none"), "experts": document()["models"]["experts"]})
    assert http.post("/v1/studies:check?level=syntax", json=absent).json()["is_valid"]
    assert http.get("/v1/studies").json()["studies"] == []


@pytest.mark.slow
@pytest.mark.parametrize("modality", ["text", "image"])
def test_a_full_check_has_the_plan(http: httpx.Client, tmp_path: Path, modality: str) -> None:
    """The plan is that of `mergesearch run --check`: models and tasks are read."""
    sent = image_document(tmp_path) if modality == "image" else document()
    checked = http.post("/v1/studies:check", json=sent, timeout=300).json()
    assert checked["problems"] == []
    plan = checked["plan"]
    assert plan["trials"]["search"] == sent["search"]["max_trials"]
    full = {"text": dict.fromkeys(("math", "text", "lookup"), 270), "image": dict.fromkeys(("shape", "answer"), 36)}
    assert plan["rungs"][-1] == full[modality]
    assert plan["samples"]["search"] > 0
    assert 0 < plan["hours"]["least"] <= plan["hours"]["most"]
    assert plan["memory_bytes"]["needed"] > 0
    assert plan["text"].startswith(f"study     {sent['name']}: nothing is wrong with it")


def test_the_example_is_accepted(http: httpx.Client) -> None:
    """The shipped study file, as the server hands it out, has comments and no problem."""
    example = http.get("/v1/studies:example")
    assert example.headers["content-type"].startswith("application/yaml")
    assert example.text.startswith("# Merge three experts")
    headers = {"Content-Type": "application/yaml"}
    url = "/v1/studies:check?level=syntax"
    assert http.post(url, content=example.content, headers=headers).json()["is_valid"]
    shipped = load_study(family_dir() / STUDY_FILE)
    assert parse_study(yaml.safe_load(example.text)).canonical() == shipped.canonical()


def test_every_example_is_accepted(http: httpx.Client) -> None:
    """Each shipped example is another study without a problem, and differs from the docs' by its paths alone."""
    url, headers = "/v1/studies:check?level=syntax", {"Content-Type": "application/yaml"}
    names = set()
    for name in EXAMPLES:
        example = http.get("/v1/studies:example", params={"name": name})
        assert example.text == study_text(name)
        assert http.post(url, content=example.content, headers=headers).json()["is_valid"]
        names.add(yaml.safe_load(example.text)["name"])
        docs = ROOT / "docs" / "examples" / f"{name}.yaml"
        if docs.is_file():
            own = (family_dir() / EXAMPLES[name]).read_text()
            assert docs.read_text().replace("../../workers/tiny_family/", "") == own
    assert len(names) == len(EXAMPLES) == 3
    assert http.get("/v1/studies:example", params={"name": "other"}).status_code == 422


def test_a_study_begins_with_a_mergekit_configuration(http: httpx.Client) -> None:
    """The file has the configuration's models and its merge; with objectives it is valid."""
    configuration = {
        "merge_method": "ties",
        "base_model": "owner/base",
        "models": [{"model": f"owner/{name}", "parameters": {"weight": 0.5, "density": 0.4}} for name in "ab"],
        "dtype": "bfloat16",
    }
    begun = http.post("/v1/studies:from_mergekit", json=configuration, params={"name": "mine"}).json()
    study = begun["study"]
    assert study["models"] == {"base": "owner/base", "experts": {"a": "owner/a", "b": "owner/b"}}
    assert study["search"]["recipes"][0]["recipe"]["models"][1]["model"] == "b"
    study["objectives"] = document()["objectives"]
    assert http.post("/v1/studies:check?level=syntax", json=study).json()["problems"] == []
    for wrong, message in (
        ({"format": "mergesearch-recipe/1"}, "is no mergekit configuration: it has no merge_method"),
        ({**configuration, "merge_method": "tise"}, "tise"),
    ):
        refused = http.post("/v1/studies:from_mergekit", json=wrong)
        assert refused.status_code == 422
        assert message in refused.json()["problems"][0]["message"]


def test_events_are_listed_a_page_at_a_time(http: httpx.Client, server: ApiServer) -> None:
    """A list has the events of the kinds that are asked for, in either order, and their number."""
    writer = server.store.open_attempt(stored_study(server.store).id)
    for number in range(5):
        writer.add_event(EventKind.SEARCH_NOTE, {"text": str(number)})
    url, headers = f"/v1/studies/{writer.job_id}/events", {"Accept": "application/json"}
    query: dict[str, Any] = {"kind": ["search_note", "rung"], "order": "newest", "offset": 1, "limit": 2}
    found = http.get(url, params=query, headers=headers).json()
    assert found["total"] == 5
    assert [event["payload"]["text"] for event in found["events"]] == ["3", "2"]
    assert http.get(url, headers=headers).json()["total"] == 7  # and that it was created, and its attempt


def test_a_list_of_studies_has_pages(http: httpx.Client, server: ApiServer) -> None:
    """Without a limit the list has every study; `next` leads through pages with the same conditions."""
    made = [stored_study(server.store, name=f"s{number}") for number in range(5)]
    whole = http.get("/v1/studies").json()
    assert (len(whole["studies"]), whole["total"], whole["next"]) == (5, 5, None)
    page = http.get("/v1/studies", params={"q": "S", "sort": "-name", "limit": 2, "state": "CREATED"}).json()
    seen = [study["id"] for study in page["studies"]]
    while page["next"] is not None:
        assert page["total"] == 5
        page = http.get(page["next"]).json()
        seen += [study["id"] for study in page["studies"]]
    assert seen == [record.id for record in reversed(made)]
    (problem,) = http.get("/v1/studies", params={"sort": "age"}).json()["problems"]
    assert problem["field"] == "sort"
    assert "'created', '-created'" in problem["message"]


def test_an_unknown_state_is_refused_with_those_there_are(http: httpx.Client) -> None:
    (problem,) = http.get("/v1/studies", params={"state": "DONE"}).json()["problems"]
    assert problem["field"] == "state"
    assert problem["message"].startswith("\"DONE\" is not accepted; input should be 'CREATED', 'RUNNING'")


def test_a_study_tells_how_far_it_is(http: httpx.Client, server: ApiServer) -> None:
    record = finished_study(server.store)
    told = http.get(f"/v1/studies/{record.id}").json()
    assert (told["state"], told["attempt"], told["wall_clock_s"]) == ("COMPLETE", 1, 312.4)
    assert sum(told["trials"].values()) == 21
    assert told["progress"]["stage"] == "held-out"
    assert told["job"] == {
        "submission_id": "math-text-lookup-1",
        "dashboard_url": "/ray/#/jobs/math-text-lookup-1",
    }


def test_a_job_of_another_kind_is_no_study(http: httpx.Client, server: ApiServer) -> None:
    study = stored_study(server.store)
    training = server.store.create_job(
        kind="finetune", name="math", document={}, accepted=ResolvedStudy.of(study).to_json()
    )
    assert [listed["id"] for listed in http.get("/v1/studies").json()["studies"]] == [study.id]
    answer = http.get(f"/v1/studies/{training.id}")
    assert (answer.status_code, answer.json()["detail"]) == (
        404,
        f"study {training.id!r}: is a fine-tuning, not a study",
    )


def test_what_is_no_study_is_not_found(http: httpx.Client) -> None:
    names = (UNKNOWN, "x", "0" * 33, "%00", "%2e%2e%2fetc", "\N{SNOWMAN}", "0' OR '1'='1")
    for name, rest in itertools.product(names, ("", "/trials", "/events", "/report", "/exports", ":cancel")):
        answer = http.request("POST" if rest == ":cancel" else "GET", f"/v1/studies/{name}{rest}")
        assert answer.status_code == 404, (name, rest)
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == 404
        if name == UNKNOWN:
            assert answer.json()["detail"] == f"study '{UNKNOWN}': there is no such study"


# Cancelling.


def test_cancelling_ends_a_study_once_and_stops_its_driver(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    answers = [http.post(f"/v1/studies/{record.id}:cancel") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202] * 3
    assert {answer.json()["state"] for answer in answers} == {"CANCELLED"}
    with pytest.raises(StaleAttempt):
        writer.finish_rung(0, rung(0), samples_reused=0)
    kinds = [event.kind for event in server.store.events(record.id)]
    assert kinds == ["created", "attempt", "state", "attempt", "steered", "state"]
    assert server.cluster.num_wakes == 3


def test_studies_cancelled_by_many_at_once_are_cancelled_once(server: ApiServer) -> None:
    record = stored_study(server.store)

    def cancel(_: int) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/studies/{record.id}:cancel", timeout=60)

    with ThreadPoolExecutor(10) as pool:
        assert {answer.status_code for answer in pool.map(cancel, range(10))} == {202}
    assert [event.kind for event in server.store.events(record.id)].count("state") == 1


@pytest.mark.parametrize("state", [JobState.COMPLETE, JobState.FAILED])
def test_what_has_ended_cannot_be_cancelled(http: httpx.Client, server: ApiServer, state: JobState) -> None:
    record = stored_study(server.store)
    server.store.open_attempt(record.id).set_state(state)
    answer = http.post(f"/v1/studies/{record.id}:cancel")
    assert answer.status_code == 409
    assert answer.json()["detail"].startswith(f"study {record.id} is already {state.value}")
    assert server.store.job(record.id).attempt == 1


def test_failed_study_is_resumed_once(http: httpx.Client, server: ApiServer) -> None:
    """A failed study is resumed once, and the count of its drivers starts again."""
    record = stored_study(server.store)
    for _ in range(5):
        writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.FAILED, "no engine")
    assert server.store.consecutive_failures(record.id) == 5
    answer = http.post(f"/v1/studies/{record.id}:resume")
    assert answer.status_code == 202
    assert (answer.json()["state"], answer.json()["reason"]) == ("STOPPED", "resumed by request")
    assert server.store.consecutive_failures(record.id) == 0
    assert [event.kind for event in server.store.events(record.id)][-3:] == ["steered", "resumed", "state"]
    assert server.cluster.num_wakes == 1
    server.store.open_attempt(record.id).set_state(JobState.RUNNING)
    before = server.store.last_event_id(record.id)
    assert http.post(f"/v1/studies/{record.id}:resume").json()["state"] == "RUNNING"
    assert server.store.last_event_id(record.id) == before, "it goes on already"


@pytest.mark.parametrize("state", [JobState.COMPLETE, JobState.CANCELLED])
def test_what_is_complete_or_cancelled_cannot_be_resumed(
    http: httpx.Client, server: ApiServer, state: JobState
) -> None:
    record = stored_study(server.store)
    server.store.open_attempt(record.id).set_state(state)
    answer = http.post(f"/v1/studies/{record.id}:resume")
    assert answer.status_code == 409
    assert answer.json()["detail"] == (
        f"study {record.id} is {state.value}; only a study that has FAILED, that is PAUSED or waits, or with samples "
        "of an engine that failed a check later can be resumed; to run it again, submit it again"
    )
    assert server.store.job(record.id).state is state


def test_verbs_are_posted(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    answer = http.get(f"/v1/studies/{record.id}:cancel")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert http.post(f"/v1/studies/{record.id}:vanish").status_code == 404


# Logs.


def test_the_log_is_what_the_drivers_printed(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    server.cluster.log_text = "scored \N{SNOWMAN} \udcff\n"
    answer = http.get(f"/v1/studies/{record.id}/log")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "scored \N{SNOWMAN} ?\n"


def test_the_log_waits_for_the_cluster(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    server.cluster.reason = "Ray is being started"
    answer = http.get(f"/v1/studies/{record.id}/log")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["detail"] == "Ray is being started"


def test_studies_are_accepted_while_the_cluster_is_away(http: httpx.Client, server: ApiServer) -> None:
    server.cluster.reason = "Ray is being started"
    answer = http.post("/v1/studies", json=document())
    assert answer.status_code == 201
    assert http.get(answer.headers["location"]).json()["waiting_for"] == "Ray is being started"


def test_problems_name_every_field(http: httpx.Client) -> None:
    body: dict[str, Any] = document()
    body["serch"] = {}
    body["search"]["max_trials"] = 0
    body["fidelity"]["eta"] = "3"
    answer = http.post("/v1/studies", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    told = answer.json()
    assert (told["type"], told["title"], told["status"]) == ("about:blank", "Unprocessable Entity", 422)
    assert told["detail"] == "the request has 3 problems"
    assert {problem["field"]: problem["message"] for problem in told["problems"]} == {
        "search.max_trials": "0 is not accepted; give at least 1",
        "fidelity.eta": '"3" is not accepted; give a whole number',
        "serch": 'unknown key; did you mean "search"? known keys: '
        "name, models, search_space, search, fidelity, objectives, holdout, benchmarks, contamination, engine, limits",
    }


class ChainedPreflight(QuickPreflight):
    """Preflight after which a study has the model at `url` as a source, instead of a merge of another study."""

    url = ""

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        accepted = await super().accept(content, is_json=is_json, kind=kind, client=client)
        source = {"study": "", "name": "first", "trial": 2, "recipe_digest": "0" * 64, "directory": self.url}
        return replace(accepted, facts={**accepted.facts, "chained": {"merged": source}})


@pytest.mark.parametrize("is_chained", [True, False], ids=["merge of a study", "model by URL"])
def test_a_queued_study_keeps_its_sources(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch, is_chained: bool
) -> None:
    """The job that made a source may be deleted before the first driver starts; afterwards, nothing is created."""
    files, preflight = f"{s3.bucket()}/files", ChainedPreflight() if is_chained else QuickPreflight()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with (
        ApiServer(tmp_path, files=files, preflight=preflight) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        artifacts = ArtifactStore(server.store, files)
        first = finished_study(server.store)
        made = artifacts.put(first.id, "source-x", tmp_path / "model")
        # Not before: the server removes files without a row, which this one is while it is stored.
        monkeypatch.setattr(blobs, "GRACE_S", -1.0)
        url = str(artifacts.url(made))
        body = document("second")
        if isinstance(preflight, ChainedPreflight):
            preflight.url = url
        else:
            body["models"]["experts"]["merged"] = url
        second = http.post("/v1/studies", json=body, headers={"Idempotency-Key": "one"})
        assert second.status_code == 201, second.text
        assert http.delete(f"/v1/studies/{first.id}").status_code == 200
        (kept,) = artifacts.of(second.json()["id"])
        assert (kept.digest, kept.num_bytes) == (made.digest, made.num_bytes)
        assert {*artifacts.files(kept)} == {"config.json"}
        again = http.post("/v1/studies", json=body, headers={"Idempotency-Key": "one"})
        assert (again.status_code, again.json()["id"]) == (200, second.json()["id"])

        server.store.open_attempt(second.json()["id"]).set_state(JobState.CANCELLED)
        assert http.delete(f"/v1/studies/{second.json()['id']}").status_code == 200
        refused = http.post("/v1/studies", json=body)
        assert refused.status_code == 409
        assert "the job that has it was deleted meanwhile" in refused.json()["detail"]
        assert server.store.jobs() == ()
        with server.store.reading() as connection:
            left = {table.name for table in schema.metadata.sorted_tables if connection.execute(table.select()).first()}
        assert left <= {"schema_version", "audit"}
        assert ObjectStore(files).list() == {}


# Steering.


@pytest.mark.parametrize("kind", ["studies", "finetunes"])
def test_a_job_is_paused_and_resumed(http: httpx.Client, server: ApiServer, kind: str) -> None:
    """A job of any kind is paused, each request changes it once, and its events say why."""
    record = stored_study(server.store) if kind == "studies" else stored_finetune(server.store)
    path = f"/v1/{kind}/{record.id}"
    paused = [http.post(f"{path}:pause", params={"reason": "the GPUs are needed"}) for _ in range(2)]
    assert [answer.status_code for answer in paused] == [202, 202]
    assert {answer.json()["state"] for answer in paused} == {"PAUSED"}
    assert paused[0].json()["reason"] == "paused by request: the GPUs are needed"
    listed = http.get(f"/v1/{kind}", params={"state": "PAUSED"}).json()[kind]
    assert [job["id"] for job in listed] == [record.id]
    assert http.delete(path).status_code == 409, "it has not ended"
    resumed = [http.post(f"{path}:resume") for _ in range(2)]
    assert {answer.json()["state"] for answer in resumed} == {"STOPPED"}
    events = http.get(f"{path}/events", headers={"Accept": "application/json"}).json()["events"]
    steered = [event["payload"] for event in events if event["kind"] == "steered"]
    assert [(each["action"], each["reason"]) for each in steered][:2] == [
        ("pause", "the GPUs are needed"),
        ("resume", None),
    ]


def test_a_search_is_stopped_early(http: httpx.Client, server: ApiServer) -> None:
    record = stored_study(server.store)
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    answers = [http.post(f"/v1/studies/{record.id}:stop", params={"reason": "good enough"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[0].json()["state"] == "RUNNING"
    assert writer.heartbeat(wall_clock_s=1.0) == "stopped by request: good enough"
    assert [event.kind for event in server.store.events(record.id)].count("steered") == 1


def test_a_fine_tuning_has_no_search_to_stop(http: httpx.Client, server: ApiServer) -> None:
    record = stored_finetune(server.store)
    assert http.post(f"/v1/finetunes/{record.id}:stop").status_code in (404, 405)
    assert "/v1/finetunes/{finetune_id}:stop" not in http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("verb", ["pause", "stop"])
@pytest.mark.parametrize("state", [JobState.COMPLETE, JobState.FAILED, JobState.CANCELLED])
def test_what_has_ended_is_not_steered(http: httpx.Client, server: ApiServer, verb: str, state: JobState) -> None:
    record = stored_study(server.store)
    server.store.open_attempt(record.id).set_state(state)
    last = server.store.last_event_id(record.id)
    answer = http.post(f"/v1/studies/{record.id}:{verb}")
    done = {"pause": "paused", "stop": "stopped"}[verb]
    assert (answer.status_code, answer.json()["detail"]) == (
        409,
        f"study {record.id} is already {state.value}; only a study that has not ended can be {done}",
    )
    assert server.store.last_event_id(record.id) == last


@pytest.mark.parametrize("reason", ["", "two\nlines", "x" * 501])
def test_reasons_are_one_short_line(http: httpx.Client, server: ApiServer, reason: str) -> None:
    record = stored_study(server.store)
    answer = http.post(f"/v1/studies/{record.id}:pause", params={"reason": reason})
    assert answer.status_code == 422
    assert "reason" in answer.text
    assert server.store.job(record.id).state is JobState.CREATED


def test_no_change_is_between_a_job_and_its_last_event(
    http: httpx.Client, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The document of a job has every change up to its `last_event_id`, also one that is made while it is read."""
    record = stored_study(server.store)
    writer, read = server.store.open_attempt(record.id), server.store.last_event_id

    def changed(job_id: str | None = None) -> int:
        if job_id == record.id:
            writer.set_state(JobState.RUNNING)
        return read(job_id)

    monkeypatch.setattr(server.store, "last_event_id", changed)
    shown = http.get(f"/v1/studies/{record.id}").json()
    assert (shown["state"], shown["last_event_id"]) == ("RUNNING", read(record.id))


# Edits.


def edit(http: httpx.Client, path: str, changes: dict[str, Any], *, tag: str | None = "*") -> httpx.Response:
    return http.patch(path, json=changes, headers={} if tag is None else {"If-Match": tag})


@pytest.mark.parametrize("kind", ["studies", "finetunes"])
def test_labels_of_a_job_are_edited(http: httpx.Client, server: ApiServer, kind: str) -> None:
    record = stored_study(server.store) if kind == "studies" else stored_finetune(server.store)
    path = f"/v1/{kind}/{record.id}"
    shown = http.get(path)
    changes = {"name": "other", "description": "why", "tags": ["a", "b"], "notes": "n", "priority": 3}
    edited = edit(http, path, changes, tag=shown.headers["ETag"])
    assert edited.status_code == 200, edited.text
    assert {name: edited.json()[name] for name in changes} == changes
    assert (edited.json()["version"], edited.headers["ETag"]) == (1, '"1"')
    document = http.get(f"{path}/{'study' if kind == 'studies' else 'specification'}").json()
    assert document == {**record.document, "name": "other"}
    removed = edit(http, path, {"description": None, "tags": []}, tag='"1"').json()
    assert (removed["description"], removed["tags"], removed["notes"], removed["version"]) == (None, [], "n", 2)
    assert edit(http, path, {"notes": "n"}).json()["version"] == 2, "nothing changes"


def test_no_edit_is_lost(http: httpx.Client, server: ApiServer) -> None:
    path = f"/v1/studies/{stored_study(server.store).id}"
    tag = http.get(path).headers["ETag"]
    assert edit(http, path, {"notes": "mine"}, tag=tag).status_code == 200
    late = edit(http, path, {"notes": "yours"}, tag=tag)
    assert (late.status_code, late.json()["detail"]) == (
        412,
        'the study was edited meanwhile: it has the ETag "1"; read it and edit it again',
    )
    without = edit(http, path, {"notes": "yours"}, tag=None)
    assert without.status_code == 428
    assert "If-Match is missing" in without.json()["detail"]
    assert http.get(path).json()["notes"] == "mine"


def test_an_edit_says_why(http: httpx.Client, server: ApiServer) -> None:
    """The event of an edit has the reason; a proxy may have marked the tag as weak."""
    record = stored_study(server.store)
    path = f"/v1/studies/{record.id}"
    edited = http.patch(f"{path}?reason=a+deadline", json={"priority": -1}, headers={"If-Match": 'W/"0"'})
    assert (edited.status_code, edited.json()["version"]) == (200, 1)
    (payload,) = [event.payload for event in server.store.events(record.id) if event.kind == "steered"]
    assert (payload["reason"], payload["changes"]) == ("a deadline", {"priority": [0, -1]})
    wrong = http.patch(f"{path}?reason=a%0Ab", json={"priority": -2}, headers={"If-Match": "*"})
    assert (wrong.status_code, wrong.json()["problems"][0]["field"]) == (422, "reason")


def test_only_one_of_many_edits_at_once_is_stored(server: ApiServer) -> None:
    path = f"{server.url}/v1/studies/{stored_study(server.store).id}"

    def note(number: int) -> int:
        sent = {"notes": str(number)}
        return httpx.patch(path, json=sent, headers={"If-Match": '"0"'}, timeout=60).status_code

    with ThreadPoolExecutor(10) as pool:
        assert sorted(pool.map(note, range(10))) == [200] + [412] * 9


def test_options_of_a_study_that_runs_are_edited(http: httpx.Client, server: ApiServer) -> None:
    """The driver with the old options is outdated; the event has old and new values."""
    record = stored_study(server.store)
    server.store.open_attempt(record.id, as_driver=True).set_state(JobState.RUNNING)
    path = f"/v1/studies/{record.id}"
    changes = {"max_trials": 77, "replicas": 3, "limits": {"max_samples": 5000}}
    assert edit(http, path, changes).status_code == 200
    now = server.store.job(record.id)
    assert now.is_outdated
    options = (now.document["search"]["max_trials"], now.document["engine"]["replicas"], now.document["limits"])
    assert options == (77, 3, {**record.document["limits"], "max_samples": 5000})
    (payload,) = [event.payload for event in server.store.events(record.id) if event.kind == "steered"]
    assert payload["changes"] == {
        "engine.replicas": [1, 3],
        "limits.max_samples": [None, 5000],
        "search.max_trials": [record.document["search"]["max_trials"], 77],
    }
    assert server.cluster.num_wakes == 1
    assert edit(http, path, {"limits": {"max_samples": None}}).status_code == 200
    assert server.store.job(record.id).document["limits"] == record.document["limits"]


def test_what_is_used_already_is_no_limit(http: httpx.Client, server: ApiServer) -> None:
    """Both numbers are in the message, and nothing changes."""
    record = stored_study(server.store)
    writer = server.store.open_attempt(record.id, as_driver=True)
    writer.heartbeat(wall_clock_s=7200.0, progress={"samples_used": 900})
    trials = [trial for trial in run_record().trials if isinstance(trial, TrialRecord)]
    for proposed in [trial for trial in trials if trial.origin is Origin.SEARCH][:3]:
        writer.add_trial(proposed)
    path = f"/v1/studies/{record.id}"
    sent = {"max_trials": 2, "limits": {"max_samples": 899, "max_gpu_hours": 1.5, "max_wall_clock_s": 60}}
    answer = edit(http, path, sent)
    assert answer.status_code == 422
    assert {problem["field"]: problem["message"] for problem in answer.json()["problems"]} == {
        "max_trials": "2 is below the 3 trials that were proposed already; give 3 or more",
        "limits.max_samples": "899 is below the 900 that the study has used; give 900 or more",
        "limits.max_gpu_hours": "1.5 is below the 2 that the study has used; give 2 or more",
        "limits.max_wall_clock_s": "60 is below the 7200 that the study has used; give 7200 or more",
    }
    assert server.store.job(record.id).document == record.document
    enough = {"max_trials": 3, "limits": {"max_samples": 900, "max_gpu_hours": 2, "max_wall_clock_s": 7200}}
    assert edit(http, path, enough).status_code == 200


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"max_trials": 0}, "max_trials"),
        ({"limits": {"max_samples": -1}}, "limits.max_samples"),
        ({"limits": {"keep_responses": False}}, "limits.keep_responses"),
        ({"tags": ["x" * 65]}, "tags.0"),
        ({"name": "no/name"}, "name"),
        ({"priority": 101}, "priority"),
        ({"seed": 3}, "seed"),
    ],
)
def test_wrong_edits_are_named(http: httpx.Client, server: ApiServer, sent: dict[str, Any], field: str) -> None:
    record = stored_study(server.store)
    answer = edit(http, f"/v1/studies/{record.id}", sent)
    assert answer.status_code == 422
    assert [problem["field"] for problem in answer.json()["problems"]] == [field]
    assert server.store.job(record.id) == record


def test_only_labels_of_what_has_ended_are_edited(http: httpx.Client, server: ApiServer) -> None:
    record = finished_study(server.store)
    path = f"/v1/studies/{record.id}"
    refused = edit(http, path, {"max_trials": 1000})
    assert refused.status_code == 409
    assert "only the labels of a study that has ended can be edited" in refused.json()["detail"]
    assert edit(http, path, {"notes": "the best so far"}).status_code == 200


# Invalid trials.


def test_nothing_selects_an_invalid_trial(http: httpx.Client, server: ApiServer) -> None:
    """The best trial loses its place in summary and front; its samples stay, and the study continues."""
    record = finished_study(server.store)
    path = f"/v1/studies/{record.id}"
    best = http.get(f"{path}/summary").json()["best"]["trial"]
    before = http.get(f"{path}/trials/{best}").json()
    del before["provenance"]  # the answer to a change has none
    sent = {"is_valid": False, "reason": "its answers were cut off"}
    for _ in range(2):
        answer = http.put(f"{path}/trials/{best}/validity", json=sent)
        assert (answer.status_code, answer.json()) == (200, {**before, "invalid": "its answers were cut off"})
    summary = http.get(f"{path}/summary").json()
    assert summary["best"]["trial"] != best
    assert summary["invalid"] == [{"trial": best, "reason": "its answers were cut off"}]
    assert best not in [entry["trial"] for entry in http.get(f"{path}/pareto").json()["front"]]
    assert best not in [row["trial"] for row in summary["holdout"]]
    assert f"Trial {best} was marked as invalid" in http.get(f"{path}/report").text
    job = server.store.job(record.id)
    assert (job.state, job.reason) == (JobState.STOPPED, f"trial {best} was marked as invalid")
    assert [each["action"] for each in summary["steering"]] == ["invalidate"]
    again = http.put(f"{path}/trials/{best}/validity", json={"is_valid": True})
    assert again.json() == before
    assert http.get(f"{path}/summary").json()["best"]["trial"] == best


def test_a_driver_selects_anew_when_a_trial_is_invalid(http: httpx.Client, server: ApiServer) -> None:
    record = finished_study(server.store)
    server.store.open_attempt(record.id, as_driver=True).set_state(JobState.RUNNING)
    sent = {"is_valid": False, "reason": "why"}
    assert http.put(f"/v1/studies/{record.id}/trials/1/validity", json=sent).status_code == 200
    assert server.store.job(record.id).is_outdated


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"is_valid": False}, "reason"),
        ({"is_valid": False, "reason": ""}, "reason"),
        ({"is_valid": False, "reason": "a\nb"}, "reason"),
        ({"reason": "why"}, "is_valid"),
    ],
)
def test_an_invalid_trial_has_a_reason(http: httpx.Client, server: ApiServer, sent: dict[str, Any], field: str) -> None:
    record = finished_study(server.store)
    answer = http.put(f"/v1/studies/{record.id}/trials/1/validity", json=sent)
    assert (answer.status_code, [problem["field"] for problem in answer.json()["problems"]]) == (422, [field])
    missing = http.put(f"/v1/studies/{record.id}/trials/99999/validity", json={"is_valid": True})
    assert missing.status_code == 404
    assert server.store.job(record.id) == record


# Trials as columns.


def test_columns_are_chosen_and_change_with_events(http: httpx.Client, server: ApiServer) -> None:
    """`since` has only the trials that events tell of since then; an unchanged study answers 304."""
    record = finished_study(server.store)
    path = f"/v1/studies/{record.id}/trials/columns"
    answer = http.get(path)
    columns = answer.json()["columns"]
    numbers = sorted(server.store.trial_numbers(record.id))
    assert columns["number"] == numbers
    assert {len(values) for values in columns.values()} == {len(numbers)}
    assert http.get(path, headers={"If-None-Match": answer.headers["ETag"]}).status_code == 304
    chosen = http.get(path, params={"fields": "number,value.*"}).json()["columns"]
    assert chosen.keys() == {name for name in columns if name == "number" or name.startswith("value.")}
    event = answer.json()["event"]
    assert http.get(path, params={"since": event}).json()["columns"]["number"] == []
    assert http.put(f"/v1/studies/{record.id}/trials/1/validity", json={"is_valid": False, "reason": "why"}).is_success
    changed = http.get(path, params={"since": event, "fields": "number,invalid"}).json()
    assert changed["columns"] == {"number": [1], "invalid": ["why"]}
    assert changed["event"] > event


# Trials at the full budget, by request.


def test_a_pruned_trial_is_requested_at_the_full_budget(http: httpx.Client, server: ApiServer) -> None:
    """A COMPLETE study continues; a second request changes nothing."""
    record = finished_study(server.store)
    path = f"/v1/studies/{record.id}"
    trials = http.get(f"{path}/trials", params={"limit": 100}).json()["trials"]
    number = next(trial["number"] for trial in trials if trial["state"] == "PRUNED")
    answers = [http.post(f"{path}/trials/{number}:evaluate", params={"reason": "by a hair"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [202, 202], answers[0].text
    assert answers[0].json()["state"] == "STOPPED"
    assert [request.trial for request in SteeringStore(server.store).evaluation_requests(record.id)] == [number]
    (payload,) = [event.payload for event in server.store.events(record.id) if event.kind == "steered"]
    assert (payload["action"], payload["reason"], payload["trial"]) == ("evaluate", "by a hair", number)
    assert server.cluster.num_wakes == 1


def test_a_repeated_request_has_one_audit_entry(
    http: httpx.Client, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is so although the driver's heartbeats change the study while a request is answered."""
    record = finished_study(server.store)
    number = next(trial.number for trial in server.store.trials(record.id, state=TrialState.PRUNED))
    writer = server.store.open_attempt(record.id)
    beats = itertools.count(1000)

    def check_with_heartbeat(study: JobRecord) -> None:
        writer.heartbeat(wall_clock_s=float(next(beats)), progress={})

    monkeypatch.setattr("service.api.routes.trials._check_evaluations", check_with_heartbeat)
    path = f"/v1/studies/{record.id}/trials"
    for _ in range(2):
        assert http.post(f"{path}/{number}:evaluate").status_code == 202
        assert http.post(path, json={"label": "by hand", "configuration": {"x": 0.5}}).status_code == 202
    actions = [entry.action for entry in AccountStore(server.store).audit(target=f"job {record.id}")]
    assert actions == ["trial.evaluate", "trial.enqueue"]
    assert server.cluster.num_wakes == 2


def test_only_what_was_pruned_or_failed_is_evaluated(http: httpx.Client, server: ApiServer) -> None:
    record = finished_study(server.store)
    path = f"/v1/studies/{record.id}"
    trials = http.get(f"{path}/trials", params={"limit": 100}).json()["trials"]
    number = next(trial["number"] for trial in trials if trial["state"] == "COMPLETE")
    refused = http.post(f"{path}/trials/{number}:evaluate")
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        f"trial {number} is COMPLETE; only a trial that is PRUNED or has failed (FAIL) is evaluated",
    )
    assert http.post(f"{path}/trials/99999:evaluate").status_code == 404
    assert SteeringStore(server.store).evaluation_requests(record.id) == ()


def test_a_merge_is_enqueued_once(http: httpx.Client, server: ApiServer) -> None:
    record = finished_study(server.store)
    path = f"/v1/studies/{record.id}/trials"
    body = {"label": "by hand", "configuration": {"x": 0.5}, "reason": "why not"}
    answers = [http.post(path, json=body) for _ in range(2)]
    assert [(answer.status_code, answer.json()["state"]) for answer in answers] == [(202, "STOPPED")] * 2
    (request,) = SteeringStore(server.store).evaluation_requests(record.id)
    assert (request.label, request.configuration, request.recipe) == ("by hand", {"x": 0.5}, None)
    (payload,) = [event.payload for event in server.store.events(record.id) if event.kind == "steered"]
    assert (payload["action"], payload["reason"]) == ("enqueue", "why not")
    assert server.cluster.num_wakes == 1
    other = http.post(path, json={"label": "by hand", "recipe": {"x": 1}})
    assert (other.status_code, "give another label" in other.text) == (409, True)


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ({"configuration": {}}, "label"),
        ({"label": "", "configuration": {}}, "label"),
        ({"label": "a\nb", "configuration": {}}, "label"),
        ({"label": "a"}, "recipe"),
        ({"label": "a", "recipe": {}, "configuration": {}}, "configuration"),
        ({"label": "a", "recipe": []}, "recipe"),
    ],
)
def test_what_is_enqueued_is_one_merge(http: httpx.Client, server: ApiServer, sent: dict[str, Any], field: str) -> None:
    record = finished_study(server.store)
    answer = http.post(f"/v1/studies/{record.id}/trials", json=sent)
    assert (answer.status_code, [problem["field"] for problem in answer.json()["problems"]]) == (422, [field])
    assert server.store.job(record.id) == record


def test_limits_that_are_not_edited_are_not_checked(http: httpx.Client, server: ApiServer) -> None:
    """A study that has reached a limit, and scores held-out data, may still be edited."""
    record = stored_study(server.store)
    path = f"/v1/studies/{record.id}"
    assert edit(http, path, {"limits": {"max_wall_clock_s": 60, "max_gpu_hours": 2}}).status_code == 200
    server.store.open_attempt(record.id, as_driver=True).heartbeat(wall_clock_s=7200.0)
    assert edit(http, path, {"max_trials": 99}).status_code == 200
    refused = edit(http, path, {"replicas": 3})
    assert [problem["field"] for problem in refused.json()["problems"]] == ["limits.max_gpu_hours"]


def test_a_stopped_search_gets_no_other_number_of_trials(http: httpx.Client, server: ApiServer) -> None:
    path = f"/v1/studies/{stored_study(server.store).id}"
    assert http.post(f"{path}:stop").status_code == 202
    refused = edit(http, path, {"max_trials": 99})
    assert (refused.status_code, "the search is stopped by request" in refused.json()["detail"]) == (409, True)


@pytest.mark.parametrize("algorithm", ["gradient", "hm3"])
def test_searchers_that_plan_steps_keep_their_trials(http: httpx.Client, server: ApiServer, algorithm: str) -> None:
    """They get neither fewer trials nor trials in between."""
    accepted = {**finished_study(server.store).accepted, "algorithm": algorithm}
    source = stored_study(server.store)
    record = server.store.create_job(kind="search", name="s", document=source.document, accepted=accepted)
    writer = server.store.open_attempt(record.id, as_driver=True)
    writer.add_trial(
        next(t for t in run_record().trials if isinstance(t, TrialRecord) and t.state is TrialState.PRUNED)
    )
    (number,) = server.store.trial_numbers(record.id)
    path = f"/v1/studies/{record.id}"
    fewer = edit(http, path, {"max_trials": source.document["search"]["max_trials"] - 1})
    assert (fewer.status_code, "has planned its steps" in fewer.text) == (422, True)
    refused = http.post(f"{path}/trials/{number}:evaluate")
    assert (refused.status_code, "send the request when it is COMPLETE" in refused.text) == (409, True)
    refused = http.post(f"{path}/trials", json={"label": "a", "recipe": {}})
    assert (refused.status_code, "send the request when it is COMPLETE" in refused.text) == (409, True)
    asked = next(t for t in run_record().trials if isinstance(t, TrialRecord) and t.state is TrialState.COMPLETE)
    writer.add_trial(replace(asked, number=number + 1, origin=Origin.USER))
    more = edit(http, path, {"max_trials": source.document["search"]["max_trials"] + 1})
    assert (more.status_code, f"requested trials after the search ({number + 1})" in more.text) == (422, True)
    writer.set_state(JobState.COMPLETE)
    assert http.post(f"{path}/trials/{number}:evaluate").status_code == 202
