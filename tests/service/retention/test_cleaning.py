"""Files and rows of ended jobs that are removed, and those that are always kept."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from service.api.export_queue import Exports
from service.api.regular_cleaning import clean_regularly
from service.cli.main import main
from service.disk import alignments_dir, artifacts_dir, job_dir
from service.errors import Conflict
from service.results.load import run_record
from service.results.summary import summary
from service.retention.cleaning import UNUSED, Cleaner, Removal
from service.retention.limits import Limit, limits_of, parse_keep
from service.store import Store, schema
from service.store.artifacts import ArtifactStore
from service.store.documents import RESPONSES
from service.store.samples import remove_texts
from service.store.steering import SteeringStore
from service.types import JobRecord, JobState
from tests.service.api.harness import ApiServer, finished_study, stored_study
from workers.object_store import blob_path
from workers.types import Split

DAY_S = 86400.0


@dataclass
class Site:
    """A server's store and data directory, without the server."""

    store: Store
    data_dir: Path

    def __post_init__(self) -> None:
        self.artifacts = ArtifactStore(self.store, artifacts_dir(self.data_dir))

    def cleaner(self, *keep: str) -> Cleaner:
        exports = Exports(self.store, self.data_dir)
        limits = limits_of(map(parse_keep, keep))
        return Cleaner(self.store, self.data_dir, self.artifacts, limits, delete_job=exports.delete_job_now)

    def finished(self, name: str, *, days: float = 0.0, **document: Any) -> JobRecord:
        """A finished study that ended `days` ago, with files of its drivers and an artifact."""
        job = finished_study(self.store, num_trials=3, name=name)
        self.change(job.id, document)
        root = job_dir(self.data_dir, job.id)
        for file in (root / "ray" / "trial" / "state.json", alignments_dir(root) / "pair.safetensors"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x" * 100)
        source = self.data_dir / "made"
        source.mkdir(exist_ok=True)
        (source / "weights").write_text(name * 50)
        self.artifacts.put(job.id, "policy", source)
        self.age(job.id, days)
        return self.store.job(job.id)

    def change(self, job_id: str, document: dict[str, Any]) -> None:
        with self.store.engine.begin() as connection:
            table = schema.studies
            connection.execute(
                sa.update(table)
                .where(table.c.id == job_id)
                .values(document={**self.store.job(job_id).document, **document})
            )

    def age(self, job_id: str, days: float) -> None:
        with self.store.engine.begin() as connection:
            table = schema.events
            times = {"time": table.c.time - days * DAY_S}
            connection.execute(sa.update(table).where(table.c.study == job_id).values(times))

    def num_texts(self, job: JobRecord) -> int:
        table = schema.sample_texts
        with self.store.engine.connect() as connection:
            query = sa.select(sa.func.count()).select_from(table).where(table.c.study == job.id)
            return int(connection.execute(query).scalar_one())


@pytest.fixture
def site(database: str, tmp_path: Path) -> Iterator[Site]:
    store = Store(database)
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    yield Site(store, data_dir)
    store.close()


def kinds(removals: tuple[Removal, ...]) -> list[tuple[str, str]]:
    return [(removal.kind, removal.name) for removal in removals]


def test_without_limits_everything_is_kept(site: Site) -> None:
    """Without a limit nothing of any job is removed, however old it is."""
    site.finished("old", days=1000)
    assert site.cleaner().plan() == ()


def test_a_plan_removes_nothing(site: Site) -> None:
    """Planning says how much would be removed and leaves every row and file."""
    job = site.finished("old", days=40)
    plan = site.cleaner("responses=30d", "files=30d").plan()
    assert kinds(plan) == [("responses", "old"), ("files", "old")]
    responses, files = plan
    with site.store.engine.connect() as connection:
        chunks, texts = schema.sample_chunks.c, schema.sample_texts.c
        count = connection.execute(sa.select(sa.func.sum(chunks.num_samples))).scalar_one()
        packed = connection.execute(sa.select(texts.packed)).scalars()
        assert (responses.count, responses.num_bytes) == (count, sum(map(len, packed)))
    assert (files.count, files.num_bytes, files.job) == (1, 100, job.id)
    assert files.because == "ended 40.0 days ago"
    assert site.num_texts(job) > 0
    assert site.cleaner("responses=30d", "files=30d").plan() == plan


def test_values_and_scores_stay_when_responses_go(site: Site) -> None:
    """Responses and tokens are removed with values, flags and scores kept, and the summary says so."""
    job = site.finished("old", days=40)
    before = summary(run_record(site.store, job.id))
    samples = {
        trial.recipe.digest: site.store.samples(job.id, trial.recipe.digest, Split.HOLDOUT)
        for trial in site.store.trials(job.id)
    }
    assert any(samples.values())
    cleaner = site.cleaner("responses=30d")
    (removal,) = cleaner.carry_out(cleaner.plan())
    assert site.num_texts(job) == 0
    after = summary(run_record(site.store, job.id))
    stored = site.store.document(job.id, RESPONSES)
    assert stored is not None
    assert after["samples"]["responses_removed"] == {
        "time": stored["removed_at"],
        "samples": removal.count,
        "bytes": removal.num_bytes,
    }
    assert before["samples"]["responses_removed"] is None
    assert after["samples"]["stored_bytes"] == {**before["samples"]["stored_bytes"], "texts": 0}
    for key in ("best", "holdout", "trials", "finding", "constraints", "verification"):
        assert after[key] == before[key], key
    for own, kept in samples.items():
        now = site.store.samples(job.id, own, Split.HOLDOUT)
        assert [(s.objective, s.position, s.document, s.value, s.is_truncated) for s in now] == [
            (s.objective, s.position, s.document, s.value, s.is_truncated) for s in kept
        ]
        assert {s.response for s in now} <= {""}
    assert cleaner.plan() == ()


def test_a_removal_does_not_make_a_job_younger(site: Site) -> None:
    """The age of a job is the time since it ended, also after its responses were removed."""
    site.finished("old", days=40)
    cleaner = site.cleaner("responses=30d")
    cleaner.carry_out(cleaner.plan())
    assert kinds(site.cleaner("files=30d").plan()) == [("files", "old")]


def test_an_interrupted_removal_is_completed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that was killed between two recipes is completed later; number, bytes and time are those of all."""
    from service.store import results

    job = site.finished("old", days=40)
    cleaner = site.cleaner("responses=30d")
    (removal,) = cleaner.plan()
    num_calls = 0

    def remove_one(connection: sa.Connection, study: str) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise KeyboardInterrupt
        return remove_texts(connection, study)

    before = site.num_texts(job)
    with monkeypatch.context() as changes:
        changes.setattr(results, "remove_texts", remove_one)
        with pytest.raises(KeyboardInterrupt):
            cleaner.carry_out((removal,))
    assert 0 < site.num_texts(job) < before
    stored = site.store.document(job.id, RESPONSES)
    cleaner.carry_out(cleaner.plan())
    assert site.num_texts(job) == 0
    assert site.store.document(job.id, RESPONSES) == stored
    assert stored is not None
    assert (stored["num_samples"], stored["num_bytes"]) == (removal.count, removal.num_bytes)


def test_alignments_stay_when_files_go(site: Site) -> None:
    """Files of drivers are removed; alignments stay, because exports of the study's trials need them."""
    job = site.finished("old", days=40)
    cleaner = site.cleaner("files=30d")
    cleaner.carry_out(cleaner.plan())
    root = job_dir(site.data_dir, job.id)
    assert [file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file()] == [
        "alignments/pair.safetensors"
    ]


def test_old_jobs_go_with_all_that_they_have(site: Site) -> None:
    """A job that is removed leaves no row, no file and no artifact, and nothing else of it is listed."""
    old, new = site.finished("old", days=200), site.finished("new", days=100)
    cleaner = site.cleaner("jobs=180d", "responses=180d", "files=180d")
    plan = cleaner.plan()
    assert kinds(plan) == [("jobs", "old")]
    assert plan[0].num_bytes > 200
    cleaner.carry_out(plan)
    assert [job.id for job in site.store.jobs()] == [new.id]
    assert not job_dir(site.data_dir, old.id).exists()
    assert [record.study for record in site.artifacts.of(new.id)] == [new.id]
    assert site.artifacts.num_bytes() < 2 * sum(record.num_bytes for record in site.artifacts.of(new.id)) + 500
    assert site.num_texts(new) > 0


def test_the_oldest_go_until_the_rest_fits(site: Site) -> None:
    """With a size the oldest are removed until all of the kind together fit."""
    for days, name in ((3, "c"), (1, "a"), (2, "b")):
        site.finished(name, days=days)
    assert kinds(site.cleaner("files=0.00025MB").plan()) == [("files", "c")]
    assert kinds(site.cleaner("files=0.00015MB").plan()) == [("files", "c"), ("files", "b")]
    assert kinds(site.cleaner("files=1MB").plan()) == []
    assert kinds(site.cleaner("files=2.5d,1MB").plan()) == [("files", "c")]


@pytest.mark.parametrize("state", [JobState.CREATED, JobState.RUNNING, JobState.STOPPED])
def test_a_job_that_has_not_ended_keeps_all(site: Site, state: JobState) -> None:
    """Nothing of an unfinished job is removed, by age or by size, also if a stale plan names it."""
    job = site.finished("old", days=400)
    limits = ("jobs=1d,0.000001MB", "responses=1d,0.000001MB", "files=1d,0.000001MB")
    stale = [Removal(kind, job.id, job.name, 1, 1, "") for kind in ("jobs", "responses", "files")]
    site.store.open_attempt(job.id).set_state(state)
    site.age(job.id, 400)
    assert site.cleaner(*limits).plan() == ()
    assert site.cleaner(*limits).carry_out(stale) == ()
    assert site.num_texts(job) > 0
    assert (job_dir(site.data_dir, job.id) / "ray" / "trial" / "state.json").is_file()


def test_a_failed_job_keeps_what_it_needs_to_continue(site: Site) -> None:
    """A failed job, which may be resumed, keeps responses and files, and is removed as a whole by age."""
    job = site.finished("old", days=0)
    site.store.open_attempt(job.id).set_state(JobState.FAILED)
    site.age(job.id, 400)
    assert site.cleaner("responses=1d", "files=1d").plan() == ()
    assert kinds(site.cleaner("jobs=1d").plan()) == [("jobs", "old")]


@pytest.mark.parametrize("how", ["source", "start", "warm_start", "path_of", "artifact"])
def test_a_job_that_another_refers_to_keeps_all(site: Site, how: str) -> None:
    """Nothing of a job is removed that another job names, by id or by the digest of an artifact."""
    job = site.finished("first", days=400)
    other = stored_study(site.store, name="second")
    models = dict(other.document["models"])
    search = dict(other.document["search"])
    reference = {"id": job.id}
    (artifact,) = site.artifacts.of(job.id)
    changed: dict[str, Any] = {
        "source": {"models": {**models, "experts": {**models["experts"], "m": {"from_study": reference}}}},
        "path_of": {"models": {**models, "path_of": reference}},
        "start": {"search": {**search, "hm3": {**search["hm3"], "start": reference}}},
        "warm_start": {"search": {**search, "warm_start": reference}},
        "artifact": {"models": {**models, "base": f"s3://bucket/files/{blob_path(artifact.digest)}"}},
    }[how]
    limits = ("jobs=1d", "responses=1d", "files=1d")
    plan = site.cleaner(*limits).plan()
    assert kinds(plan) == [("jobs", "first")]
    site.change(other.id, changed)
    assert site.cleaner(*limits).plan() == ()
    assert site.cleaner(*limits).carry_out(plan) == ()
    assert site.store.job(job.id) == job


def test_a_training_stays_for_the_study_of_its_experts(site: Site) -> None:
    """A fine-tuning is kept as long as the study of its experts is stored."""
    training = site.store.create_job(kind="finetune", name="experts", document={}, accepted={})
    site.store.open_attempt(training.id).set_state(JobState.COMPLETE)
    site.age(training.id, 400)
    assert kinds(site.cleaner("jobs=1d").plan()) == [("jobs", "experts")]
    stored_study(site.store, name="second", key=f"finetune {training.id}")
    assert site.cleaner("jobs=1d").plan() == ()


def test_responses_that_are_gone_end_resuming(site: Site) -> None:
    """A study whose responses were removed cannot be resumed for void samples, and one with such samples keeps them."""
    job = site.finished("old", days=40)
    replica = site.store.evidence(job.id)[0].replica
    cleaner = site.cleaner("responses=30d")
    plan = cleaner.plan()
    with site.store.engine.begin() as connection:
        connection.execute(sa.update(schema.evidence).values(canaries=1))
        row = {"replica": replica, "canaries": 0, "reason": "wrong", "time": 0.0}
        connection.execute(sa.insert(schema.engine_faults).values(row))
    assert site.store.has_void(job.id)
    assert cleaner.plan() == ()
    cleaner.carry_out(plan)
    assert SteeringStore(site.store).resume(job.id, reason="again").state is JobState.COMPLETE


def test_unused_files_of_artifacts_are_removed(site: Site) -> None:
    """Files of artifacts that no job uses, as a killed process leaves them, are listed with their bytes and removed."""
    job = site.finished("new")
    with site.store.engine.begin() as connection:
        connection.execute(sa.delete(schema.artifacts).where(schema.artifacts.c.study == job.id))
    held = site.artifacts.num_bytes()
    cleaner = site.cleaner()
    (removal,) = plan = cleaner.plan()
    assert (removal.kind, removal.num_bytes) == (UNUSED, held)
    assert site.artifacts.num_bytes() == held
    cleaner.carry_out(plan)
    assert site.artifacts.num_bytes() == 0


def test_only_the_leader_cleans(site: Site) -> None:
    """A server that is not the leader removes nothing; the leader does."""
    job = site.finished("old", days=40)

    async def one_round(is_leader: bool) -> None:
        task = asyncio.create_task(
            clean_regularly(site.cleaner("responses=30d"), is_leader=lambda: is_leader, round_s=0.02)
        )
        for _ in range(200):
            await asyncio.sleep(0.02)
            if not site.num_texts(job):
                break
            if not is_leader:
                break
        task.cancel()

    asyncio.run(one_round(False))
    assert site.num_texts(job) > 0
    asyncio.run(one_round(True))
    assert site.num_texts(job) == 0


@pytest.mark.parametrize(
    "text", ["responses=30d", "files=5GB", "jobs=180d,50GB", "jobs=1.5h", "files=0.5TB", "jobs=2w"]
)
def test_limits_are_parsed(text: str) -> None:
    """Ages in hours, days and weeks, sizes, and both are accepted."""
    units = {"30d": 30 * DAY_S, "180d": 180 * DAY_S, "1.5h": 5400.0, "2w": 14 * DAY_S}
    sizes = {"5GB": 5 * 10**9, "50GB": 50 * 10**9, "0.5TB": 5 * 10**11}
    kind, _, given = text.partition("=")
    ages = [units[part] for part in given.split(",") if part in units]
    found = [sizes[part] for part in given.split(",") if part in sizes]
    assert parse_keep(text) == (kind, Limit(next(iter(ages), None), next(iter(found), None)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("30d", "'30d' is not a limit; write KIND=LIMIT with one of jobs, responses, files, as responses=30d"),
        ("logs=7d", "'logs=7d' is not a limit"),
        ("jobs=", "'jobs=': '' is not accepted; give an age such as 12h, 30d or 8w, a size such as 5GB, or 30d,5GB"),
        ("jobs=7", "'7' is not accepted"),
        ("jobs=0d", "'0d' is not accepted"),
        ("jobs=1d,2d", "'2d' is not accepted"),
        ("jobs=1GB,2GB", "'2GB' is not accepted"),
    ],
)
def test_other_limits_are_refused(text: str, message: str) -> None:
    """What is no limit is refused with what is accepted."""
    with pytest.raises(ValueError, match=r"not accepted|not a limit") as refused:
        parse_keep(text)
    assert message in str(refused.value)


def test_a_kind_has_one_limit() -> None:
    """A kind that is given twice is refused."""
    with pytest.raises(Conflict, match="--keep jobs is given twice; write one, with an age and a size"):
        limits_of([parse_keep("jobs=1d"), parse_keep("jobs=5GB")])


def test_the_command_shows_before_it_removes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`clean --dry-run` prints number and bytes by job and kind and changes nothing; without it they are removed."""
    monkeypatch.delenv("MERGESEARCH_DATABASE", raising=False)
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    site = Site(store, tmp_path)
    job = site.finished("old", days=40)
    shutil.rmtree(tmp_path / "made")
    command = ["clean", "--data", str(tmp_path), "--keep", "responses=30d", "--keep", "files=30d"]
    assert main([*command, "--dry-run", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert [(each["kind"], each["job"]) for each in planned] == [("responses", job.id), ("files", job.id)]
    assert main([*command, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"files of old ({job.id}), 100 bytes: ended 40.0 days ago" in shown
    assert "would be removed: files: 1, 100 bytes" in shown
    assert site.num_texts(job) > 0
    assert main(command) == 0
    assert "removed: files: 1, 100 bytes" in capsys.readouterr().out
    assert site.num_texts(job) == 0
    assert main(command) == 0
    assert capsys.readouterr().out == "nothing exceeds the limits\n"
    assert main(["clean", "--data", str(tmp_path / "none"), "--dry-run"]) == 2
    with pytest.raises(SystemExit):
        main(["clean", "--data", str(tmp_path), "--keep", "logs=7d"])
    assert "'logs=7d' is not a limit" in capsys.readouterr().err
    store.close()


def test_the_command_needs_the_server_to_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a server uses the directory, `clean` shows what it would remove and removes nothing."""
    from service.disk import locked

    monkeypatch.delenv("MERGESEARCH_DATABASE", raising=False)
    site = Site(Store(f"sqlite:///{tmp_path / 'mergesearch.db'}"), tmp_path)
    job = site.finished("old", days=40)
    with locked(tmp_path):
        assert main(["clean", "--data", str(tmp_path), "--keep", "responses=30d", "--dry-run"]) == 0
        assert main(["clean", "--data", str(tmp_path), "--keep", "responses=30d"]) == 2
    assert site.num_texts(job) > 0
    site.store.close()


def test_views_say_that_responses_were_removed(tmp_path: Path) -> None:
    """Over HTTP the summary and an event say that responses were removed, and the cached answer is not used again."""
    with ApiServer(tmp_path) as server:
        site = Site(server.store, tmp_path)
        job = site.finished("old", days=40)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            place = f"/v1/studies/{job.id}/summary"
            first = http.get(place)
            assert first.json()["samples"]["responses_removed"] is None
            cleaner = site.cleaner("responses=30d")
            cleaner.carry_out(cleaner.plan())
            answer = http.get(place, headers={"If-None-Match": first.headers["etag"]})
            assert answer.status_code == 200
            assert answer.json()["samples"]["responses_removed"]["samples"] > 0
            assert answer.json()["samples"]["stored_bytes"]["texts"] == 0
            number = answer.json()["samples"]["responses_removed"]["samples"]
            assert f"of {number:,} samples removed on 20" in http.get(f"/v1/studies/{job.id}/report").text


def test_a_server_removes_what_exceeds_its_limits(tmp_path: Path) -> None:
    """A server with limits removes what exceeds them when it starts, and serves the rest."""
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    site = Site(store, tmp_path)
    old, new = site.finished("old", days=400), site.finished("new", days=1)
    with ApiServer(tmp_path, retention=limits_of([parse_keep("jobs=30d")])) as server:
        deadline = time.monotonic() + 60
        while len(server.store.jobs()) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert httpx.get(f"{server.url}/v1/studies/{old.id}", timeout=60).status_code == 404
        assert httpx.get(f"{server.url}/v1/studies/{new.id}", timeout=60).status_code == 200
    store.close()


def test_serve_takes_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve --keep` gives the server the limits by kind, and refuses a kind that is given twice."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("service.cli.verbs.run_server", lambda _, **options: given.update(options))
    command = ["serve", "--data", str(tmp_path), "--keep", "responses=30d", "--keep", "jobs=180d,50GB"]
    assert main(command) == 0
    assert given["keep"] == {"responses": Limit(30 * DAY_S), "jobs": Limit(180 * DAY_S, 50 * 10**9)}
    assert main([*command, "--keep", "jobs=1d"]) == 2
