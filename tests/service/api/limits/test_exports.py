"""Exports are removed when they expire, and the oldest first if room is needed; exports in progress are kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.api.export_queue import Exports
from service.api.limits.exports import DAY_S, ExportLimits, KeptExport, to_remove
from service.store.exports import ExportStore
from service.types import ExportRecord, ExportState, JobState
from tests.service.api.harness import ApiServer, finished_study, stored_study

pytestmark = pytest.mark.slow  # exports are written

NOW = 1_800_000_000.0


def kept(name: str, state: ExportState, *, days: float, num_bytes: int = 10) -> KeptExport:
    return KeptExport(ExportRecord(name, "s", 0, "float32", state, created_at=0.0), NOW - days * DAY_S, num_bytes)


def removed(*exports: KeptExport, quota: int = 1000) -> str:
    return "".join(r.id for r in to_remove(exports, now=NOW, lifetime_s=7 * DAY_S, quota_bytes=quota))


def test_what_has_expired_is_removed_unless_it_is_in_progress() -> None:
    old = [kept(state.value[0].lower(), state, days=8) for state in ExportState]
    assert sorted(removed(*old, kept("n", ExportState.COMPLETE, days=6))) == ["c", "f"]


def test_the_oldest_make_room() -> None:
    exports = [kept(name, ExportState.COMPLETE, days=days) for name, days in (("b", 2), ("a", 3), ("c", 1))]
    assert removed(*exports, quota=30) == ""
    assert removed(*exports, quota=29) == "a"
    assert removed(*exports, quota=15) == "ab"
    assert removed(*exports, quota=1) == "ab", "the newest one stays"


def test_what_is_written_takes_room_and_stays() -> None:
    running = kept("r", ExportState.RUNNING, days=3, num_bytes=50)
    exports = [kept("a", ExportState.COMPLETE, days=2), kept("b", ExportState.COMPLETE, days=1), running]
    assert removed(*exports, quota=60) == "a"


# Over HTTP.


def stored_export(server: ApiServer, study: str, name: str, *, days: float, num_bytes: int = 10) -> Path:
    """A complete export written `days` ago; returns its directory."""
    record = ExportRecord(name * 32, study, 1, "float32", ExportState.COMPLETE, created_at=1.0)
    ExportStore(server.store).add_export(record)
    directory: Path = server.app.state.services.exports.directory(record)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(bytes(num_bytes))
    os.utime(directory.parent, (time.time() - days * DAY_S,) * 2)
    return directory


@pytest.fixture
def study(server: ApiServer) -> str:
    return finished_study(server.store, num_trials=3).id


def ids(http: httpx.Client, study: str) -> str:
    return "".join(export["id"][0] for export in http.get(f"/v1/studies/{study}/exports").json()["exports"])


def test_expired_exports_and_files_without_one_are_removed(http: httpx.Client, server: ApiServer, study: str) -> None:
    exports = server.app.state.services.exports
    old, new = (stored_export(server, study, name, days=days) for name, days in (("a", 8), ("b", 6)))
    (server.data_dir / "exports" / "of-nobody").mkdir()
    exports.sweep()
    assert ids(http, study) == "b"
    assert not old.parent.exists()
    assert new.exists()
    assert [path.name for path in (server.data_dir / "exports").iterdir()] == ["b" * 32]
    assert http.get(f"/v1/studies/{study}/exports/{'a' * 32}").status_code == 404


def test_the_quota_is_the_operators(http: httpx.Client, server: ApiServer, study: str) -> None:
    for name, days in (("a", 2), ("b", 1), ("c", 0.5)):
        stored_export(server, study, name, days=days, num_bytes=100)
    Exports(server.store, server.data_dir, keep=ExportLimits(quota_bytes=250)).sweep()
    assert ids(http, study) == "bc"


def test_a_download_is_not_interrupted(http: httpx.Client, server: ApiServer, study: str) -> None:
    directory = stored_export(server, study, "a", days=8)
    exports = server.app.state.services.exports
    chunks = exports.reading("a" * 32, iter([b"1", b"2"]))
    next(chunks)
    exports.sweep()
    assert directory.exists()
    answer = http.delete(f"/v1/studies/{study}/exports/{'a' * 32}")
    assert (answer.status_code, "is being downloaded" in answer.json()["detail"]) == (409, True)
    assert list(chunks) == [b"2"]
    assert http.delete(f"/v1/studies/{study}/exports/{'a' * 32}").status_code == 200
    assert not directory.parent.exists()


@pytest.mark.parametrize("state", [ExportState.WAITING, ExportState.RUNNING])
def test_what_is_in_progress_is_not_deleted(
    http: httpx.Client, server: ApiServer, study: str, state: ExportState
) -> None:
    stored_export(server, study, "a", days=8)
    ExportStore(server.store).set_export_state("a" * 32, state)
    for path in (f"/v1/studies/{study}", f"/v1/studies/{study}/exports/{'a' * 32}"):
        answer = http.delete(path)
        assert answer.status_code == 409
        assert answer.json()["detail"] == f"export {'a' * 32} is {state.value}; it can be deleted once it has ended"
    assert ids(http, study) == "a"


# Studies.


def test_ended_study_is_deleted_whole(http: httpx.Client, server: ApiServer, study: str) -> None:
    """A study that has ended is deleted with everything that belongs to it."""
    other = finished_study(server.store, num_trials=3).id
    directory = stored_export(server, study, "a", days=1)
    (server.data_dir / "studies" / study).mkdir(parents=True)
    assert http.delete(f"/v1/studies/{study}").status_code == 200
    for rest in ("", "/trials", "/summary", "/exports", f"/exports/{'a' * 32}"):
        assert http.get(f"/v1/studies/{study}{rest}").status_code == 404
    assert http.delete(f"/v1/studies/{study}").status_code == 404
    assert not directory.exists()
    assert not (server.data_dir / "studies" / study).exists()
    for rows in (server.store.trials, server.store.events, server.store.evidence):
        assert not rows(study)
        assert rows(other)
    assert http.get(f"/v1/studies/{other}/summary").status_code == 200


@pytest.mark.parametrize("state", [None, JobState.RUNNING, JobState.STOPPED])
def test_a_study_that_has_not_ended_is_not_deleted(
    http: httpx.Client, server: ApiServer, state: JobState | None
) -> None:
    record = stored_study(server.store)
    if state is not None:
        server.store.open_attempt(record.id).set_state(state)
    answer = http.delete(f"/v1/studies/{record.id}")
    assert answer.status_code == 409
    assert answer.json()["detail"].endswith("only a study that has ended can be deleted: cancel it first")
    assert http.post(f"/v1/studies/{record.id}:cancel").status_code == 202
    assert http.delete(f"/v1/studies/{record.id}").status_code == 200


def test_the_events_of_a_deleted_study_end(server: ApiServer) -> None:
    record = stored_study(server.store)
    with httpx.stream("GET", f"{server.url}/v1/studies/{record.id}/events", timeout=60) as stream:
        frames: Iterator[bytes] = stream.iter_bytes()
        next(frames)
        server.store.open_attempt(record.id).set_state(JobState.CANCELLED)
        server.store.delete_job(record.id)
        assert sum(1 for _ in frames) < 100
