"""Trials that are served over HTTP: OpenAI's own client completes prompts through the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa

from service.store import schema
from service.store.connection import transaction
from service.store.documents import ENDPOINT
from service.types import ALIVE_S, JobState, Scope, Sharing
from tests.service.api.accounts import OPERATOR, Company
from tests.service.api.harness import ApiServer, finished_study
from tests.service.jobs.serving.local import Served, served

SAID: Any = {"role": "user", "content": "how many are two and three"}


@pytest.fixture
def chat(server: ApiServer) -> Iterator[Served]:
    with served(server.store, finished_study(server.store, num_trials=5)) as chat:
        yield chat


def client_of(server: ApiServer, chat: Served, token: str = "none", **options: Any) -> openai.OpenAI:
    base_url = f"{server.url}/v1/served/{chat.job.id}/openai/v1"
    return openai.OpenAI(base_url=base_url, api_key=token, max_retries=0, **options)


def digest(server: ApiServer, chat: Served, trial: int) -> str:
    return server.store.trial(chat.job.document["study"], trial).recipe.digest


def test_openai_client_completes_prompts(server: ApiServer, chat: Served) -> None:
    """Completions of chats and texts, whole and streamed, are those of the trial's recipe, whose digest they have."""
    client = client_of(server, chat)
    expected = digest(server, chat, 3)
    words = f"{expected[:8]} {SAID['content']}"
    answer = client.chat.completions.create(model="3", messages=[SAID], temperature=0)
    assert answer.choices[0].message.content == words
    assert (answer.choices[0].finish_reason, answer.system_fingerprint, answer.model) == ("stop", expected, "3")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(words.split())
    text = client.completions.create(model="3", prompt=SAID["content"], max_tokens=3)
    assert text.choices[0].text == " ".join(words.split()[:3])
    stream = client.chat.completions.create(
        model="3",
        messages=[SAID],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert len(deltas) == len(words.split())
    assert "".join(filter(None, deltas)) == words
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert {chunk.system_fingerprint for chunk in chunks} == {expected}
    texts = client.completions.create(model="3", prompt="a b", stream=True)
    assert "".join(chunk.choices[0].text for chunk in texts) == f"{expected[:8]} a b"


def test_trials_have_numbers_and_labels(server: ApiServer, chat: Served) -> None:
    """Models are the trials that did not fail; two trials differ; a baseline has its label as a second name."""
    client = client_of(server, chat)
    listed = [model.id for model in client.models.list()]
    study = chat.job.document["study"]
    trials = server.store.trials(study)
    assert listed == [str(trial.number) for trial in trials if trial.state.value != "FAIL"]
    base = next(trial for trial in trials if trial.label == "base")
    for name in (str(base.number), "base"):
        answer = client.completions.create(model=name, prompt="x")
        assert answer.system_fingerprint == base.recipe.digest
    assert client.completions.create(model="3", prompt="x").system_fingerprint != base.recipe.digest


@pytest.mark.parametrize(
    ("change", "param", "status"),
    [
        ({"model": "4711"}, "model", 404),
        ({"model": "best expert"}, "model", 404),
        ({"temperature": 9}, "temperature", 400),
        ({"n": 2}, "n", 400),
        ({"messages": []}, "messages", 400),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role", 400),
        ({"tools": [{"type": "function"}]}, "tools", 400),
        ({"max_tokens": 0}, "max_tokens", 400),
        ({"colour": "red"}, "colour", 400),
    ],
)
def test_wrong_fields_are_named(
    server: ApiServer, chat: Served, change: dict[str, Any], param: str, status: int
) -> None:
    """A request with a wrong field is refused in the form of OpenAI's API, and as a problem document."""
    url = f"{server.url}/v1/served/{chat.job.id}/openai/v1/chat/completions"
    answer = httpx.post(url, json={"model": "1", "messages": [SAID], **change})
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param or answer.json()["error"]["param"].startswith(param)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["status"] == status
    assert answer.headers["content-type"] == "application/problem+json"


def test_server_refuses_in_both_forms(server: ApiServer, chat: Served) -> None:
    """What the server itself refuses on these routes has OpenAI's field `error` too; other routes have none."""
    url = f"{server.url}/v1/served/{'0' * 32}/openai/v1/models"
    refused = httpx.get(url).json()
    assert refused["error"]["message"] == refused["detail"]
    large = httpx.post(
        f"{server.url}/v1/served/{chat.job.id}/openai/v1/completions",
        content=b" " * (2**20 + 1),
        headers={"Content-Type": "application/json"},
    )
    assert (large.status_code, large.json()["error"]["type"]) == (413, "invalid_request_error")
    assert "error" not in httpx.get(f"{server.url}/v1/served/{'0' * 32}").json()


def test_lost_replica_is_told(server: ApiServer, chat: Served) -> None:
    """A replica that crashes is a 503 with a time to retry, before and within a stream."""
    chat.completer.worker.crashing = [digest(server, chat, 3)]
    with pytest.raises(openai.InternalServerError) as caught:
        client_of(server, chat).completions.create(model="3", prompt="x")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "5"
    assert caught.value.code == "replica_lost"


def test_search_ends_a_stream(server: ApiServer) -> None:
    """A stream ends with an error when its engine goes to a search; later requests say what is waited for."""
    with served(server.store, finished_study(server.store, num_trials=5), sample_delay_s=0.05) as chat:
        client = client_of(server, chat)
        stream = iter(client.completions.create(model="3", prompt="a " * 200, stream=True, max_tokens=200))
        next(stream)
        chat.gate.close("study math to end")
        with pytest.raises(openai.APIError, match="study math to end"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="study math to end") as caught:
            client.completions.create(model="3", prompt="x")
        assert caught.value.status_code == 503
        assert not chat.completer.replica._batches or wait_until_free(chat)


def wait_until_free(chat: Served) -> bool:
    """Whether the engine becomes idle within a moment."""
    deadline = time.monotonic() + 5
    while chat.completer.replica._batches and time.monotonic() < deadline:
        time.sleep(0.02)
    return not chat.completer.replica._batches


@pytest.mark.parametrize("stream", [True, False])
def test_closed_connection_frees_the_replica(server: ApiServer, stream: bool) -> None:
    """A client that closes its connection ends its completion, streamed or not; the engine is free at once."""
    with served(server.store, finished_study(server.store, num_trials=5), sample_delay_s=0.05) as chat:
        url = f"{server.url}/v1/served/{chat.job.id}/openai/v1/completions"
        body = {"model": "3", "prompt": "a " * 2000, "max_tokens": 2000, "stream": stream}

        async def read() -> None:
            async with (
                asyncio.timeout(0.7),
                httpx.AsyncClient() as http,
                http.stream("POST", url, json=body, timeout=30) as answer,
            ):
                async for _ in answer.aiter_raw():
                    pass

        with pytest.raises(TimeoutError):
            asyncio.run(read())
        assert chat.completer.requests, "the completion had begun"
        assert wait_until_free(chat)


def test_requests_of_one_merge_share_steps(server: ApiServer) -> None:
    """Two completions of one merge are generated together, in hardly more time than one."""
    with served(server.store, finished_study(server.store, num_trials=5), sample_delay_s=0.02) as chat:
        url = f"{server.url}/v1/served/{chat.job.id}/openai/v1/completions"
        body = {"model": "3", "prompt": "a " * 49, "max_tokens": 50}

        async def both() -> float:
            async with httpx.AsyncClient(timeout=60) as http:
                started = time.monotonic()
                answers = await asyncio.gather(*(http.post(url, json=body) for _ in range(4)))
                assert [answer.status_code for answer in answers] == [200] * 4
                return time.monotonic() - started

        assert asyncio.run(both()) < 4 * 50 * 0.02 * 0.75


def test_driver_that_is_gone_is_told(server: ApiServer) -> None:
    """Without a driver's application the answer is 503; after the end of serving it is 410, which is final."""
    with served(server.store, finished_study(server.store, num_trials=5)) as chat:
        pass
    client = client_of(server, chat)
    with pytest.raises(openai.InternalServerError, match="its driver does not answer") as caught:
        client.models.list()
    assert caught.value.status_code == 503
    server.store.open_attempt(chat.job.id).set_state(JobState.COMPLETE, "no request came")
    with pytest.raises(openai.APIStatusError, match="no request came") as ended:
        client.models.list()
    assert ended.value.status_code == 410


# -- serving a trial ---------------------------------------------------------------------------------------------------


def test_a_trial_is_served_once(server: ApiServer, http: httpx.Client) -> None:
    """Serving a trial creates a served study; serving another trial of the study uses the same one."""
    study = finished_study(server.store, num_trials=5)
    made = http.post(f"/v1/studies/{study.id}/trials/3:serve", json={"idle_minutes": 5})
    assert made.status_code == 202
    document = made.json()
    assert (document["model"], document["study"], document["kind"]) == ("3", study.id, "serving")
    assert document["links"]["openai"] == f"/v1/served/{document['id']}/openai/v1"
    again = http.post(f"/v1/studies/{study.id}/trials/4:serve")
    assert (again.status_code, again.json()["id"], again.json()["model"]) == (200, document["id"], "4")
    assert [job["id"] for job in http.get("/v1/served").json()["served"]] == [document["id"]]
    assert http.get(f"/v1/served/{document['id']}/request").json()["idle_minutes"] == 5
    assert http.post(f"/v1/studies/{study.id}/trials/4711:serve").status_code == 404
    waiting = http.get(f"/v1/served/{document['id']}/openai/v1/models")
    assert waiting.status_code == 503
    assert "waits for its driver" in waiting.json()["detail"]
    shared = http.post(f"/v1/studies/{study.id}/trials/4:serve", json={"shares_engines": True})
    assert shared.status_code == 409
    assert http.post(f"/v1/served/{document['id']}:cancel").status_code == 202
    assert http.post(f"/v1/studies/{study.id}/trials/4:serve").json()["id"] != document["id"]


@pytest.mark.parametrize("wrong", [{"idle_minutes": 0}, {"idle_minutes": 1e6}, {"trial": 3}])
def test_wrong_options_of_serving_are_named(server: ApiServer, http: httpx.Client, wrong: dict[str, Any]) -> None:
    study = finished_study(server.store, num_trials=5)
    refused = http.post(f"/v1/studies/{study.id}/trials/3:serve", json=wrong)
    assert refused.status_code == 422
    assert [problem["field"] for problem in refused.json()["problems"]] == list(wrong)


def test_a_drained_server_serves_nothing_new(server: ApiServer, http: httpx.Client) -> None:
    study = finished_study(server.store, num_trials=5)
    server.store.set_drained(drained=True)
    assert http.post(f"/v1/studies/{study.id}/trials/3:serve").status_code == 503


def test_a_team_serves_a_limited_number(server: ApiServer, http: httpx.Client) -> None:
    """A team may serve only so many studies at the same time; the refusal names them."""
    studies = [finished_study(server.store, num_trials=5, name=f"s{number}") for number in range(5)]
    for study in studies[:-1]:
        assert http.post(f"/v1/studies/{study.id}/trials/3:serve").status_code == 202
    refused = http.post(f"/v1/studies/{studies[-1].id}/trials/3:serve")
    assert refused.status_code == 409
    assert "s0-served" in refused.json()["detail"]


def test_a_study_is_served_once_by_both_routes(server: ApiServer, http: httpx.Client) -> None:
    """`POST /v1/served` refuses a study that is served already, and counts in the same limit as `:serve`."""
    studies = [finished_study(server.store, num_trials=5, name=f"s{number}") for number in range(5)]
    assert http.post("/v1/served", json={"study": studies[0].id, "name": "chat"}).status_code == 201
    again = http.post("/v1/served", json={"study": studies[0].id, "name": "chat"})
    assert (again.status_code, "served already, by chat" in again.json()["detail"]) == (409, True)
    assert http.post(f"/v1/studies/{studies[0].id}/trials/3:serve").status_code == 200
    for study in studies[1:-1]:
        assert http.post("/v1/served", json={"study": study.id}).status_code == 201
    assert http.post("/v1/served", json={"study": studies[-1].id}).status_code == 409


def test_racing_requests_serve_a_study_once(server: ApiServer) -> None:
    """Of requests at the same moment, by either route, one creates the served study."""
    study = finished_study(server.store, num_trials=5)

    async def race() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            path = f"/v1/studies/{study.id}/trials/3:serve"
            both = [http.post(path), http.post("/v1/served", json={"study": study.id})]
            answers = await asyncio.gather(*both, *(http.post("/v1/served", json={"study": study.id}) for _ in "abcd"))
            return [answer.status_code for answer in answers]

    assert sorted(asyncio.run(race()))[-4:] == [409] * 4
    assert len([job for job in server.store.unfinished_jobs() if job.kind == "serving"]) == 1


def test_team_and_sharing_are_those_of_the_study(server: ApiServer) -> None:
    """A served study gets the team and sharing of its study, keeps no others, and changes them with the study."""
    company = Company.on(server)
    study = company.own(finished_study(server.store, num_trials=5), sharing=Sharing.ALL)
    with company.http("root") as http:
        for given, field in (({"team": "blue"}, "team"), ({"sharing": "private"}, "sharing")):
            refused = http.post("/v1/served", params=given, json={"study": study.id})
            assert refused.status_code == 422
            assert [problem["field"] for problem in refused.json()["problems"]] == [field]
        made = http.post("/v1/served", params={"team": "red"}, json={"study": study.id})
        assert made.status_code == 201
        path = f"/v1/served/{made.json()['id']}"
        assert (made.json()["team"], made.json()["sharing"]) == ("red", "all")
        assert http.put(f"{path}/sharing", json={"sharing": "all", "team": None}).status_code == 422
        assert http.put(f"{path}/sharing", json={"sharing": "all", "team": "red"}).status_code == 200
        shared = http.put(f"/v1/studies/{study.id}/sharing", json={"sharing": "private", "team": "blue"})
        assert shared.status_code == 200
        assert (shared.json()["id"], shared.json()["team"]) == (study.id, "blue")
        moved = http.get(path).json()
        assert (moved["team"], moved["sharing"]) == ("blue", "private")


def test_unusable_served_studies_are_not_returned(server: ApiServer) -> None:
    """`:serve` returns no served study that the sender may not use, and none that is paused and not the sender's."""
    company = Company.on(server)
    study = company.finished()
    path = f"/v1/studies/{study.id}/trials/3:serve"
    with company.http("member") as member, company.http("owner") as owner:
        with served(server.store, study) as chat:
            company.own(chat.job, owner="root", sharing=Sharing.PRIVATE)
            made = member.post(path)
            assert (made.status_code, made.json()["sharing"]) == (202, "team")
            again = owner.post(path)
            assert (again.status_code, again.json()["id"]) == (200, made.json()["id"])
        assert member.post(f"/v1/served/{made.json()['id']}:pause").status_code == 202
        assert member.post(path).json()["id"] == made.json()["id"], "who may resume it"
        other = owner.post(path)
        assert (other.status_code, other.json()["id"] != made.json()["id"]) == (202, True)
        assert member.post(path).json()["id"] == other.json()["id"], "one that is not paused comes first"


def test_limit_names_only_what_may_be_read(server: ApiServer) -> None:
    """The refusal of one study too many names no private served studies of others."""
    company = Company.on(server)
    for number in range(4):
        private = company.own(finished_study(server.store, num_trials=5, name=f"s{number}"), sharing=Sharing.PRIVATE)
        with company.http("owner") as http:
            assert http.post(f"/v1/studies/{private.id}/trials/3:serve").status_code == 202
    study = company.finished()
    with company.http("member") as http:
        refused = http.post(f"/v1/studies/{study.id}/trials/3:serve")
    assert (refused.status_code, "serves 4;" in refused.json()["detail"]) == (409, True)


def test_the_quota_of_served_studies_is_changed(server: ApiServer) -> None:
    """A team serves as many studies as `max_served` says; none is no limit, and the usage counts them."""
    company = Company.on(server)
    studies = [company.own(finished_study(server.store, num_trials=5, name=f"s{number}")) for number in range(6)]
    company.accounts.set_limits("red", {"max_served": 1}, actor=OPERATOR)
    with company.http("owner") as http:
        assert http.post(f"/v1/studies/{studies[0].id}/trials/3:serve").status_code == 202
        refused = http.post("/v1/served", json={"study": studies[1].id})
        assert (refused.status_code, refused.json()["detail"]) == (
            409,
            "quota max_served: team red may serve 1 study at the same time, and serves s0-served; cancel one "
            "(`mergesearch cancel NAME`)",
        )
        company.accounts.set_limits("red", {"max_served": None}, actor=OPERATOR)
        for study in studies[1:]:
            assert http.post("/v1/served", json={"study": study.id}).status_code == 201
        assert http.get("/v1/teams/red/usage").json()["served"] == 6


def test_resumes_and_moves_keep_the_quota(server: ApiServer) -> None:
    """A failed served study that is resumed, and one that moves to a team, count in the team's `max_served` too."""
    company = Company.on(server)
    studies = [company.own(finished_study(server.store, num_trials=5, name=f"s{number}")) for number in range(3)]
    for team in ("red", "blue"):
        company.accounts.set_limits(team, {"max_served": 1}, actor=OPERATOR)
    with company.http("owner") as http:
        failed = http.post("/v1/served", json={"study": studies[0].id}).json()["id"]
        server.store.open_attempt(failed).set_state(JobState.FAILED, "no engine")
        other = http.post("/v1/served", json={"study": studies[1].id}).json()["id"]
        refused = http.post(f"/v1/served/{failed}:resume")
        assert (refused.status_code, "serves chat" in refused.json()["detail"]) == (409, True)
        assert server.store.job(failed).state is JobState.FAILED
        assert http.post(f"/v1/served/{other}:resume").status_code == 202, "it counts already"
        assert http.post(f"/v1/served/{other}:cancel").status_code == 202
        assert http.post(f"/v1/served/{failed}:resume").status_code == 202
    company.own(studies[2], team="blue")
    with company.http("root") as http:
        assert http.post("/v1/served", json={"study": studies[2].id}).status_code == 201
        refused = http.put(f"/v1/studies/{studies[0].id}/sharing", json={"sharing": "team", "team": "blue"})
        assert (refused.status_code, "team blue may serve 1 study" in refused.json()["detail"]) == (409, True)
        assert (server.store.job(studies[0].id).team, server.store.job(failed).team) == ("red", "red")
        moved = http.put(f"/v1/studies/{studies[1].id}/sharing", json={"sharing": "team", "team": "blue"})
        assert moved.status_code == 200, "nothing serves it"


def test_used_up_gpu_hours_refuse_serving(server: ApiServer) -> None:
    """A team that has used up its quota of GPU-hours serves no further study, by either route."""
    company = Company.on(server)
    study = company.finished()
    worked = server.store.create_job(kind="search", name="x", document={}, accepted={}, owner="owner", team="red")
    server.store.open_attempt(worked.id).heartbeat(wall_clock_s=7200.0, num_gpus=1)
    company.accounts.set_limits("red", {"gpu_hours": 2.0}, actor=OPERATOR)
    with company.http("owner") as http:
        for refused in (
            http.post(f"/v1/studies/{study.id}/trials/3:serve"),
            http.post("/v1/served", json={"study": study.id}),
        ):
            assert refused.status_code == 403
            assert "quota gpu_hours of team red: 2.0 of 2 are used this month" in refused.json()["detail"]
        company.accounts.set_limits("red", {"gpu_hours": 3.0}, actor=OPERATOR)
        assert http.post(f"/v1/studies/{study.id}/trials/3:serve").status_code == 202


def test_rights_are_those_of_the_study(server: ApiServer) -> None:
    """Who may export models of a study may serve and use it; other teams cannot tell that it exists."""
    company = Company.on(server)
    study = company.finished()
    path = f"/v1/studies/{study.id}/trials/3:serve"
    for user, status in (("viewer", 403), ("stranger", 404), ("loner", 404), ("member", 202)):
        with company.http(user) as http:
            answer = http.post(path)
            assert answer.status_code == status, user
    job = server.store.job(answer.json()["id"])
    assert (job.owner, job.team) == ("member", "red")
    with company.http("member", Scope.READ) as http:
        assert http.post(path).status_code == 403
    with served(server.store, study) as chat:
        for user, status in (("viewer", 403), ("stranger", 404), ("member", 200), ("manager", 200), ("root", 200)):
            with company.http(user) as http:
                answer = http.get(f"/v1/served/{chat.job.id}/openai/v1/models")
                assert answer.status_code == status, user
        client = client_of(server, chat, company.tokens["member", Scope.SUBMIT])
        assert client.completions.create(model="3", prompt="x").choices
        with pytest.raises(openai.AuthenticationError):
            client_of(server, chat, "mst_wrong").models.list()
        company.own(study, team="blue")
        with company.http("manager") as http:
            assert http.get(f"/v1/served/{chat.job.id}/openai/v1/models").status_code == 404, "the study has moved"


def test_only_administrators_share_engines(server: ApiServer) -> None:
    """Only an administrator of the server may let a chat use the engines of a search."""
    company = Company.on(server)
    study = company.finished()
    for user, status in (("manager", 422), ("root", 202)):
        with company.http(user) as http:
            answer = http.post(f"/v1/studies/{study.id}/trials/3:serve", json={"shares_engines": True})
            assert answer.status_code == status, user
    audit = [entry for entry in company.accounts.audit() if entry.action == "job.create"]
    assert json.loads(json.dumps(audit[-1].after))["shares_engines"] is True


def test_requests_go_only_to_a_live_driver(server: ApiServer, chat: Served) -> None:
    """No request goes to the address of a driver without heartbeats, or of an earlier attempt."""
    url = f"{server.url}/v1/served/{chat.job.id}/openai/v1/completions"
    body = {"model": "3", "prompt": "x"}
    assert httpx.post(url, json=body).status_code == 200
    jobs = schema.studies
    with transaction(server.store.engine) as connection:
        silent = sa.update(jobs).where(jobs.c.id == chat.job.id).values(heartbeat_at=jobs.c.heartbeat_at - 2 * ALIVE_S)
        connection.execute(silent)
    for _ in range(2):
        refused = httpx.post(url, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_engine")
        server.store.open_attempt(chat.job.id, as_driver=True)  # a driver lives, but has stored no address yet
    assert len(chat.completer.requests) == 1


def test_a_foreign_401_is_a_503(server: ApiServer, chat: Served) -> None:
    """If another program answers at the driver's address and refuses the secret, no engine answers."""
    endpoint = server.store.document(chat.job.id, ENDPOINT)
    assert endpoint is not None
    chat.writer.set_document_named(ENDPOINT, {**endpoint, "secret": "another"})
    refused = httpx.get(f"{server.url}/v1/served/{chat.job.id}/openai/v1/models")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_engine")


def test_driver_answers_only_the_server(server: ApiServer, chat: Served) -> None:
    """The driver's application refuses requests without the secret, which no document of the API shows."""
    endpoint = server.store.document(chat.job.id, "endpoint")
    assert endpoint is not None
    for headers in ({}, {"Authorization": "Bearer mst_x"}):
        assert httpx.get(f"{endpoint['url']}/models", headers=headers).status_code == 401
    shown = [httpx.get(f"{server.url}/v1/served{path}").text for path in ("", f"/{chat.job.id}")]
    shown.append(httpx.get(f"{server.url}/v1/served/{chat.job.id}/events", headers={"Accept": "application/json"}).text)
    assert not any(endpoint["secret"] in text or endpoint["url"] in text for text in shown)
