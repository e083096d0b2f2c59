"""Fine-tunings whose experts would exceed the limit on artifacts are refused; stored artifacts are never removed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.api.limits.artifacts import ArtifactQuota
from service.disk import artifacts_dir
from service.errors import Conflict
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.types import JobRecord, JobState
from tests.service.api.harness import finetuning, finished_finetune
from workers.training.finetuning.fleet import parse_pipeline


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")


def begun(store: Store, num_bytes: int) -> JobRecord:
    """A fine-tuning whose experts will take `num_bytes`."""
    document = parse_pipeline(finetuning("begun")).canonical()
    return store.create_job(kind="finetune", name="begun", document=document, accepted={"artifact_bytes": num_bytes})


def admitted(store: Store, directory: Path, num_bytes: int, *, quota: int) -> bool:
    artifacts = ArtifactStore(store, artifacts_dir(directory))
    try:
        return ArtifactQuota(store, artifacts, quota).admit(num_bytes, lambda: True)
    except Conflict:
        return False


def test_what_is_stored_and_what_is_to_come_count(store: Store, tmp_path: Path) -> None:
    finished_finetune(store, tmp_path)
    used = ArtifactStore(store, artifacts_dir(tmp_path)).num_bytes()
    assert used > 8000
    assert admitted(store, tmp_path, 100, quota=used + 100)
    assert not admitted(store, tmp_path, 101, quota=used + 100)
    coming = begun(store, 60)
    assert not admitted(store, tmp_path, 100, quota=used + 100)
    assert admitted(store, tmp_path, 40, quota=used + 100)
    expert = tmp_path / "expert"
    expert.mkdir()
    (expert / "weights").write_bytes(bytes(50))
    artifacts = ArtifactStore(store, artifacts_dir(tmp_path))
    artifacts.put(coming.id, "math", expert)
    used = artifacts.num_bytes()
    assert admitted(store, tmp_path, 90, quota=used + 100), "50 of 60 bytes are there"
    assert not admitted(store, tmp_path, 91, quota=used + 100)
    store.open_attempt(coming.id).set_state(JobState.CANCELLED, "")
    assert admitted(store, tmp_path, 100, quota=used + 100)


def test_files_are_measured_outside_of_the_admission(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring the files keeps no other request waiting, and what is stored meanwhile counts; studies need none."""
    artifacts = ArtifactStore(store, artifacts_dir(tmp_path))
    coming, measured = begun(store, 60), []
    expert = tmp_path / "expert"
    expert.mkdir()
    (expert / "weights").write_bytes(bytes(50))

    def measure() -> int:
        with ThreadPoolExecutor(1) as pool:  # another request, which would wait for the database's lock
            pool.submit(lambda: store.open_attempt(coming.id)).result(timeout=10)
        measured.append(ArtifactStore.num_bytes(artifacts))
        artifacts.put(coming.id, "math", expert)
        return measured[-1]

    monkeypatch.setattr(artifacts, "num_bytes", measure)
    with pytest.raises(Conflict, match="unfinished fine-tunings will take"):
        ArtifactQuota(store, artifacts, 100).admit(41, lambda: True)
    assert measured == [0]
    assert ArtifactQuota(store, artifacts, 0).admit(0, lambda: True)
    assert measured == [0], "a study needs no measuring"


def test_deleting_frees_the_room(store: Store, tmp_path: Path) -> None:
    record = finished_finetune(store, tmp_path)
    assert not admitted(store, tmp_path, 100, quota=2000)
    store.delete_job(record.id)
    ArtifactStore(store, artifacts_dir(tmp_path)).collect()
    assert admitted(store, tmp_path, 100, quota=2000)


def test_the_refusal_says_what_takes_the_room(store: Store, tmp_path: Path) -> None:
    quota = ArtifactQuota(store, ArtifactStore(store, artifacts_dir(tmp_path)), 2**30)
    with pytest.raises(Conflict, match=r"need 2\.0 GiB; of the 1\.0 GiB of --artifact-quota, .* take 0\.0 GiB"):
        quota.admit(2**31, lambda: None)


def test_studies_are_never_refused(store: Store, tmp_path: Path) -> None:
    finished_finetune(store, tmp_path)
    assert admitted(store, tmp_path, 0, quota=1)
