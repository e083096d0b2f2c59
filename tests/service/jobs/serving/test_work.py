"""The driver of a served study, with replicas in this process instead of Ray Serve's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.engine import EngineOptions
from service.cluster.session import RaySession
from service.disk import job_dir
from service.jobs.base import RequestContext, Resources
from service.jobs.completers import Place
from service.jobs.driver import drive
from service.jobs.heartbeat import ENGINE, Heartbeat
from service.jobs.serving.kind import SERVING
from service.resolved_study import ResolvedStudy
from service.store import JobWriter, Store
from service.store.documents import ENDPOINT
from service.types import Account, JobRecord, JobState, Role
from tests.service.jobs.serving.local import LocalCompleters
from tests.service.site import Site


def resources(completers: LocalCompleters) -> Resources:
    def unused(*_: Any) -> Any:
        raise AssertionError("a served study neither scores nor trains")

    @contextmanager
    def opened(_: Any, engine: EngineOptions, *__: Any) -> Iterator[LocalCompleters]:
        completers.engine = engine
        yield completers

    session = RaySession(is_own=True, dashboard_url=None)
    return Resources(ray=lambda: nullcontext(session), scorer=unused, fit=unused, cluster=dict, completers=opened)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses of drivers, and those between their heartbeats, short."""
    monkeypatch.setattr("service.jobs.serving.work.POLL_S", 0.1)
    defaults = Heartbeat.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "interval_s", 0.1)


class Driver:
    """A driver of a served study in a thread."""

    def __init__(self, site: Site, study: str, *, idle_minutes: float = 30.0, **completers: Any) -> None:
        self.site = site
        self.completers = LocalCompleters(**completers)
        document = {"study": study, "idle_minutes": idle_minutes, "shares_engines": False}
        self.job = site.store.create_job(kind="serving", name="chat", document=document, accepted={})
        self.thread = threading.Thread(target=self._run)
        self.code: int | None = None

    def _run(self) -> None:
        self.code = drive(
            self.site.store,
            self.job.id,
            work_dir=job_dir(self.site.directory, self.job.id),
            resources=resources(self.completers),
        )

    def __enter__(self) -> Driver:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread.is_alive() and not self.record.state.is_finished:
            self.site.store.open_attempt(self.job.id, because="the test ends").set_state(JobState.CANCELLED)
        self.thread.join(20)
        assert not self.thread.is_alive()

    @property
    def record(self) -> JobRecord:
        return self.site.store.job(self.job.id)

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < deadline, (self.record, self.completers.history)
            time.sleep(0.05)

    def ask(self, **body: Any) -> httpx.Response:
        """Request a completion through the server."""
        url = f"{self.site.url}/v1/served/{self.job.id}/openai/v1/completions"
        return httpx.post(url, json={"model": "0", "prompt": "one two", **body}, timeout=30)

    def answers(self) -> bool:
        return self.ask().status_code == 200


def finished(site: Site) -> JobWriter:
    writer = site.begin(site.new_name())
    site.finish(writer)
    return writer


def test_driver_serves_until_it_is_idle(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver completes prompts with the merges of a study, reports it, and ends when no request comes."""
    monkeypatch.setattr("service.jobs.heartbeat.PREPARING_PATIENCE_S", 60.0)
    study = finished(site).job_id
    with Driver(site, study, idle_minutes=0.03) as driver:
        driver.until(driver.answers)
        driver.until(lambda: site.store.consecutive_failures(driver.job.id) == 0)
        digest = site.store.trial(study, 0).recipe.digest
        answer = driver.ask().json()
        assert answer["choices"][0]["text"] == f"{digest[:8]} one two"
        driver.until(lambda: driver.record.state is JobState.COMPLETE)
        assert driver.record.reason == "no request came for the time after which serving ends"
        assert driver.ask().status_code == 410
    assert driver.code == 0
    assert driver.record.patience_s == 3600, "an engine may take half an hour to start"
    assert driver.completers.history == ["open scorer"]
    progress = driver.record.progress
    assert progress is not None
    assert progress["engine"] == "scorer"
    assert progress["requests"] >= 2


@pytest.mark.parametrize(("on_gpus", "dtype"), [(False, "auto"), (True, "float32")])
def test_served_study_keeps_its_dtype(site: Site, monkeypatch: pytest.MonkeyPatch, on_gpus: bool, dtype: str) -> None:
    """A study that was checked for CPUs is served in float32 where `dtype: auto` would now be bfloat16."""
    monkeypatch.setattr("service.jobs.serving.work.runs_on_gpus", lambda *_: on_gpus)
    study = finished(site).job_id
    assert site.store.job(study).accepted["dtype"] == "float32"
    with Driver(site, study) as driver:
        driver.until(driver.answers)
        assert driver.completers.engine is not None
        assert driver.completers.engine.dtype == dtype


def test_served_study_uses_the_engine_of_its_search(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that leaves a share of its GPU to gradients is found by its options, which are those of the search."""
    study = finished(site).job_id
    resolved = replace(ResolvedStudy.of(site.store.job(study)), gpu_share_left=0.4)
    monkeypatch.setattr(ResolvedStudy, "of", lambda record: resolved)
    with Driver(site, study) as driver:
        driver.until(driver.answers)
        assert driver.completers.engine is not None
        assert driver.completers.engine.gpu_share_left == 0.4


def test_renamed_job_is_served(site: Site) -> None:
    """A served study that was renamed is served by later drivers, too."""
    study = finished(site).job_id
    driver = Driver(site, study)
    with httpx.Client(base_url=site.url) as http:
        path = f"/v1/served/{driver.job.id}"
        assert http.patch(path, json={"name": "talk"}, headers={"If-Match": "*"}).status_code == 200
    with driver:
        driver.until(driver.answers)
        assert driver.record.name == "talk"


def test_driver_waits_while_a_search_runs(site: Site) -> None:
    """Without a GPU, a chat ends its completions when a search begins, says what it waits for, and continues after."""
    study = finished(site).job_id
    with Driver(site, study) as driver:
        driver.until(driver.answers)
        search = site.begin(site.new_name())
        name = site.store.job(search.job_id).name
        search.heartbeat(wall_clock_s=1.0)
        driver.until(lambda: driver.ask().status_code == 503)
        driver.until(lambda: "the running studies to end" in str(driver.record.waiting_for))
        shown = driver.ask().json()["error"]["message"]
        assert "the running studies to end" in shown
        assert name not in f"{shown} {driver.record.waiting_for}", "it may be a private study of another team"
        search.set_state(JobState.CANCELLED)
        driver.until(driver.answers)
        driver.until(lambda: driver.record.waiting_for is None)


def test_driver_moves_to_a_free_gpu_and_back(site: Site) -> None:
    """While a search uses the models, a chat has its own replica; it gives it up for a study that waits for engines."""
    study = finished(site).job_id
    with Driver(site, study, gpus=(2.0, 1.0)) as driver:
        driver.until(driver.answers)
        search = site.begin(site.new_name())
        search.heartbeat(wall_clock_s=1.0)
        driver.until(lambda: Place.OWN in driver.completers.open_places)
        driver.until(driver.answers)
        driver.completers.gpus = (2.0, 0.0)
        other = site.begin(site.new_name())
        other.heartbeat(wall_clock_s=1.0, waiting_for=ENGINE)
        driver.until(lambda: "to get its GPUs" in str(driver.record.waiting_for))
        assert driver.completers.history == ["open scorer", "open own", "close own"]
        for each in (search, other):
            each.set_state(JobState.CANCELLED)


def test_driver_ends_with_its_study(site: Site) -> None:
    """Serving ends when the study is deleted; a driver that finds no study fails the job."""
    study = finished(site).job_id
    with Driver(site, study) as driver:
        driver.until(driver.answers)
        site.store.delete_job(study)
        driver.until(lambda: driver.record.state is JobState.COMPLETE)
        assert driver.record.reason == "its study was deleted"
    with Driver(site, study) as late:
        late.until(lambda: late.record.state is JobState.FAILED)
        assert "was deleted" in str(late.record.reason)


def test_cancelled_driver_answers_no_more(site: Site) -> None:
    """A driver whose job was cancelled ends, and its application with it."""
    study = finished(site).job_id
    with Driver(site, study) as driver:
        driver.until(driver.answers)
        endpoint = site.store.document(driver.job.id, ENDPOINT)
        assert httpx.post(f"{site.url}/v1/served/{driver.job.id}:cancel").status_code == 202
        driver.thread.join(20)
    assert endpoint is not None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{endpoint['url']}/models")
    assert driver.ask().status_code == 410


def test_submitted_requests_are_checked(site: Site, tmp_path: Path) -> None:
    """A submitted serving request must name a study whose models its sender may use."""
    study = finished(site)
    record = site.store.job(study.job_id)

    def accept(reader: Account | None = None, **document: Any) -> Any:
        context = RequestContext(store_url=site.store.url, data_dir=tmp_path, reader=reader)
        return SERVING.accept({"study": study.job_id, **document}, context)

    accepted = accept()
    assert accepted.name == f"{record.name}-served"
    expected = {"study": study.job_id, "name": accepted.name, "idle_minutes": 30, "shares_engines": False}
    assert accepted.document == expected
    assert accept(name="talk").name == "talk"
    stranger = Account("stranger", roles={"blue": Role.MEMBER})
    for wrong, field in (
        ({"reader": stranger}, "study"),
        ({"study": "0" * 32}, "study"),
        ({"idle_minutes": -1}, "idle_minutes"),
        ({"reader": Account("owner", roles={"red": Role.MEMBER}), "study": "x"}, "study"),
    ):
        with pytest.raises(InvalidStudy) as caught:
            accept(**wrong)
        assert caught.value.problems[0].field == field


def test_studies_of_images_are_not_served(tmp_path: Path) -> None:
    """Models that complete no prompts are refused before an engine starts for them."""
    image = {"name": "pets", "task": {"images": "pets", "head": "e"}, "metric": "acc"}
    # In a store of its own: lists of studies could not show one that was never resolved.
    with closing(Store(f"sqlite:///{tmp_path / 'studies.db'}")) as store:
        study = store.create_job(kind="search", name="pets", document={"objectives": [image]}, accepted={})
        with pytest.raises(InvalidStudy) as caught:
            SERVING.accept({"study": study.id}, RequestContext(store_url=store.url, data_dir=tmp_path))
    message = "pets: its models are of the modality image, and complete no prompts"
    assert caught.value.problems == (Problem("study", message),)
