"""Requests in the store to pause a job, to stop its search and to resume it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from service.cluster.reconciler import submission_id
from service.errors import Conflict, NotFound, StaleAttempt
from service.store import EvaluationRequest, Store
from service.store.documents import RESPONSES
from service.store.steering import SteeringStore
from service.types import JobRecord, JobState, Steering
from tests.service.store.test_store import TRIAL

PAUSE, STOP = Steering("pause", "ann", "the GPUs are needed"), Steering("stop", "bob")


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    store = Store(database)
    yield store
    store.close()


@pytest.fixture
def job(store: Store) -> JobRecord:
    return store.create_job(kind="search", name="s", document={}, accepted={})


def events(store: Store, job: JobRecord, kind: str) -> list[object]:
    return [dict(event.payload) for event in store.events(job.id) if event.kind == kind]


def test_a_job_without_a_driver_is_paused_at_once(store: Store, job: JobRecord) -> None:
    """It gets no driver before it is resumed; a second request changes nothing."""
    requests = SteeringStore(store)
    for _ in range(2):
        paused = requests.pause(job.id, steering=PAUSE)
        assert (paused.state, paused.is_paused) == (JobState.PAUSED, True)
    assert paused.reason == "paused by ann: the GPUs are needed"
    assert events(store, job, "steered") == [{"action": "pause", "user": "ann", "reason": "the GPUs are needed"}]
    with pytest.raises(StaleAttempt, match="is paused"):
        store.open_attempt(job.id, as_driver=True)
    assert store.job(job.id).attempt == 0, "the refused driver is no attempt"
    resumed = requests.resume(job.id, reason="resumed by request", steering=Steering("resume"))
    assert (resumed.state, resumed.is_paused) == (JobState.STOPPED, False)
    store.open_attempt(job.id, as_driver=True).set_state(JobState.RUNNING)


def test_a_driver_stores_what_it_has_before_its_job_is_paused(store: Store, job: JobRecord) -> None:
    writer = store.open_attempt(job.id, as_driver=True)
    writer.set_state(JobState.RUNNING)
    assert SteeringStore(store).pause(job.id, steering=PAUSE).state is JobState.RUNNING
    writer.add_event("chunk", {})
    writer.set_state(JobState.STOPPED, "interrupted")
    assert (store.job(job.id).state, store.job(job.id).reason) == (JobState.PAUSED, "interrupted")


def test_a_driver_that_prepares_its_job_does_not_begin(store: Store, job: JobRecord) -> None:
    writer = store.open_attempt(job.id, as_driver=True)
    assert SteeringStore(store).pause(job.id, steering=PAUSE).state is JobState.CREATED, "its driver works"
    with pytest.raises(StaleAttempt, match="is paused"):
        writer.set_state(JobState.RUNNING)
    writer.set_waiting("no engine")
    assert store.job(job.id).state is JobState.PAUSED


def test_a_driver_that_died_leaves_its_job_paused(store: Store, job: JobRecord) -> None:
    """A driver that comes back from the dead cannot write."""
    requests = SteeringStore(store)
    writer = store.open_attempt(job.id, as_driver=True)
    writer.set_state(JobState.RUNNING)
    requests.pause(job.id, steering=PAUSE)
    for _ in range(2):
        requests.settle(job.id)
        assert store.job(job.id).state is JobState.PAUSED
    assert events(store, job, "state").count({"state": "PAUSED", "reason": "its driver has ended"}) == 1
    with pytest.raises(StaleAttempt):
        writer.add_event("chunk", {})


def test_a_job_that_is_not_to_pause_is_not_settled(store: Store, job: JobRecord) -> None:
    store.open_attempt(job.id, as_driver=True).set_state(JobState.RUNNING)
    SteeringStore(store).settle(job.id)
    assert store.job(job.id).state is JobState.RUNNING


def test_resuming_before_the_driver_has_ended(store: Store, job: JobRecord) -> None:
    requests = SteeringStore(store)
    writer = store.open_attempt(job.id, as_driver=True)
    writer.set_state(JobState.RUNNING)
    requests.pause(job.id, steering=PAUSE)
    resumed = requests.resume(job.id, reason="resumed by request", steering=Steering("resume"))
    assert (resumed.state, resumed.is_paused) == (JobState.RUNNING, False)
    assert [event["action"] for event in events(store, job, "steered")] == ["pause", "resume"]  # type: ignore[index]
    writer.set_state(JobState.STOPPED, "interrupted")
    assert store.job(job.id).state is JobState.STOPPED, "the server starts another driver"


def test_the_driver_learns_that_its_search_is_stopped(store: Store, job: JobRecord) -> None:
    """It learns it with its next heartbeat."""
    writer = store.open_attempt(job.id, as_driver=True)
    assert writer.heartbeat(wall_clock_s=1.0) is None
    for _ in range(2):
        assert SteeringStore(store).stop_search(job.id, steering=STOP).stop_reason == "stopped by bob"
    assert writer.heartbeat(wall_clock_s=2.0) == "stopped by bob"
    assert events(store, job, "steered") == [{"action": "stop", "user": "bob", "reason": None}]


def test_a_paused_study_continues_to_its_end_when_stopped(store: Store, job: JobRecord) -> None:
    requests = SteeringStore(store)
    requests.pause(job.id, steering=PAUSE)
    stopped = requests.stop_search(job.id, steering=STOP)
    assert (stopped.state, stopped.is_paused, stopped.stop_reason) == (JobState.STOPPED, False, "stopped by bob")
    requests.pause(job.id, steering=PAUSE)
    assert store.job(job.id).stop_reason == "stopped by bob", "a pause keeps the request to stop"


@pytest.mark.parametrize("state", [JobState.COMPLETE, JobState.FAILED, JobState.CANCELLED])
def test_what_has_ended_is_not_steered(store: Store, job: JobRecord, state: JobState) -> None:
    """A job that ends while it is asked to pause is not paused when it is reopened."""
    requests = SteeringStore(store)
    writer = store.open_attempt(job.id, as_driver=True)
    requests.pause(job.id, steering=PAUSE)
    writer.set_state(state)
    last = store.last_event_id(job.id)
    for found in (requests.pause(job.id, steering=PAUSE), requests.stop_search(job.id, steering=STOP)):
        assert (found.state, found.is_paused, found.stop_reason) == (state, False, None)
    assert store.last_event_id(job.id) == last


def edit(store: Store, job: JobRecord, *, restarts: bool = False, **labels: object) -> JobRecord | None:
    steering = Steering("edit", "ann", changes={name: [None, value] for name, value in labels.items()})
    document = {"x": 2} if restarts else None
    return SteeringStore(store).edit_job(job, labels, document=document, restarts=restarts, steering=steering)


def test_an_edit_of_an_older_version_is_refused(store: Store, job: JobRecord) -> None:
    edited = edit(store, job, description="first", tags=["a", "b"], priority=-3)
    assert edited is not None
    assert (edited.version, edited.description, edited.tags, edited.priority) == (1, "first", ("a", "b"), -3)
    assert edit(store, job, description="second") is None
    assert store.job(job.id) == edited
    assert events(store, job, "steered") == [
        {
            "action": "edit",
            "user": "ann",
            "reason": None,
            "changes": {"description": [None, "first"], "tags": [None, ["a", "b"]], "priority": [None, -3]},
        }
    ]


def test_ray_jobs_keep_the_first_name(store: Store, job: JobRecord) -> None:
    renamed = edit(store, job, name="second")
    assert renamed is not None
    again = edit(store, renamed, name="third")
    assert again is not None
    assert (again.name, again.first_name) == ("third", "s")
    assert submission_id(again, 2) == f"s-{job.id[:8]}-2"


def test_a_driver_from_before_an_edit_is_outdated(store: Store, job: JobRecord) -> None:
    """Labels change nothing; the next driver has the new document."""
    store.open_attempt(job.id, as_driver=True)
    labelled = edit(store, store.job(job.id), notes="n")
    assert labelled is not None
    assert not labelled.is_outdated
    edited = edit(store, labelled, restarts=True)
    assert edited is not None
    assert (edited.is_outdated, edited.document) == (True, {"x": 2})
    store.open_attempt(job.id, as_driver=True)
    assert not store.job(job.id).is_outdated


def test_unknown_jobs_cannot_be_steered(store: Store) -> None:
    requests = SteeringStore(store)
    for call in (requests.pause, requests.stop_search):
        with pytest.raises(NotFound, match="no such job"):
            call("0" * 32, steering=PAUSE)


def test_a_study_without_its_responses_does_not_continue(store: Store, job: JobRecord) -> None:
    """Its trials may be marked, but nothing is scored any more."""
    requests = SteeringStore(store)
    writer = store.open_attempt(job.id)
    writer.add_trial(TRIAL)
    writer.set_state(JobState.COMPLETE)
    marked = requests.set_invalid(job, TRIAL.number, invalid="why", steering=Steering("invalidate"))
    assert marked.state is JobState.STOPPED, "with its responses it continues"
    writer = store.open_attempt(job.id)
    writer.set_document_named(RESPONSES, {})
    writer.set_state(JobState.COMPLETE)
    valid = requests.set_invalid(job, TRIAL.number, invalid=None, steering=Steering("validate"))
    assert valid.state is JobState.COMPLETE
    with pytest.raises(Conflict, match="its responses were removed"):
        requests.request_evaluation(job, TRIAL.number, steering=Steering("evaluate"))
    assert requests.evaluation_requests(job.id) == ()


def test_a_label_names_one_enqueued_merge(store: Store, job: JobRecord) -> None:
    """The same request sent twice is one; another merge needs another label. Requests keep their order."""
    requests = SteeringStore(store)
    added = requests.enqueue_trial(job, "a", configuration={"x": 0.1}, steering=Steering("enqueue"))
    once = store.job(job.id)
    assert added == (once, True)
    assert requests.enqueue_trial(job, "a", configuration={"x": 0.1}, steering=Steering("enqueue")) == (once, False)
    with pytest.raises(Conflict, match="another merge is enqueued as 'a'; give another label"):
        requests.enqueue_trial(job, "a", configuration={"x": 0.2}, steering=Steering("enqueue"))
    requests.enqueue_trial(job, "b", recipe={"base": "b"}, steering=Steering("enqueue"))
    assert [requests.request_evaluation(job, 3, steering=Steering("evaluate"))[1] for _ in range(2)] == [True, False]
    assert requests.evaluation_requests(job.id) == (
        EvaluationRequest(0, label="a", configuration={"x": 0.1}),
        EvaluationRequest(1, label="b", recipe={"base": "b"}),
        EvaluationRequest(2, trial=3),
    )
    events = [event.payload["action"] for event in store.events(job.id) if event.kind == "steered"]
    assert events == ["enqueue", "enqueue", "evaluate"]


def test_a_study_that_ends_does_not_lose_a_request(store: Store, job: JobRecord) -> None:
    """A request that comes when the driver has nothing left to do lets the study continue with another driver."""
    requests = SteeringStore(store)
    writer = store.open_attempt(job.id, as_driver=True)
    writer.set_state(JobState.RUNNING)
    requests.enqueue_trial(job, "late", configuration={"x": 0.5}, steering=Steering("enqueue"))
    writer.set_state(JobState.COMPLETE)
    ended = store.job(job.id)
    assert (ended.state, ended.reason) == (JobState.STOPPED, "it was changed when it was about to end")
    last = store.open_attempt(job.id, as_driver=True)
    last.set_state(JobState.COMPLETE)
    assert store.job(job.id).state is JobState.COMPLETE
    requests.enqueue_trial(job, "late", configuration={"x": 0.5}, steering=Steering("enqueue"))
    assert store.job(job.id).state is JobState.STOPPED, "no trial has answered the request yet"


def test_benchmarks_and_edits_do_not_overwrite_each_other(store: Store, job: JobRecord) -> None:
    requests = SteeringStore(store)
    store.open_attempt(job.id).set_state(JobState.COMPLETE)
    read = store.job(job.id)
    assert edit(store, read, name="second") is not None
    with pytest.raises(Conflict, match="edited meanwhile"):
        requests.add_benchmarks(read, {"x": 3}, names=["b"])
    read = store.job(job.id)
    requests.add_benchmarks(read, {"x": 3}, names=["b"])
    assert edit(store, read, name="third") is None
    assert store.job(job.id).document == {"x": 3}


def test_drivers_that_end_for_a_request_are_no_failures(store: Store, job: JobRecord) -> None:
    """A driver that another one replaces, because a user has added a merge, does not count as failed."""
    requests = SteeringStore(store)
    for number in range(1, 6):
        store.record_submission(job.id, number)
        store.open_attempt(job.id, as_driver=True).set_state(JobState.RUNNING)
        assert store.consecutive_failures(job.id) == 1
        requests.enqueue_trial(job, f"merge {number}", configuration={"x": number}, steering=Steering("enqueue"))
        assert store.consecutive_failures(job.id) == 0


def test_a_pause_while_drivers_start_is_no_failure(store: Store, job: JobRecord) -> None:
    requests = SteeringStore(store)
    for number in range(1, 6):
        store.record_submission(job.id, number)
        requests.pause(job.id, steering=Steering("pause"))
        with pytest.raises(StaleAttempt, match="is paused"):
            store.open_attempt(job.id, as_driver=True)
        requests.resume(job.id, reason="again", steering=Steering("resume"))
        assert store.consecutive_failures(job.id) == 0
