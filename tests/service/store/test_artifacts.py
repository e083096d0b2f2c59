"""Artifacts, in a directory and in an object store.

Stored artifacts come back unchanged or are refused, equal files are stored once, and no used file is deleted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.errors import Conflict, NotFound
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store import artifacts as artifacts_module
from service.store.artifacts import ArtifactStore
from service.store.blobs import BLOBS, GRACE_S, DirectoryBlobs, open_blobs
from service.types import ArtifactRecord, JobState
from tests.s3_server import S3, failing
from workers.object_store import ObjectStore, ObjectStoreError

NOTHING = ResolvedStudy({}, 0, {}, {}, (), 0, (), "0")


@dataclass(frozen=True)
class Place:
    """A place of artifacts: its location, its stored files by digest, and functions that replace and delete a file."""

    location: str | Path
    files: Callable[[], dict[str, bytes]]
    write: Callable[[str, bytes], object]
    delete: Callable[[str], object]


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    store = Store(database)
    yield store
    store.close()


@pytest.fixture
def study(store: Store) -> str:
    return store.create_job(kind="search", name="a", document={}, accepted=NOTHING.to_json()).id


@pytest.fixture(params=["directory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "directory":
        root = tmp_path / "artifacts"

        def files() -> dict[str, bytes]:
            return {file.parent.name + file.name: file.read_bytes() for file in (root / BLOBS).glob("*/*")}

        def of(digest: str) -> Path:
            return root / BLOBS / digest[:2] / digest[2:]

        return Place(root, files, lambda digest, content: of(digest).write_bytes(content), lambda d: of(d).unlink())
    s3: S3 = request.getfixturevalue("s3")
    objects = ObjectStore(f"{s3.bucket()}/mergesearch")

    def listed() -> dict[str, bytes]:
        return {path.removeprefix(f"{BLOBS}/").replace("/", ""): objects.read(path) for path in objects.list(BLOBS)}

    def key(digest: str) -> str:
        return f"{BLOBS}/{digest[:2]}/{digest[2:]}"

    return Place(
        objects.url,
        listed,
        lambda digest, content: objects.write(key(digest), content),
        lambda digest: objects.delete(key(digest)),
    )


@pytest.fixture
def artifacts(store: Store, place: Place) -> ArtifactStore:
    return ArtifactStore(store, place.location)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Function that moves the clock forward by seconds."""

    def move(seconds: float) -> None:
        now = time.time() + seconds
        monkeypatch.setattr("service.store.blobs.time.time", lambda: now)

    return move


def model(directory: Path, weights: bytes, *, tokenizer: bytes = b"tokens") -> Path:
    (directory / "sub").mkdir(parents=True)
    (directory / "weights").write_bytes(weights)
    (directory / "sub" / "tokenizer").write_bytes(tokenizer)
    return directory


def test_a_directory_comes_back_as_it_was(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    source = model(tmp_path / "model", b"123")
    record = artifacts.put(study, "expert", source, facts={"steps": 3})
    assert artifacts.get(study, "expert") == record
    assert (record.num_bytes, record.facts) == (9, {"steps": 3})
    out = artifacts.write_to(record, tmp_path / "copy")
    content = {"weights": b"123", "sub/tokenizer": b"tokens"}
    assert {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()} == content
    files = artifacts.files(record)
    assert {path: file.num_bytes for path, file in files.items()} == {"weights": 3, "sub/tokenizer": 6}
    for path, file in files.items():
        with file.open() as stream:
            assert stream.read() == content[path]


def test_equal_files_are_stored_once(artifacts: ArtifactStore, place: Place, study: str, tmp_path: Path) -> None:
    """Equal files are stored once, and equal directories have one digest."""
    one = artifacts.put(study, "one", model(tmp_path / "1", b"123"))
    artifacts.put(study, "two", model(tmp_path / "2", b"456"))
    same = artifacts.put(study, "three", model(tmp_path / "3", b"123"))
    assert one.digest == same.digest
    assert len(place.files()) == 5  # one tokenizer, two weights, two manifests
    assert artifacts.num_bytes() == sum(map(len, place.files().values()))
    assert [record.name for record in artifacts.of(study)] == ["one", "three", "two"]


def test_storing_again_replaces(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    artifacts.put(study, "expert", model(tmp_path / "1", b"123"))
    record = artifacts.put(study, "expert", model(tmp_path / "2", b"4567"))
    assert artifacts.of(study) == (record,)


def test_a_changed_or_missing_file_is_refused_and_leaves_nothing(
    artifacts: ArtifactStore, place: Place, study: str, tmp_path: Path
) -> None:
    record = artifacts.put(study, "expert", model(tmp_path / "model", b"123"))
    weights = next(digest for digest, content in place.files().items() if content == b"123")
    place.write(weights, b"124")
    with pytest.raises(Conflict, match="weights has changed since it was stored"):
        artifacts.write_to(record, tmp_path / "copy")
    place.delete(weights)
    with pytest.raises(Conflict, match="is gone"):
        artifacts.write_to(record, tmp_path / "copy")
    with pytest.raises(Conflict, match="weights is gone"):
        artifacts.files(record)
    assert not (tmp_path / "copy").exists()
    place.write(record.digest, place.files()[record.digest] + b" ")
    with pytest.raises(Conflict, match="its manifest has changed"):
        artifacts.write_to(record, tmp_path / "copy")
    place.delete(record.digest)
    with pytest.raises(Conflict, match="its files are gone"):
        artifacts.write_to(record, tmp_path / "copy")


def test_unused_files_are_deleted(
    artifacts: ArtifactStore,
    store: Store,
    place: Place,
    study: str,
    tmp_path: Path,
    later: Callable[[float], None],
) -> None:
    """Files that no artifact uses are deleted, in an object store once they are old; used files stay."""
    other = store.create_job(kind="search", name="b", document={}, accepted=NOTHING.to_json()).id
    artifacts.put(study, "expert", model(tmp_path / "1", b"123"))
    kept = artifacts.put(other, "expert", model(tmp_path / "2", b"456"))
    assert artifacts.collect() == 0
    store.open_attempt(study).set_state(JobState.COMPLETE)
    store.delete_job(study)
    assert artifacts.of(study) == ()
    if isinstance(place.location, str):
        assert artifacts.collect() == 0, "another process may be about to name them"
        later(GRACE_S + 60)
    assert artifacts.collect() > 3
    assert len(place.files()) == 3
    artifacts.write_to(kept, tmp_path / "copy")


def test_a_file_about_to_be_named_is_not_deleted(
    artifacts: ArtifactStore, place: Place, tmp_path: Path, later: Callable[[float], None]
) -> None:
    """Unused files stay while a writer may be about to name them in SQL."""
    files = open_blobs(place.location)
    (tmp_path / "weights").write_bytes(b"123")
    with files.storing():
        digest, _ = files.add(tmp_path / "weights")
        if isinstance(place.location, str):
            later(0.9 * GRACE_S)
        assert artifacts.collect() == 0
        assert files.read(digest) == b"123"


def test_an_old_object_is_written_again(s3: S3, tmp_path: Path, later: Callable[[float], None]) -> None:
    """An object that may soon be deleted as unused is written anew when it is stored again, a new one is not."""
    files = open_blobs(s3.bucket())
    (tmp_path / "weights").write_bytes(b"123")
    written = []
    for age_s in (0.0, 0.4 * GRACE_S, 0.6 * GRACE_S):
        later(age_s)
        before = s3.num("PUT")
        files.add(tmp_path / "weights")
        written.append(s3.num("PUT") - before)
    assert written == [1, 0, 1]


def test_what_is_stored_is_not_sent_again(store: Store, study: str, s3: S3, tmp_path: Path) -> None:
    """A writer that was interrupted continues with the files that are not stored yet."""
    artifacts = ArtifactStore(store, f"{s3.bucket()}/x")
    source = model(tmp_path / "model", b"123")
    with (
        failing(s3, lambda method, path: (403, "AccessDenied") if method == "PUT" and _is_second(s3) else None),
        pytest.raises(ObjectStoreError, match="cannot write it"),
    ):
        artifacts.put(study, "expert", source)
    assert artifacts.of(study) == ()
    before = s3.num("PUT")
    artifacts.put(study, "expert", source)
    assert s3.num("PUT") - before == 2, "weights and manifest; the tokenizer was stored"


def test_manifests_are_read_once(store: Store, study: str, s3: S3, tmp_path: Path) -> None:
    """Later searches for unused files list the store, and read only the manifests of new artifacts."""
    artifacts = ArtifactStore(store, f"{s3.bucket()}/x")
    for number in range(3):
        artifacts.put(study, f"expert {number}", model(tmp_path / str(number), str(number).encode()))

    def num_read() -> int:
        s3.requests.clear()
        artifacts.collect()
        return sum(method == "GET" and "/blobs/" in path for method, path in s3.requests)

    assert [num_read(), num_read()] == [3, 0]
    artifacts.put(study, "new", model(tmp_path / "new", b"new"))
    artifacts.remove(study, "expert 0")
    assert [num_read(), num_read()] == [1, 0]
    assert {*artifacts.used()} >= {record.digest for record in artifacts.of(study)}


def test_one_artifact_is_read_without_the_others(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    for number in range(3):
        artifacts.put(study, f"expert {number}", model(tmp_path / str(number), str(number).encode()))
    made: list[str] = []

    def record(**row: Any) -> ArtifactRecord:
        made.append(row["name"])
        return ArtifactRecord(**row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts_module, "ArtifactRecord", record)
        assert artifacts.get(study, "expert 1").name == "expert 1"
    assert made == ["expert 1"]


def _is_second(s3: S3) -> bool:
    """Whether the latest request is the second PUT into its bucket."""
    bucket = s3.requests[-1][1].split("/")[1]
    return sum(method == "PUT" and path.startswith(f"/{bucket}/") for method, path in s3.requests) == 2


def test_locations_are_checked(store: Store, tmp_path: Path) -> None:
    assert open_blobs(f"file://{tmp_path}/x%20y").place == str(tmp_path / "x y" / BLOBS)
    with pytest.raises(Conflict, match="expected a directory, file:///DIRECTORY, s3://BUCKET/FOLDER or gs://"):
        open_blobs("ftp://host/x")
    with pytest.raises(Conflict, match="credentials do not belong in a URL"):
        open_blobs("s3://key:secret@bucket/x")


def test_what_is_not_there_is_refused(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="artifact 'none'"):
        artifacts.get(study, "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Conflict, match="holds no file"):
        artifacts.put(study, "a", tmp_path / "empty")


def test_a_source_counts_for_the_team_of_the_study_that_has_it(store: Store, place: Place, tmp_path: Path) -> None:
    """Studies of another team that name a study as a source do not use up the quota of that study's team."""
    artifacts = ArtifactStore(store, place.location)
    red, blue = (
        store.create_job(kind="search", name=team, document={}, accepted=NOTHING.to_json(), team=team).id
        for team in ("red", "blue")
    )
    for name, text in (("expert", "12345"), ("model", "1234567")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(text)
    artifacts.put(red, "math", tmp_path / "expert")
    source = artifacts.put(red, "source-0123456789abcdef-bfloat16", tmp_path / "model")
    assert artifacts.num_bytes_of_team("red") == 5 + 7, "no study has the source yet"
    artifacts.keep(blue, f"source-{source.digest[:16]}", source.digest)
    assert (artifacts.num_bytes_of_team("red"), artifacts.num_bytes_of_team("blue")) == (5, 7)
    trained = store.create_job(kind="finetune", name="t", document={}, accepted=NOTHING.to_json(), team="green").id
    for name in ("source-code-python", "export-sql"):  # experts may have such names
        artifacts.put(trained, name, tmp_path / "expert")
    assert artifacts.num_bytes_of_team("green", named_by_users={"finetune"}) == 5
    assert artifacts.num_bytes_of_team("green") == 0


def test_files_are_stored_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFSv4 refuses a shared lock on a file that is not open for reading, and an exclusive one without writing."""
    flock = fcntl.flock

    def of_nfs(file: Any, operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_WRONLY if operation & fcntl.LOCK_SH else os.O_RDONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    blobs = DirectoryBlobs(tmp_path)
    with blobs.storing():
        blobs.add_bytes(b"content")
    assert blobs.collect(set) == len(b"content")
