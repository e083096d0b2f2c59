"""The queue of exports: the server that writes them, and a database that is away meanwhile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from service.api import export_queue
from service.api.export_queue import Exports, artifact_name
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.store.exports import ExportStore
from service.store.steering import SteeringStore
from service.types import ExportRecord, ExportState, Steering
from tests.postgresql import PostgreSQL
from tests.s3_server import S3
from tests.service.api.harness import stored_study


class _Writer:
    """Stand-in for the process that writes a model."""

    def __init__(self, _: str) -> None:
        pass

    async def call(self, _: Any, __: str, ___: ExportRecord, directory: Path, **____: Any) -> None:
        directory.mkdir()

    def stop(self) -> None:
        pass


def test_the_leader_writes_the_exports_of_all_servers(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that one server was asked for is written by the server that leads, also if that is another one."""
    monkeypatch.setattr(export_queue, "WorkerProcess", _Writer)
    monkeypatch.setattr(export_queue, "LOOK_S", 0.02)
    store = Store(database)
    study = stored_study(store)
    leads = {"first": False, "second": False}

    async def scenario() -> None:
        first = Exports(store, tmp_path, is_leader=lambda: leads["first"])
        second = Exports(store, tmp_path, is_leader=lambda: leads["second"])
        first.start()
        second.start()
        record = await second.request(study.id, trial=1, dtype="float32")
        await asyncio.sleep(0.3)
        assert ExportStore(store).export(record.id).state is ExportState.WAITING
        leads["first"] = True
        deadline = time.monotonic() + 30
        while ExportStore(store).export(record.id).state is not ExportState.COMPLETE:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert second.directory(record).is_dir()
        await first.stop()
        await second.stop()

    asyncio.run(scenario())
    store.close()


@pytest.mark.parametrize("num_steps", range(6))
def test_a_queue_that_was_just_woken_stops(num_steps: int, tmp_path: Path) -> None:
    """The queue stops if it is stopped at the moment at which it continues, `num_steps` steps of the loop later."""
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    study = stored_study(store)

    async def scenario() -> None:
        exports = Exports(store, tmp_path, is_leader=lambda: False)
        exports.start()
        await asyncio.sleep(0.05)  # it waits
        await exports.request(study.id, trial=1, dtype="float32")
        for _ in range(num_steps):
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await exports.stop()

    asyncio.run(scenario())
    store.close()


def test_an_export_waits_for_the_database(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export that is written while the database is away is COMPLETE afterwards, not failed."""
    monkeypatch.setattr(export_queue, "LOOK_S", 0.02)
    url = postgresql.migrated()
    store = Store(url)
    study = stored_study(store)

    class _Killing(_Writer):
        async def call(self, *arguments: Any, **options: Any) -> None:
            await super().call(*arguments, **options)
            postgresql.kill()

    async def scenario() -> None:
        exports = Exports(store, tmp_path)
        exports.start()
        record = await exports.request(study.id, trial=1, dtype="float32")
        while postgresql.is_running:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(postgresql.start)
        deadline = time.monotonic() + 30
        while ExportStore(store).export(record.id).state is not ExportState.COMPLETE:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await exports.stop()

    monkeypatch.setattr(export_queue, "WorkerProcess", _Killing)
    asyncio.run(scenario())
    store.close()
    postgresql.drop(url)


def test_a_stored_export_leaves_no_copy(tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed after it had stored a model deletes its own copy when it is started again."""
    monkeypatch.setattr(export_queue, "LOOK_S", 0.02)
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    artifacts = ArtifactStore(store, f"{s3.bucket()}/files")

    async def scenario() -> None:
        exports = Exports(store, tmp_path, artifacts=artifacts)
        record = await exports.request(stored_study(store).id, trial=1, dtype="float32")
        exports.directory(record).mkdir(parents=True)
        (exports.directory(record) / "config.json").write_text("{}")
        artifacts.put(record.study, artifact_name(record.id), exports.directory(record))
        exports.start()
        await _completed(store, record.id)
        assert not exports.directory(record).parent.exists()
        assert {*(exports.files(record) or ())} == {"config.json"}
        await exports.stop()

    asyncio.run(scenario())
    store.close()


def test_unused_files_are_not_looked_for_after_each_export(
    tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for them lists the whole object store, so it is done when the queue starts and hourly."""
    monkeypatch.setattr(export_queue, "WorkerProcess", _Writer)
    monkeypatch.setattr(export_queue, "LOOK_S", 0.02)
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    artifacts = ArtifactStore(store, f"{s3.bucket()}/files")
    listings: list[float] = []
    monkeypatch.setattr(artifacts, "collect", lambda: listings.append(time.monotonic()))
    sweeps: list[bool] = []

    async def scenario() -> None:
        exports = Exports(store, tmp_path, artifacts=artifacts)
        sweep = exports.sweep

        def counted(*, collects: bool = True) -> None:
            sweeps.append(collects)
            sweep(collects=collects)

        monkeypatch.setattr(exports, "sweep", counted)
        study = stored_study(store)
        exports.start()
        for trial in range(3):
            record = await exports.request(study.id, trial=trial, dtype="float32")
            await _completed(store, record.id)
            await asyncio.sleep(0.1)
        await exports.stop()

    asyncio.run(scenario())
    assert len(listings) == 1
    assert sum(sweeps) == 1
    assert 3 <= len(sweeps) <= 4, "the quota is looked at after each export"
    store.close()


def test_a_renamed_study_keeps_its_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of an export are found if its study is renamed while they are written, and afterwards."""
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    study = stored_study(store, name="first")

    class _Renaming(_Writer):
        async def call(self, _: Any, __: str, ___: ExportRecord, directory: Path, **____: Any) -> None:
            _rename(store, study.id, "second")
            directory.mkdir()
            (directory / "config.json").write_text("{}")

    async def scenario() -> None:
        exports = Exports(store, tmp_path)
        exports.start()
        record = await exports.request(study.id, trial=1, dtype="float32")
        await _completed(store, record.id)
        for name in ("second", "third"):
            _rename(store, study.id, name)
            assert {*(exports.files(record) or ())} == {"config.json"}
            assert (exports.num_bytes(record), exports.folder(record)) == (2, f"{name}-trial-1")
            again = await exports.request(study.id, trial=1, dtype="float32")
            assert again.state is ExportState.COMPLETE, "it is not written again"
        await exports.stop()

    monkeypatch.setattr(export_queue, "WorkerProcess", _Renaming)
    asyncio.run(scenario())
    store.close()


def test_exports_of_earlier_versions_are_found(tmp_path: Path) -> None:
    """Earlier versions named the directory of an export by the name that the study had at the time."""
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    study, exports = stored_study(store, name="first"), Exports(store, tmp_path)
    record = ExportRecord("0a" * 16, study.id, 1, "float32", ExportState.COMPLETE, 1.0)
    _rename(store, study.id, "second")
    place = tmp_path / "exports" / record.id
    (place / ".first-trial-1.0a0a.partial").mkdir(parents=True)
    assert exports.num_bytes(record) is None
    (place / "second-trial-1").mkdir()
    (place / "second-trial-1" / "config.json").write_text("{}")
    _rename(store, study.id, "third")
    assert exports.num_bytes(record) == 2
    store.close()


def _rename(store: Store, study: str, name: str) -> None:
    labels, steering = {"name": name}, Steering("edit")
    steered = SteeringStore(store).edit_job(store.job(study), labels, document=None, restarts=False, steering=steering)
    assert steered is not None


async def _completed(store: Store, name: str) -> None:
    deadline = time.monotonic() + 30
    while ExportStore(store).export(name).state is not ExportState.COMPLETE:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
