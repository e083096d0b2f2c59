"""Two studies on a server with one place: the urgent study takes it, and the other one continues later."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from search_spaces.study.file import load_study
from service.client import Client
from service.disk import DATABASE
from service.resolved_study import ResolvedStudy
from service.store import Store
from tests.end_to_end.server import Server, cancelled_on_failure
from tests.end_to_end.studies import undisturbed, write_small_study
from tests.end_to_end.test_serve import chunks_scored_twice
from tests.service.tune.harness import trial_list

WAIT_S = 240.0


@pytest.mark.timeout(600)
def test_a_preempted_study_has_the_same_trials(fake_server: Server, tmp_path: Path) -> None:
    """With real Ray, a preempted study waits, continues, scores nothing twice, and has the undisturbed trials."""
    server = fake_server
    models = server.data_dir.parent / "preempted"
    models.mkdir()
    file = write_small_study(models, name="long", rungs=(10, 30), max_trials=5)
    document = load_study(file).canonical()
    with Client(server.url) as client, ExitStack() as places:
        long = server.submit(document)
        places.enter_context(cancelled_on_failure(server, long))
        server.wait_for_events(long, 1, "rung", timeout_s=WAIT_S)
        urgent = server.submit({**document, "name": "urgent", "search": {**document["search"], "max_trials": 1}})
        places.enter_context(cancelled_on_failure(server, urgent))
        client.edit(urgent, {"priority": 1})
        assert server.wait_until_ended(urgent, timeout_s=WAIT_S)["state"] == "COMPLETE", server.story(urgent)
        shown = client.job(long)
        assert (shown["state"], shown["reason"]) != ("RUNNING", None)
        assert server.wait_until_ended(long, timeout_s=WAIT_S)["state"] == "COMPLETE", server.story(long)
        events = {name: server.events(job) for name, job in (("long", long), ("urgent", urgent))}
    kinds = [event["kind"] for event in events["long"]]
    assert kinds.count("preempted") == 1
    (asked,) = (event for event in events["long"] if event["kind"] == "preempted")
    assert asked["payload"] == {"reason": "a job of priority 1 needs its place", "priority": 0}
    (stopped, again) = (
        next(event for event in events["long"] if event["id"] > asked["id"] and event["kind"] == kind)
        for kind in ("state", "attempt")
    )
    begun = next(event for event in events["urgent"] if event["kind"] == "attempt")
    ended = next(event for event in events["urgent"] if event["payload"].get("state") == "COMPLETE")
    assert asked["time"] < stopped["time"] < begun["time"] < ended["time"] < again["time"], "one place"
    store = Store(f"sqlite:///{server.data_dir / DATABASE}")
    resolved = ResolvedStudy.of(store.job(long))
    assert chunks_scored_twice(store, long) == []
    assert trial_list(store, long) == undisturbed(file, tmp_path / "alone", resolved=resolved)
    assert store.team_usage()[None].month > 0
    store.close()


@pytest.mark.timeout(600)
def test_a_failing_test_leaves_its_place(fake_server: Server) -> None:
    """A study of a test that fails on the shared server is cancelled, whatever is raised."""
    server = fake_server
    models = server.data_dir.parent / "failing"
    models.mkdir()
    document = load_study(write_small_study(models, name="failing", rungs=(10, 30), max_trials=5)).canonical()
    study = server.submit(document)
    with pytest.raises(KeyboardInterrupt), cancelled_on_failure(server, study):
        raise KeyboardInterrupt
    assert server.wait_until_ended(study, timeout_s=WAIT_S)["state"] == "CANCELLED", server.story(study)
