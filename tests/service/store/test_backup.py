"""Backups: a running server's database and files arrive together in an empty place, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.cli.main import main
from service.disk import alignments_dir, job_dir, locked
from service.errors import Conflict, InUse
from service.store import Store, schema
from service.store import backup as backups
from service.store.accounts import Actor
from service.store.artifacts import ArtifactStore
from service.store.backup import MANIFEST, Backup, Restored, read_backup
from service.store.blobs import DirectoryBlobs
from service.store.documents import ALIGNMENTS, ENDPOINT, WARM_START
from service.store.notifications import NotificationStore
from service.types import Coverage, JobState, NoticeKind
from tests.s3_server import S3
from tests.service.store.test_move import filled, rows_of
from tests.service.store.test_store import TRIAL
from workers.alignments.files import is_stored, store_alignment, stored_file
from workers.object_store import ObjectStore, blob_path

ROOT = Path(__file__).parents[3]
DETACHED: dict[str, list[Any]] = {table: [] for table in ("exports", "drains", "notices", "waits", "deliveries")}
FILES = {"model.safetensors": b"weights", "config.json": b"{}", "folder/tokenizer.json": b"tokens"}


def back_up(store: Store, files: str | Path, out: Path, **options: Any) -> Backup:
    """Make a backup of a server whose data directory is the folder `data` beside the backup."""
    return backups.back_up(store, files, out, data_dir=out.parent / "data", **options)


def restore(directory: Path, target: Store, files: str | Path, **options: Any) -> Restored:
    """Restore a backup to a server whose data directory is the folder `new` beside the backup."""
    return backups.restore(directory, target, files, data_dir=directory.parent / "new", **options)


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    """A store with rows in every table. The artifacts of `filled` are left out, because their files do not exist."""
    store = filled(database)
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    yield store
    store.close()


@pytest.fixture(params=["directory", "s3"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "artifacts")
    s3: S3 = request.getfixturevalue("s3")
    return f"{s3.bucket()}/mergesearch"


def put(store: Store, files: str, name: str, content: dict[str, bytes], source: Path) -> None:
    """Store an artifact of the first job with the given files."""
    for path, data in content.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_bytes(data)
    ArtifactStore(store, files).put(store.jobs()[0].id, name, source, facts={"kind": "expert"})


def content_of(store: Store, files: str | Path, name: str, out: Path) -> dict[str, bytes]:
    artifacts = ArtifactStore(store, files)
    place = artifacts.write_to(artifacts.get(store.jobs()[0].id, name), out)
    return {file.relative_to(place).as_posix(): file.read_bytes() for file in place.rglob("*") if file.is_file()}


def empty(place: Path) -> Store:
    place.mkdir()
    return Store(f"sqlite:///{place / 'mergesearch.db'}")


def test_a_backup_restores_rows_and_files(store: Store, files: str, tmp_path: Path) -> None:
    """All rows and files arrive, from both databases and both places of files; exports and drains do not."""
    put(store, files, "expert", FILES, tmp_path / "expert")
    put(store, files, "other", {**FILES, "model.safetensors": b"others"}, tmp_path / "other")
    backup = back_up(store, files, tmp_path / "backup")
    assert (backup.jobs, backup.files) == (1, 6), "two manifests, and four different files"
    target = empty(tmp_path / "new")
    restored = restore(tmp_path / "backup", target, tmp_path / "new/artifacts")
    assert restored.backup == backup
    assert restored.removed_exports == 1
    expected = {**rows_of(store), **DETACHED}
    assert rows_of(target) == expected
    assert content_of(target, tmp_path / "new/artifacts", "expert", tmp_path / "a") == FILES
    assert content_of(target, tmp_path / "new/artifacts", "other", tmp_path / "b")["model.safetensors"] == b"others"
    target.close()


def test_a_backup_restores_to_the_same_kind(
    store: Store, database: str, files: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A backup holds an SQLite file whatever the database was, and is restored to either, in either place of files."""
    put(store, files, "expert", FILES, tmp_path / "expert")
    back_up(store, files, tmp_path / "backup")
    expected = {**rows_of(store), **DETACHED}
    is_sqlite = database.startswith("sqlite")
    url = f"sqlite:///{tmp_path / 'other.db'}" if is_sqlite else request.getfixturevalue("postgresql").migrated()
    target = Store(url)
    again = f"{files}-new"
    restore(tmp_path / "backup", target, again)
    assert rows_of(target) == expected
    assert content_of(target, again, "expert", tmp_path / "a") == FILES
    target.close()
    if not is_sqlite:
        request.getfixturevalue("postgresql").drop(url)


def test_a_backup_has_the_alignments_of_studies(tmp_path: Path) -> None:
    """Merges of a restored study can be exported: its alignments are at their place again, but for one that was lost.

    Alignments are stored with the artifacts only if these are in an object store.
    """
    place, new = tmp_path / "data", tmp_path / "new"
    store = empty(place)
    studies = [store.create_job(kind="search", name=name, document={}, accepted={}).id for name in ("a", "b")]
    directories = [alignments_dir(job_dir(place, study)) for study in studies]
    both, _ = (store_alignment(directory, b"of both studies") for directory in directories)
    one, lost, damaged = (store_alignment(directories[0], content) for content in (b"of one", b"lost", b"damaged"))
    stored_file(directories[0], lost).unlink()
    stored_file(directories[0], damaged).write_bytes(b"other bytes")
    for study, names in zip(studies, ([both, one, lost, damaged], [both]), strict=True):
        rows = [[["a", layer], ["b", layer + 1], name] for layer, name in enumerate(names)]
        store.open_attempt(study).set_document_named(ALIGNMENTS, rows)
    notes: list[str] = []
    backup = back_up(store, place / "artifacts", tmp_path / "backup", note=notes.append)
    assert backup.files == 2
    missing = [note for note in notes if "is missing or damaged" in note]
    assert sorted(note.split(":")[0] for note in missing) == sorted(
        str(stored_file(directories[0], name)) for name in (lost, damaged)
    )
    assert back_up(store, place / "artifacts", tmp_path / "backup").files == 2, "the next backup keeps them"
    store.close()
    target = empty(new)
    restore(tmp_path / "backup", target, new / "artifacts")
    target.close()
    restored = [alignments_dir(job_dir(new, study)) for study in studies]
    assert sorted(file.stem for file in restored[0].iterdir()) == sorted([both, one])
    assert [file.name for file in restored[1].iterdir()] == [f"{both}.safetensors"]
    assert all(is_stored(restored[0], name) for name in (both, one))


def test_a_backup_is_of_one_moment(store: Store, tmp_path: Path) -> None:
    """Nothing that is written during a backup is in it, and files that are deleted meanwhile stay until its end."""
    files = str(tmp_path / "artifacts")
    put(store, files, "expert", FILES, tmp_path / "expert")
    (job,), before = store.jobs(), rows_of(store)
    written: list[str] = []

    def write(text: str) -> None:
        if text.startswith("trials") and not written:
            written.append(text)

            def change() -> None:
                store.open_attempt(job.id).add_trial(replace(TRIAL, number=50))
                artifacts = ArtifactStore(store, files)
                artifacts.remove(job.id, "expert")
                assert artifacts.collect() == 0, "a backup is being made"

            thread = threading.Thread(target=change)
            thread.start()
            thread.join(60)

    back_up(store, files, tmp_path / "backup", note=write)
    assert written
    assert rows_of(store) != before
    assert ArtifactStore(store, files).collect() > 0, "afterwards unused files are removed"
    target = empty(tmp_path / "new")
    restore(tmp_path / "backup", target, tmp_path / "new/artifacts")
    assert rows_of(target) == {**before, **DETACHED}
    assert content_of(target, tmp_path / "new/artifacts", "expert", tmp_path / "a") == FILES
    target.close()


def test_backups_lack_the_exports_of_an_object_store(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are artifacts in an object store, also in backups of earlier versions; experts of any name are kept."""
    files, export, expert = f"{s3.bucket()}/mergesearch", f"export-{'0a' * 16}", "export-format"
    store = filled(f"sqlite:///{tmp_path / 'server.db'}")
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    tuned = store.create_job(kind="finetune", name="tuned", document={}, accepted={})
    put(store, files, export, {"model.safetensors": b"merged"}, tmp_path / "merged")
    put(store, files, "policy", {"policy.safetensors": b"policy"}, tmp_path / "policy")
    ArtifactStore(store, files).put(tuned.id, expert, tmp_path / "policy")
    assert back_up(store, files, tmp_path / "backup").files == 2, "one file and its manifest"
    monkeypatch.setattr(backups, "EXPORTED", "none")
    assert back_up(store, files, tmp_path / "old").files == 4
    monkeypatch.undo()
    for name in ("backup", "old"):
        target = empty(tmp_path / f"new-{name}")
        new = tmp_path / f"new-{name}/artifacts"
        assert restore(tmp_path / name, target, new).removed_exports == 1
        assert [each.name for job in target.jobs() for each in ArtifactStore(target, new).of(job.id)] == [
            each.name for job in store.jobs() for each in ArtifactStore(store, files).of(job.id) if each.name != export
        ]
        assert len([file for file in new.glob("blobs/*/*") if file.is_file()]) == 2
        target.close()
    store.close()


@pytest.mark.parametrize("missing", ["manifest", "file"])
def test_an_artifact_may_be_deleted_during_a_backup(missing: str, s3: S3, tmp_path: Path) -> None:
    """An artifact that the server deletes from an object store meanwhile is left out; the others are restored."""
    files = f"{s3.bucket()}/mergesearch"
    store = filled(f"sqlite:///{tmp_path / 'server.db'}")
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    put(store, files, "expert", FILES, tmp_path / "expert")
    put(store, files, "old", {"config.json": b"{}", "old.bin": b"old"}, tmp_path / "old")
    (job,), artifacts = store.jobs(), ArtifactStore(store, files)
    old = artifacts.get(job.id, "old").digest
    gone = old if missing == "manifest" else hashlib.sha256(b"old").hexdigest()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if text.startswith("artifacts: comparing"):
            artifacts.remove(job.id, "old")
            ObjectStore(files).delete(blob_path(gone))

    assert back_up(store, files, tmp_path / "backup", note=note).files == 4
    assert f"artifact {old}: was deleted during the backup, which does not have it" in notes
    target = empty(tmp_path / "new")
    restore(tmp_path / "backup", target, tmp_path / "new/artifacts")
    assert [each.name for each in ArtifactStore(target, tmp_path / "new/artifacts").of(job.id)] == ["expert"]
    assert content_of(target, tmp_path / "new/artifacts", "expert", tmp_path / "a") == FILES
    target.close()
    for name in ("old", "older"):
        put(store, files, name, {"config.json": b"{}", "old.bin": b"old"}, tmp_path / "old")
    artifacts.remove(job.id, "old")
    ObjectStore(files).delete(blob_path(gone))
    with pytest.raises(Conflict, match=f"file {gone} is gone from .*; nothing was replaced"):
        back_up(store, files, tmp_path / "backup")
    store.close()


def test_a_second_backup_copies_only_new_files(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup into the same directory copies new files, removes unused ones, and replaces the database."""
    files, out = str(tmp_path / "artifacts"), tmp_path / "backup"
    put(store, files, "expert", FILES, tmp_path / "expert")
    put(store, files, "old", {"old.bin": b"old"}, tmp_path / "old")
    first = back_up(store, files, out)
    put(store, files, "new", {"model.safetensors": b"new"}, tmp_path / "new-expert")
    ArtifactStore(store, files).remove(store.jobs()[0].id, "old")
    copied: list[str] = []
    copy = DirectoryBlobs.copy

    def record(self: DirectoryBlobs, digest: str, target: Path) -> None:
        copied.append(digest)
        copy(self, digest, target)

    monkeypatch.setattr(DirectoryBlobs, "copy", record)
    second = back_up(store, files, out)
    assert len(copied) == 2, "the new file and its manifest"
    assert (first.files, second.files) == (6, 6)
    assert len([file for file in out.glob("files/blobs/*/*") if file.is_file()]) == 6
    assert [file.name for file in out.glob("database-*")] == [second.database_name]
    assert out.stat().st_mode & 0o777 == 0o700
    assert read_backup(out) == second


# For each line of input makes a backup in a process of its own, and prints its exit code and its number of lines.
BACKUPS = """
import json, os, signal, sys
from pathlib import Path
from service.store import Store
from service.store import backup as backups

def back_up(limit, url, files, out):
    lines = 0
    def trace(frame, event, argument):
        nonlocal lines
        if frame.f_code.co_filename != backups.__file__:
            return None
        lines += event == "line"
        if limit and lines == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    store = Store(url)
    sys.settrace(trace)
    backups.back_up(store, files, Path(out), data_dir=Path(out).parent)
    sys.settrace(None)
    return lines

for asked in sys.stdin:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(back_up(*json.loads(asked))).encode())
        os._exit(0)
    os.close(write)
    with open(read) as told:
        lines = told.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(lines or 0)]), flush=True)
"""

# Makes a backup that is killed after a number of lines of the module, 0 for never, with the URL of the database, the
# place of the files, and the directory of the backup; returns the exit code and the number of lines.
BackedUp = Callable[[int, str, str, Path], tuple[int, int]]


@pytest.fixture
def backed_up() -> Iterator[BackedUp]:
    """Function that makes a backup in a new process, which is forked from one that has imported the modules."""
    command, environment = [sys.executable, "-c", BACKUPS], {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, told = process.stdin, process.stdout

        def backed_up(limit: int, url: str, files: str, out: Path) -> tuple[int, int]:
            print(json.dumps([limit, url, files, str(out)]), file=asked, flush=True)
            code, num_lines = json.loads(told.readline())
            return code, num_lines

        yield backed_up


def test_killed_backups_leave_the_previous_one_complete(tmp_path: Path, backed_up: BackedUp) -> None:
    """Wherever a second backup is killed, the directory restores to the first state or to the second."""
    url, files, out = f"sqlite:///{tmp_path / 'server.db'}", str(tmp_path / "artifacts"), tmp_path / "backup"
    store = filled(url)
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    put(store, files, "expert", FILES, tmp_path / "expert")
    first = back_up(store, files, out).database
    put(store, files, "new", {"model.safetensors": b"new"}, tmp_path / "new")
    store.close()
    code, num_lines = backed_up(0, url, files, shutil.copytree(out, tmp_path / "whole"))
    assert code == 0
    is_new, leftovers = [], set()
    for limit in (num_lines // 2, *range(num_lines - 5, num_lines)):
        place = tmp_path / f"killed-{limit}"
        killed = shutil.copytree(out, place / "backup")
        assert backed_up(limit, url, files, killed) == (-signal.SIGKILL, 0)
        leftovers |= {path.name for path in killed.glob(".new-*")}
        target = empty(place / "data")
        backup = restore(killed, target, place / "data/artifacts").backup
        names = {record.name for record in ArtifactStore(target, files).of(target.jobs()[0].id)}
        is_new.append(backup.database != first)
        assert names == ({"expert", "new"} if is_new[-1] else {"expert"})
        target.close()
    assert is_new == sorted(is_new), "kills after the new description find the new backup"
    assert (is_new[0], is_new[-1]) == (False, True)
    assert leftovers
    killed = tmp_path / f"killed-{num_lines // 2}/backup"
    assert back_up(Store(url), files, killed).files == 6
    assert not list(killed.glob(".new-*")), "the next backup removes what killed ones left behind"


def _change_database(out: Path) -> None:
    (file,) = out.glob("database-*.db")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE trials SET samples_scored = samples_scored + 1")
    connection.close()


def _change_file(out: Path) -> None:
    for file in out.glob("files/blobs/*/*"):
        if file.read_bytes() == b"weights":
            file.write_bytes(b"Weights")


def _remove_file(out: Path) -> None:
    for file in out.glob("files/blobs/*/*"):
        if file.read_bytes() == b"weights":
            file.unlink()


def _of_a_newer_program(out: Path) -> None:
    manifest = json.loads((out / MANIFEST).read_text())
    (out / MANIFEST).write_text(json.dumps({**manifest, "format": 99}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(_change_database, "has changed since the backup", id="database"),
        pytest.param(_change_file, "has changed since it was stored", id="file"),
        pytest.param(_remove_file, "is gone from", id="missing-file"),
        pytest.param(_of_a_newer_program, "format 99, this program reads 1", id="newer"),
        pytest.param(lambda out: (out / MANIFEST).write_text("{"), "cannot be read", id="broken"),
        pytest.param(lambda out: (out / MANIFEST).write_text("{}"), "cannot be read", id="empty"),
        pytest.param(lambda out: (out / MANIFEST).unlink(), "has no backup.json", id="incomplete"),
    ],
)
def test_damaged_backups_restore_nothing(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    """A backup that is incomplete or was changed is refused, and the new database stays empty."""
    store, files, out = filled(f"sqlite:///{tmp_path / 'server.db'}"), str(tmp_path / "artifacts"), tmp_path / "backup"
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    put(store, files, "expert", FILES, tmp_path / "expert")
    back_up(store, files, out)
    change(out)
    target = empty(tmp_path / "new")
    with pytest.raises(Conflict, match=message):
        restore(out, target, tmp_path / "new/artifacts")
    assert not any(rows_of(target).values())
    store.close()
    target.close()


def test_places_that_are_taken_are_refused(tmp_path: Path) -> None:
    """A database with jobs, a directory of other files, and a directory that another backup writes are left alone."""
    store, files = filled(f"sqlite:///{tmp_path / 'server.db'}"), str(tmp_path / "artifacts")
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    back_up(store, files, tmp_path / "backup")
    before = rows_of(store)
    with pytest.raises(Conflict, match="has data already"):
        restore(tmp_path / "backup", store, files)
    assert rows_of(store) == before
    with pytest.raises(Conflict, match=r"has files that are no backup's, such as \w+"):
        back_up(store, files, tmp_path)
    with locked(tmp_path / "backup"), pytest.raises(InUse, match="is using this directory"):
        back_up(store, files, tmp_path / "backup")
    store.close()


def test_files_that_have_changed_are_not_backed_up(tmp_path: Path) -> None:
    """A file of an artifact that is gone or has changed ends a backup, and the earlier one stays."""
    store, files, out = filled(f"sqlite:///{tmp_path / 'server.db'}"), tmp_path / "artifacts", tmp_path / "backup"
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    first = back_up(store, files, out)
    put(store, str(files), "expert", FILES, tmp_path / "expert")
    for file in files.glob("blobs/*/*"):
        if file.read_bytes() == b"weights":
            file.write_bytes(b"Weights")
            with pytest.raises(Conflict, match="has changed since it was stored"):
                back_up(store, files, out)
            file.unlink()
            with pytest.raises(Conflict, match=r"is gone from .*; nothing was replaced"):
                back_up(store, files, out)
            break
    else:
        pytest.fail("the artifact has no such file")
    assert read_backup(out) == first
    store.close()


def test_restored_jobs_have_no_driver(tmp_path: Path) -> None:
    """A job that ran when it was backed up gets a new driver at once; a finished one keeps its state."""
    store = filled(f"sqlite:///{tmp_path / 'server.db'}")
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    running = store.create_job(kind="search", name="running", document={}, accepted={})
    writer = store.open_attempt(running.id)
    writer.set_state(JobState.RUNNING)
    writer.heartbeat(wall_clock_s=1.0)
    assert store.job(running.id).has_driver(now=store.now())
    back_up(store, tmp_path / "artifacts", tmp_path / "backup")
    target = empty(tmp_path / "new")
    restore(tmp_path / "backup", target, tmp_path / "new/artifacts")
    assert target.job(running.id).state is JobState.RUNNING
    assert not target.job(running.id).has_driver(now=target.now())
    store.close()
    target.close()


def test_a_restored_server_repeats_no_notification(tmp_path: Path) -> None:
    """What was not sent at the time of the backup is not sent again; endpoints of the original's drivers are gone."""
    store = filled(f"sqlite:///{tmp_path / 'server.db'}")
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    notifications = NotificationStore(store)
    notifications.expand(lambda job, notice: "{}")
    served = store.create_job(kind="serving", name="served", document={}, accepted={}, owner="ann", team="red")
    writer = store.open_attempt(served.id)
    writer.set_document_named(ENDPOINT, {"url": "http://127.0.0.1:8700", "secret": "s"})
    writer.set_document_named(WARM_START, {})
    hook = notifications.add_webhook(
        "https://example.org/", secret="whsec_x", events=tuple(NoticeKind), owner="ann", covers=Coverage.OWN,
        actor=Actor(None, "tests"),
    )  # fmt: skip
    writer.set_state(JobState.FAILED)
    notifications.expand(lambda job, notice: "{}")
    (sent,) = notifications.deliveries(hook.id, limit=10)
    notifications.begin(sent, pause_s=0.0)
    notifications.succeed(sent, status=200)
    writer.set_state(JobState.PAUSED)
    notifications.expand(lambda job, notice: "{}")
    assert len(notifications.deliveries(hook.id, limit=10)) == 2
    writer.set_state(JobState.FAILED)
    assert all(rows_of(store)[table] for table in ("notices", "deliveries", "waits"))
    back_up(store, tmp_path / "artifacts", tmp_path / "backup")
    target = empty(tmp_path / "new")
    restore(tmp_path / "backup", target, tmp_path / "new/artifacts")
    restored = NotificationStore(target)
    assert [each.id for each in restored.deliveries(hook.id, limit=10)] == [sent.id]
    assert [rows_of(target)[table] for table in ("notices", "waits")] == [[], []]
    assert target.document(served.id, ENDPOINT) is None
    assert target.document(served.id, WARM_START) == {}
    store.close()
    target.close()


def test_the_commands_back_up_and_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`backup` and `restore` say what they copied, and refuse a directory without a backup."""
    (tmp_path / "data").mkdir()
    store = filled(f"sqlite:///{tmp_path / 'data/mergesearch.db'}")
    with store.engine.begin() as connection:
        connection.execute(schema.artifacts.delete())
    put(store, str(tmp_path / "data/artifacts"), "expert", FILES, tmp_path / "expert")
    store.close()
    out, new = str(tmp_path / "backup"), str(tmp_path / "new")
    assert main(["restore", out, "--data", new]) == 2
    assert "has no backup.json" in capsys.readouterr().err
    assert not Path(new).exists()
    assert main(["backup", "--data", str(tmp_path / "data"), "--out", out]) == 0
    shown = capsys.readouterr()
    assert "1 jobs (0 unfinished)" in shown.out
    assert "4 files" in shown.out
    assert main(["restore", out, "--data", new]) == 0
    said = capsys.readouterr().out
    assert "1 jobs restored; 0 continue when a server is started" in said
    assert "a token that was revoked since is valid again" in said
    assert main(["restore", out, "--data", new, "--json"]) == 2
    assert "has data already" in capsys.readouterr().err
    assert backups.read_backup(Path(out)).files == 4
