"""The server and its OpenAPI document agree, for any request."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import schemathesis.hooks
from fastapi.routing import APIRoute
from schemathesis.engine import Status, from_schema
from schemathesis.engine.events import FatalError, NonFatalError, ScenarioFinished
from schemathesis.generation.meta import CoveragePhaseData

from search_spaces.section import NAME
from service.api import export_queue
from service.api.export_queue import Exports
from service.api.limits.rates import Rate, RateLimits
from service.api.permissions import rule_of
from service.api.problems import PROBLEM_JSON
from service.errors import NotFound
from service.notifications.signatures import new_webhook_secret
from service.store import SampleText
from service.store.accounts import AccountStore, name_problem
from service.store.exports import ExportStore
from service.store.notifications import NotificationStore
from service.types import Coverage, ExportRecord, ExportState, JobRecord, JobState, Scope, TrialState
from tests.service.api.accounts import OPERATOR, Company, bearer
from tests.service.api.harness import (
    ApiServer,
    analysed_fleet,
    document,
    finetuning,
    finished_finetune,
    finished_study,
    stored_finetune,
    stored_study,
)
from tests.service.api.ray_dashboard.upstream import upstream
from tests.service.jobs.serving.local import Served, served
from workers.types import Split

EXPORT = "e" * 32
CONFIGURATION: dict[str, Any] = {
    "seed": 0,
    "generation": {"max-examples": 5, "deterministic": True},
    "phases": {"stateful": {"enabled": False}},
    # A study that is well formed may name models that are not there, and a server without users needs no token.
    "checks": {"positive_data_acceptance": {"enabled": False}, "ignored_auth": {"enabled": False}},
}


# Operations are shared out in turn, so that the few with thousands of requests are in different parts.
NUM_PARTS = 3

UNLIMITED = RateLimits(*(Rate(math.inf, math.inf) for _ in range(4)))


@pytest.fixture
def _waiting_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports that are asked for stay WAITING: their writer looks for them once, before there are any."""
    monkeypatch.setattr(export_queue, "LOOK_S", 3600.0)


@pytest.fixture
def _plain_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client of Schemathesis not look for a file with passwords and for proxies before each request."""
    monkeypatch.setattr("requests.sessions.get_netrc_auth", lambda _: None)
    monkeypatch.setattr("requests.sessions.get_environ_proxies", lambda *_, **__: {})


@pytest.fixture  # of each part, so that its requests and their answers do not depend on other parts
def server(tmp_path_factory: pytest.TempPathFactory, _waiting_exports: None) -> Iterator[ApiServer]:
    with ApiServer(tmp_path_factory.mktemp("api"), rates=UNLIMITED) as server, upstream({"/api/jobs/": []}) as ray:
        server.cluster.ray = ray.dashboard
        services = server.app.state.services
        # Another queue than the writer's, which a request would wake.
        server.app.state.services = replace(services, exports=Exports(server.store, server.data_dir))
        yield server


@pytest.fixture
def chat(server: ApiServer) -> Iterator[Served]:
    """A served study whose driver is in this process."""
    with served(server.store, finished_study(server.store, num_trials=5)) as chat:
        yield chat


@pytest.fixture
def schema(server: ApiServer, chat: Served) -> Iterator[Any]:
    """The OpenAPI document for Schemathesis. Some of the well-formed names in its requests are of existing jobs."""
    finished, marked = (finished_study(server.store, num_trials=5) for _ in range(2))
    searched = finished_study(server.store)
    pruned = server.store.trials(searched.id, state=TrialState.PRUNED)[0].number
    AccountStore(server.store).add_team("red", actor=OPERATOR)
    pictured = [SampleText("cat/1.png", "cat", b"RIFF")]
    server.store.open_attempt(finished.id).add_prompts(Split.SEARCH, "math", pictured)
    created, failed = stored_study(server.store), stored_study(server.store)
    server.store.open_attempt(failed.id).set_state(JobState.FAILED, "no engine")
    analysis = {"samples": 3, "fleets": [analysed_fleet("mergopt", 1, 2, 3, 4)]}
    tuned = finished_finetune(server.store, server.data_dir, analysis=analysis)
    begun = stored_finetune(server.store)
    lost = stored_finetune(server.store)
    server.store.open_attempt(lost.id).set_state(JobState.FAILED, "the loss is nan")
    export = ExportRecord(EXPORT, finished.id, 1, "float32", ExportState.COMPLETE, created_at=1.0)
    ExportStore(server.store).add_export(export)
    directory = server.app.state.services.exports.directory(export)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    schema = schemathesis.openapi.from_url(
        f"{server.url}/openapi.json", config=schemathesis.Config.from_dict(CONFIGURATION)
    )

    turns = itertools.cycle((finished, finished, created, None))
    tuned_turns = itertools.cycle((tuned, tuned, begun, None))

    pages = itertools.cycle(("api/jobs/", None))
    numbers = itertools.count()
    configurations = itertools.cycle((True, False))

    def disposable() -> tuple[str, str]:
        """A study that has ended, and a complete export of it, to be deleted."""
        study = stored_study(server.store)
        server.store.open_attempt(study.id).set_state(JobState.CANCELLED)
        name = f"{next(numbers):032x}"
        ExportStore(server.store).add_export(
            ExportRecord(name, study.id, 1, "float32", ExportState.COMPLETE, created_at=1.0)
        )
        return study.id, name

    complete = created

    def ended() -> JobRecord:
        """A study that is COMPLETE: the last one, or a new one if a request has resumed the last one."""
        nonlocal complete
        if server.store.job(complete.id).state is not JobState.COMPLETE:
            complete = stored_study(server.store)
            server.store.open_attempt(complete.id).set_state(JobState.COMPLETE)
        return complete

    waits = created

    def waiting() -> JobRecord:
        """A study that has not ended and is not paused: the last one, or a new one if a request has changed it."""
        nonlocal waits
        now = server.store.job(waits.id)
        if now.state.is_finished or now.is_paused:
            waits = stored_study(server.store)
        return waits

    def webhook() -> str:
        """The id of the only webhook; adds one if a request has removed it."""
        notifications = NotificationStore(server.store)
        if (there := notifications.webhooks()) and len(there) == 1:
            return there[0].id
        for before in there:
            notifications.remove_webhook(before.id, actor=OPERATOR)
        options: dict[str, Any] = {"secret": new_webhook_secret(), "events": (), "owner": None, "covers": Coverage.ALL}
        return notifications.add_webhook("https://hook.invalid/", **options, actor=OPERATOR).id

    def of_finetune(path_parameters: dict[str, Any], operation: Any) -> dict[str, Any]:
        name = str(path_parameters["finetune_id"])
        if len(name) != 32 or not set(name) <= set("0123456789abcdef") or (given := next(tuned_turns)) is None:
            return path_parameters
        if operation.path.endswith(":resume"):
            given = lost
        elif operation.path.endswith(("/events", "/download")):  # of what has not ended there is no end, and no expert
            given = tuned
        elif operation.method.upper() == "DELETE":
            given = stored_finetune(server.store)
            server.store.open_attempt(given.id).set_state(JobState.CANCELLED)
        return path_parameters | {"finetune_id": given.id} | ({"alias": "math"} if "alias" in path_parameters else {})

    def is_picture(path_parameters: dict[str, Any]) -> bool:
        """Whether parameters are well formed, so that a picture can take the place of the one that they name."""
        split, name, position = (str(path_parameters[key]) for key in ("split", "objective", "position"))
        return (
            split in list(Split)
            and re.fullmatch(NAME, name) is not None
            and re.fullmatch("[0-9]+", position) is not None
        )

    def new_served() -> JobRecord:
        document = {"study": finished.id, "idle_minutes": 30.0, "shares_engines": False}
        return server.store.create_job(kind="serving", name="chat", document=document, accepted={})

    failed_chat = new_served()
    server.store.open_attempt(failed_chat.id).set_state(JobState.FAILED, "no engine")

    def of_served(path_parameters: dict[str, Any], operation: Any) -> dict[str, Any]:
        """Path parameters of a served study: completions go to the study with a driver, other requests to others."""
        name = str(path_parameters["served_id"])
        if len(name) != 32 or not set(name) <= set("0123456789abcdef"):
            return path_parameters
        if "/openai/" in operation.path:
            return {"served_id": chat.job.id}
        if operation.path.endswith((":resume", "/events")):
            return {"served_id": failed_chat.id}
        given = new_served()
        if operation.method.upper() == "DELETE":
            server.store.open_attempt(given.id).set_state(JobState.CANCELLED)
        return {"served_id": given.id}

    @schema.hook
    def map_path_parameters(context: Any, path_parameters: Any) -> Any:
        if set(path_parameters or {}) == {"team"} and name_problem(str(path_parameters["team"])) is None:
            return {"team": "red"}
        if "served_id" in (path_parameters or {}):
            return of_served(path_parameters, context.operation)
        if "finetune_id" in (path_parameters or {}):
            return of_finetune(path_parameters, context.operation)
        if context.operation.path.startswith("/ray/") and (page := next(pages)) is not None:
            return {"path": page}
        if len(str((path_parameters or {}).get("webhook_id", ""))) == 32:
            return path_parameters | {"webhook_id": webhook()}
        name = str((path_parameters or {}).get("study_id", ""))
        is_name = len(name) == 32 and set(name) <= set("0123456789abcdef")
        if is_name and context.operation.path.endswith(":resume"):
            path_parameters["study_id"] = failed.id
        elif is_name and context.operation.path.endswith((":pause", ":stop", ":cancel")):
            path_parameters["study_id"] = waiting().id
        elif is_name and context.operation.label == "POST /v1/studies/{study_id}/benchmarks":
            path_parameters["study_id"] = ended().id
        elif is_name and context.operation.path.endswith("/validity"):  # which lets the study continue
            return path_parameters | {"study_id": marked.id, "number": 1}
        elif is_name and context.operation.path.endswith(":serve"):
            return path_parameters | {"study_id": chat.job.document["study"], "number": 1}  # it is served already
        elif is_name and context.operation.path.endswith(("/samples", "{number}/plots/{name}")):
            return path_parameters | {"study_id": finished.id, "number": 1}
        elif is_name and "/pictures/" in context.operation.path and is_picture(path_parameters):
            return {"study_id": finished.id, "split": "search", "objective": "math", "position": 0}
        elif is_name and context.operation.path.endswith(":evaluate"):
            return path_parameters | {"study_id": searched.id, "number": pruned}
        elif is_name and (study := next(turns)) is not None:
            if context.operation.method.upper() == "DELETE":
                ours = dict(zip(("study_id", "export_id"), disposable(), strict=True))
                return path_parameters | {key: ours[key] for key in path_parameters}
            streams = context.operation.path.endswith("/events")  # of what has not ended they do not end
            path_parameters["study_id"] = finished.id if streams else study.id
            if study is finished and str(path_parameters.get("number", "")).isdecimal():
                path_parameters["number"] = 1  # a trial that is there
            if "export_id" in path_parameters:
                path_parameters["export_id"] = EXPORT
        return path_parameters

    @schema.hook
    def map_body(context: Any, body: Any) -> Any:
        if context.operation.path == "/v1/studies:from_mergekit" and isinstance(body, dict) and next(configurations):
            return {"merge_method": "linear", "models": [{"model": "a/b"}, {"model": "a/c"}]}
        is_move = context.operation.path == "/v1/queue:move" and isinstance(body, dict)
        if is_move and isinstance(body.get("job"), str) and len(body["job"]) == 32:  # a job that waits
            body["job"] = stored_study(server.store).id
        return body

    @schema.hook
    def filter_case(context: Any, case: Any) -> bool:
        return not is_tried_elsewhere(case)

    @schema.hook
    def map_query(context: Any, query: Any) -> Any:
        against = (query or {}).get("against")  # of any type where a mistake is generated
        if isinstance(against, list) and any(len(str(name)) == 32 for name in against):
            query["against"] = [tuned.id]
        return query

    @schemathesis.hook
    def before_call(context: Any, case: Any, kwargs: Any) -> None:
        """Change generated requests that would not end or would always be refused.

        Schemathesis also sends names that it has seen in responses. Events are requested only of jobs that have ended,
        because other streams do not end. A key that was used before gets 409 for any body: bodies in JSON get new keys.
        """
        parameters = case.path_parameters or {}
        is_positive = case.meta is None or case.meta.generation.mode.is_positive
        if is_positive and case.operation.path.endswith("/served/{served_id}/sharing"):
            with suppress(NotFound):  # a served study has the sharing of its study
                case.body = {"sharing": server.store.job(finished.id).sharing.value}
        if case.query and is_positive:
            for name in ("team", "sharing"):  # a server without users has no teams, and refuses every name
                case.query.pop(name, None)
        if is_positive and case.operation.path.endswith("/holdout"):  # few trials have held-out values
            with suppress(NotFound):
                server.store.job(str(parameters.get("study_id")))
                parameters["study_id"], case.query = finished.id, {**(case.query or {}), "reference": 1}
        is_export = case.method.upper() == "POST" and case.operation.path.endswith("/exports")
        if is_positive and is_export and next(configurations):  # of a study that has trials to export
            with suppress(NotFound):
                server.store.job(str(parameters.get("study_id")))
                parameters["study_id"], case.body = finished.id, {"trial": "best"}
        if "/openai/" in case.operation.path:  # without a driver the answer is 503
            with suppress(NotFound):
                server.store.job(str(parameters.get("served_id")))
                parameters["served_id"] = chat.job.id
        if "/openai/" in case.operation.path and isinstance(case.body, dict):
            if isinstance(case.body.get("model"), str):
                case.body["model"] = "1"
            for name in ("max_tokens", "max_completion_tokens"):  # the answers are short
                if isinstance(case.body.get(name), int):
                    case.body[name] = min(case.body[name], 8)
        if case.operation.path in ("/v1/served", "/v1/served/{served_id}:resume") and case.method == "POST":
            for job in server.store.unfinished_jobs():  # only so many may be served at the same time
                if job.kind == "serving" and job.id not in (chat.job.id, parameters.get("served_id")):
                    server.store.open_attempt(job.id).set_state(JobState.CANCELLED)
        if case.operation.label == "POST /v1/served" and isinstance(case.body, dict) and "study" in case.body:
            case.body["study"] = stored_study(server.store).id  # the others may be served already
        if case.operation.path.endswith("/events"):
            for kind, known in (("study_id", finished), ("finetune_id", tuned), ("served_id", failed_chat)):
                with suppress(NotFound):
                    if not server.store.job(str(parameters.get(kind))).state.is_finished:
                        parameters[kind] = known.id
        if case.operation.path == "/v1/events":  # the stream has no end
            case.headers = {**(case.headers or {}), "Accept": "application/json"}
        if case.headers and "If-Match" in case.headers and case.path_parameters:
            case.headers["If-Match"] = "*"  # whatever was edited before
        if case.headers and "Idempotency-Key" in case.headers and case.operation.path.endswith("/studies"):
            case.headers["Idempotency-Key"] += f"s{next(numbers)}" if case.media_type == "application/json" else "s"

    yield schema
    schemathesis.hooks.unregister(before_call)


def is_tried_elsewhere(case: Any) -> bool:
    """Whether a posted study has a value in a benchmark or a held-out task that is tried at another place too.

    Benchmarks have the schema of those that are added to a study, held-out tasks have that of objectives.
    """
    tried = case.meta and case.meta.phase.data
    if case.operation.label != "POST /v1/studies" or not isinstance(tried, CoveragePhaseData):
        return False
    return any(
        (tried.location or "").startswith(f"/properties/{name}/items/properties/")
        or tried.description.startswith(f"Object with valid '{name}' value: Single-item array: Object with ")
        for name in ("benchmarks", "holdout")
    )


def test_the_values_that_are_tried_elsewhere_are_the_same(http: httpx.Client) -> None:
    """Schemas of which only one place is tried are equal at all places."""
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    study, added = (schemas[name]["properties"] for name in ("Study", "AddedBenchmarks"))
    assert study["benchmarks"]["items"] == added["benchmarks"]["items"]
    assert study["holdout"]["items"] in study["objectives"]["items"]["oneOf"]


def problems_of(schema: Any) -> list[str]:
    """Descriptions of wrong answers to generated requests."""
    problems = []
    for event in from_schema(schema).execute():
        if isinstance(event, NonFatalError | FatalError):
            problems.append(str(event))
        elif isinstance(event, ScenarioFinished):
            problems += [
                f"{event.recorder.label}: {info.failure}\n{info.code_sample}"
                for checks in event.recorder.checks.values()
                for failure in checks
                if failure.status is Status.FAILURE and (info := failure.failure_info) is not None
            ]
    return problems


@pytest.mark.slow
@pytest.mark.usefixtures("_plain_requests")
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_the_server_keeps_to_its_document(server: ApiServer, schema: Any, part: int) -> None:
    """Generated requests get documented answers, and each operation is seen to work, not only to refuse.

    Each part has its share of the operations, so that several processes work on them.
    """
    operations = [(method.upper(), path) for path, item in schema.raw_schema["paths"].items() for method in item]
    tested = set(operations[part::NUM_PARTS])
    problems = problems_of(of_labels(schema, {f"{method} {path}" for method, path in tested}))
    assert not problems, "\n\n".join(problems)
    told = httpx.get(f"{server.url}/metrics").text
    answered = answers(told)
    # Without an identity provider there are no logins, and without accounts no addresses of users.
    managed = {route.path_format for route in documented_routes(server) if is_managed(route)}
    managed |= {"/v1/login", "/v1/login/callback", "/v1/users/{user}/mail"}
    sessions = ("POST", "/v1/session")  # without accounts there is none to begin
    for method, path in tested:
        works = (method, path, "2") in answered or path in managed or (method, path) == sessions
        assert works, (method, path, told)
    assert not any(status == "5" for _, _, status in answered), told


def of_labels(schema: Any, labels: Collection[str]) -> Any:
    """The part of a document for Schemathesis that has the operations with these labels, such as "GET /v1/me"."""
    return schema.include(lambda context: context.operation.label in labels)


def documented_routes(server: ApiServer) -> list[APIRoute]:
    return [route for route in server.app.routes if isinstance(route, APIRoute) and route.include_in_schema]


def answers(told: str) -> set[tuple[str, str, str]]:
    """Method, route and first digit of the status of the answers that the metrics count."""
    return set(re.findall(r'method="(\w+)",route="([^"]+)",status="(\d)', told))


def is_managed(route: APIRoute) -> bool:
    """Whether a route manages accounts. A server without users refuses such routes."""
    return rule_of(route).scope is Scope.ADMIN


@pytest.mark.slow
@pytest.mark.usefixtures("_waiting_exports", "_plain_requests")
def test_with_accounts_it_keeps_to_its_document(tmp_path: Path) -> None:
    """With a token of an administrator and without one, generated requests get documented answers only.

    Every value that matters is tried for the routes that accounts change; for other routes, and for the bodies of new
    studies and fine-tunings, which have nothing of accounts, the parts above try them.
    """
    with (
        ApiServer(tmp_path, rates=UNLIMITED, has_open_metrics=True) as server,
        upstream({"/": []}) as ray,
    ):
        server.cluster.ray = ray.dashboard
        company = Company.on(server)
        few = {**CONFIGURATION, "generation": {"max-examples": 2, "deterministic": True}}
        root = company.tokens["root", Scope.ADMIN]
        for token, has_coverage in ((root, True), (root, False), (None, False)):
            phases = {
                **CONFIGURATION["phases"],
                "coverage": {"enabled": has_coverage},
                "fuzzing": {"enabled": not has_coverage},
            }
            schema = schemathesis.openapi.from_url(
                f"{server.url}/openapi.json", config=schemathesis.Config.from_dict({**few, "phases": phases})
            )
            # With Accept, events are a list: streams of jobs that have not ended would not end.
            schema.config.update(headers={**bearer(token), "Accept": "application/json"})
            if has_coverage:
                for name, body in (("studies", document()), ("finetunes", finetuning())):
                    posted = schema.raw_schema["paths"][f"/v1/{name}"]["post"]["requestBody"]
                    posted["content"]["application/json"]["schema"] = {"enum": [body]}
                schema = of_labels(schema, changed_by_accounts(server, schema.raw_schema))
            problems = problems_of(schema)
            assert not problems, "\n\n".join(problems)
        answered = answers(httpx.get(f"{server.url}/metrics").text)
        for route in ("/v1/users", "/v1/teams", "/v1/tokens"):
            assert {("POST", route, "2"), ("POST", route, "4")} <= answered
        assert not any(status == "5" for _, _, status in answered)


def changed_by_accounts(server: ApiServer, document: Mapping[str, Any]) -> set[str]:
    """Labels of the operations that manage accounts, or take a team or a sharing, which need a server with users."""
    managed = {route.path_format for route in documented_routes(server) if is_managed(route)}
    return {
        f"{method.upper()} {path}"
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if path in managed
        or path.endswith("/sharing")
        or {"team", "sharing"} & {parameter.get("name") for parameter in operation.get("parameters", ())}
    }


def test_every_route_is_described_with_its_refusals(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    assert "/v1/studies/{study_id}:cancel" in document["paths"]
    assert "/v1/studies/{study_id}:resume" in document["paths"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert operation["description"], where
            for status, answer in operation["responses"].items():
                media = set(answer.get("content", {}))
                kind = "none" if status in ("303", "304") else "problem" if int(status) >= 400 else "document"
                assert {"none": not media, "problem": media == {PROBLEM_JSON}, "document": media}[kind], (where, status)
            if "{" in path:
                assert "404" in operation["responses"], where
    assert set(document["paths"]["/v1/studies"]["post"]["requestBody"]["content"]) >= {
        "application/json",
        "application/yaml",
    }
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_every_reference_leads_somewhere(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    references = set()

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(reference := node.get("$ref"), str):
                references.add(reference)
            for inner in node.values():
                collect(inner)
        elif isinstance(node, list):
            for inner in node:
                collect(inner)

    collect(document)
    assert references
    assert {r.removeprefix("#/components/schemas/") for r in references} <= set(document["components"]["schemas"])


def test_states_are_those_of_studies(http: httpx.Client) -> None:
    parameters = http.get("/openapi.json").json()["paths"]["/v1/studies"]["get"]["parameters"]
    (state,) = (parameter for parameter in parameters if parameter["name"] == "state")
    assert next(iter(state["schema"]["anyOf"]))["enum"] == [state.value for state in JobState]
