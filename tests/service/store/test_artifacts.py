"""Artifacts: what was stored comes back or is refused, and equal files take their room once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from service.errors import Conflict, NotFound
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store.artifacts import BLOBS, ArtifactStore
from service.types import JobState

NOTHING = ResolvedStudy({}, 0, {}, {}, (), 0, (), "0")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'studies.db'}")
    yield store
    store.close()


@pytest.fixture
def study(store: Store) -> str:
    return store.create_job(kind="search", name="a", document={}, accepted=NOTHING.to_json()).id


@pytest.fixture
def artifacts(store: Store, tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(store, tmp_path / "artifacts")


def model(directory: Path, weights: bytes, *, tokenizer: bytes = b"tokens") -> Path:
    (directory / "sub").mkdir(parents=True)
    (directory / "weights").write_bytes(weights)
    (directory / "sub" / "tokenizer").write_bytes(tokenizer)
    return directory


def blobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "artifacts" / BLOBS).glob("*/*"))


def test_a_directory_comes_back_as_it_was(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    source = model(tmp_path / "model", b"123")
    record = artifacts.put(study, "expert", source, facts={"steps": 3})
    assert artifacts.get(study, "expert") == record
    assert (record.num_bytes, record.facts) == (9, {"steps": 3})
    out = artifacts.write_to(record, tmp_path / "copy")
    assert {p.relative_to(out).as_posix(): p.read_bytes() for p in out.rglob("*") if p.is_file()} == {
        "weights": b"123",
        "sub/tokenizer": b"tokens",
    }


def test_equal_files_are_stored_once(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    """Equal files are stored once, and equal directories have one digest."""
    one = artifacts.put(study, "one", model(tmp_path / "1", b"123"))
    artifacts.put(study, "two", model(tmp_path / "2", b"456"))
    same = artifacts.put(study, "three", model(tmp_path / "3", b"123"))
    assert one.digest == same.digest
    assert len(blobs(tmp_path)) == 5  # one tokenizer, two weights, two manifests
    assert [record.name for record in artifacts.of(study)] == ["one", "three", "two"]


def test_storing_again_replaces(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    artifacts.put(study, "expert", model(tmp_path / "1", b"123"))
    record = artifacts.put(study, "expert", model(tmp_path / "2", b"4567"))
    assert artifacts.of(study) == (record,)


def test_a_changed_or_missing_file_is_refused_and_leaves_nothing(
    artifacts: ArtifactStore, study: str, tmp_path: Path
) -> None:
    record = artifacts.put(study, "expert", model(tmp_path / "model", b"123"))
    weights = next(file for file in blobs(tmp_path) if file.read_bytes() == b"123")
    weights.write_bytes(b"124")
    with pytest.raises(Conflict, match="weights has changed since it was stored"):
        artifacts.write_to(record, tmp_path / "copy")
    weights.unlink()
    with pytest.raises(Conflict, match="is gone"):
        artifacts.write_to(record, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    manifest = tmp_path / "artifacts" / BLOBS / record.digest[:2] / record.digest[2:]
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(Conflict, match="its manifest has changed"):
        artifacts.write_to(record, tmp_path / "copy")


def test_what_no_artifact_has_is_collected(artifacts: ArtifactStore, store: Store, study: str, tmp_path: Path) -> None:
    other = store.create_job(kind="search", name="b", document={}, accepted=NOTHING.to_json()).id
    artifacts.put(study, "expert", model(tmp_path / "1", b"123"))
    kept = artifacts.put(other, "expert", model(tmp_path / "2", b"456"))
    assert artifacts.collect() == 0
    store.open_attempt(study).set_state(JobState.COMPLETE)
    store.delete_job(study)
    assert artifacts.of(study) == ()
    assert artifacts.collect() > 3
    assert len(blobs(tmp_path)) == 3
    artifacts.write_to(kept, tmp_path / "copy")


def test_what_is_not_there_is_refused(artifacts: ArtifactStore, study: str, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="artifact 'none'"):
        artifacts.get(study, "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(Conflict, match="holds no file"):
        artifacts.put(study, "a", tmp_path / "empty")
