"""A server whose studies run on a Ray cluster of four machines, with a fake replica for each machine."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from search_spaces.study.file import load_study
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store.database_url import VARIABLE
from tests.cluster.machines import DASHBOARD_PORT, Cluster, machines
from tests.end_to_end.server import Server, serving
from tests.end_to_end.studies import undisturbed, write_small_study
from tests.postgresql import PostgreSQL
from tests.service.tune.harness import trial_list
from workers.serving.fake import FakeScorer

__all__ = ["NUM_MACHINES", "NUM_REPLICAS", "REPLICA", "SAMPLE_S", "Disturbed", "Site", "site_on"]

NUM_MACHINES = 4
NUM_REPLICAS = 4
SAMPLE_S = 0.05
RUNGS = (20, 60, 180)
MAX_TRIALS = 24
RECOVERY_S = 900.0
REPLICA = "ray::ServeReplica"


@dataclass
class Disturbed:
    """A study that is disturbed: its id, its file, what was measured, and the number of chunks scored before it."""

    id: str
    file: Path
    num_before: int
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"\n{self.file.stem}: " + ", ".join(f"{name} {value:.1f}" for name, value in self.figures.items())


@dataclass
class Site:
    """A cluster, the server that uses it, and its database."""

    cluster: Cluster
    server: Server
    store: Store
    directory: Path

    def write_study(self, name: str, **changes: Mapping[str, Any]) -> Path:
        """A study of the models that all studies of the site share, with `changes` of its sections.

        Studies with the same options of engines share replicas.
        """
        models = self.directory / "models"
        if not models.exists():
            models.mkdir()
            write_small_study(models, name="small", rungs=RUNGS, max_trials=MAX_TRIALS)
        document = yaml.safe_load((models / "study.yaml").read_text())
        document["name"] = name
        document["engine"]["replicas"] = NUM_REPLICAS
        for section, change in changes.items():
            document[section] |= change
        file = models / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    def run(self, name: str, **changes: Mapping[str, Any]) -> str:
        """Run an undisturbed study to its end, and return its id."""
        study = self.server.submit(load_study(self.write_study(name, **changes)).canonical())
        document = self.server.wait_until_ended(study, timeout_s=RECOVERY_S)
        assert document["state"] == "COMPLETE", self.server.story(study)
        return study

    def submit(self, name: str) -> Disturbed:
        """Submit a study, and wait until every replica has a process and three more chunks are stored then."""
        file = self.write_study(name)
        num_before = len(self.calls())
        study = Disturbed(self.server.submit(load_study(file).canonical()), file, num_before)
        self.until_stored(study, 1)
        deadline = time.monotonic() + RECOVERY_S
        while len(self.cluster.machines_with(REPLICA)) < NUM_REPLICAS:
            assert time.monotonic() < deadline, self.server.story(study.id)
            time.sleep(0.2)
        self.until_stored(study, self.num_stored(study) + 3)
        return study

    def num_stored(self, study: Disturbed) -> int:
        return len(self.store.evidence(study.id))

    def until_stored(self, study: Disturbed, number: int) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while self.num_stored(study) < number:
            assert time.monotonic() < deadline, self.server.story(study.id)
            time.sleep(0.2)

    def check_ended(self, study: Disturbed, *, since: float) -> None:
        """Check that the study ends with the trials of an undisturbed run, and that no chunk is stored twice.

        `since` is when it was disturbed, in seconds since the epoch: figures are of the time from then to its end.
        """
        document = self.server.wait_until_ended(study.id, timeout_s=RECOVERY_S)
        assert document["state"] == "COMPLETE", self.server.story(study.id)
        evidence = self.store.evidence(study.id)
        stored = [since, *sorted(each.finished_at for each in evidence if each.finished_at > since)]
        study.figures |= {
            "chunks": len(evidence),
            "stored after the disturbance": len(stored) - 1,
            "longest pause (s)": max(after - before for before, after in itertools.pairwise(stored)),
            "until its end (s)": stored[-1] - since,
            "drivers": self.store.job(study.id).attempt,
        }
        print(study)
        chunks = Counter((each.recipe_digest, key) for each in evidence for key in each.prompts)
        assert max(chunks.values()) == 1, [chunk for chunk, number in chunks.items() if number > 1]
        resolved = ResolvedStudy.of(self.store.job(study.id))
        alone = undisturbed(study.file, self.directory / f"{study.file.stem}-alone", resolved=resolved)
        assert trial_list(self.store, study.id) == alone

    def calls(self) -> list[dict[str, Any]]:
        """The requests that replicas have received so far."""
        return FakeScorer(log_file=str(self.directory / "calls")).calls()

    def num_scored(self, study: Disturbed) -> Counter[str]:
        """Number of times that replicas have scored each chunk of the study, which must be the last one submitted."""
        calls = self.calls()[study.num_before :]
        return Counter(json.dumps([each["recipe"], each["spans"]]) for each in calls if each["outcome"] == "scored")


@contextmanager
def site_on(directory: Path, postgresql: PostgreSQL) -> Iterator[Site]:
    """A site whose machines reach PostgreSQL by its unix socket, which is a file on the shared disk."""
    if not postgresql.is_running:
        postgresql.start()
    database = postgresql.migrated()
    own = {
        "FAKE_SCORER": json.dumps({"sample_delay_s": SAMPLE_S, "log_file": str(directory / "calls")}),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with machines(directory, num_workers=NUM_MACHINES - 1, environment={VARIABLE: database, **own}) as cluster:
        started = time.monotonic()
        cluster.start()
        print(f"\n{NUM_MACHINES} Ray nodes started in {time.monotonic() - started:.0f} s")
        environment = {
            **{name: value for name, value in cluster.environment.items() if name.startswith("RAY_")},
            "RAY_ADDRESS": f"http://{cluster.head.address}:{DASHBOARD_PORT}",
            VARIABLE: database,
            **own,
        }
        with serving(["tests.benchmarks.fake_serve"], directory / "data", environment=environment) as server:
            store = Store(database, waits=True)
            yield Site(cluster, server, store, directory)
            store.close()
