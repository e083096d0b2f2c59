"""The families of the search benchmark, and studies of these families.

Besides the shipped family there are two families that the shipped script trains, with other skills and seeds, into
`.bench/families` when they are first needed. Judge items (2,000 of each skill) are held out before training; the judge
items of the shipped family are its 1,000 holdout items. No search scores judge items.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.family_training import SHIPPED
from workers.tiny_family import family_dir
from workers.types import digest_of

__all__ = ["FAMILIES", "FULL", "TrainedFamily"]

CACHE = Path(".bench/families")

# Samples of each skill in a full evaluation, as in the demo.
FULL = 270


@dataclass(frozen=True)
class TrainedFamily:
    """A base and an expert for each skill, with their tasks.

    `seed` is that of the training; None: the family ships with the package.
    """

    name: str
    skills: tuple[str, ...]
    seed: int | None = None

    def directory(self) -> Path:
        """The directory of models and tasks, which are trained first if they are missing."""
        if self.seed is None:
            return family_dir()
        place = (CACHE / self.name).resolve()
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            making = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=place.parent))
            started = time.perf_counter()
            print(f"training the family {self.name} into {place} ...", file=sys.stderr)
            command = [
                sys.executable,
                "-m",
                "tests.benchmarks.family_training",
                "--out",
                str(making),
                "--seed",
                str(self.seed),
            ]
            command += ["--skills", ",".join(self.skills), "--holdout", "2000"]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            try:
                making.rename(place)
            except OSError:
                if not place.exists():
                    raise
                shutil.rmtree(making)  # another process was faster, and made the same
            print(f"trained in {time.perf_counter() - started:.0f} s", file=sys.stderr)
        return place

    @property
    def digest(self) -> str:
        """Digest of the family's files, or of the training that makes them if they are not shipped."""
        if self.seed is None:
            files = sorted(
                path for path in family_dir().rglob("*") if path.suffix in (".safetensors", ".json", ".jsonl")
            )
            return digest_of([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])[:16]
        return digest_of([self.skills, self.seed, code_digest("tests.benchmarks.family_training")])[:16]

    def mixed_file(self) -> Path:
        """A file with the search items of all skills.

        Exact match on it is the mean of the skills, of which it has equally many items.
        """
        place = (CACHE / f"{self.name}.mixed.jsonl").resolve()
        tasks = self.directory() / "tasks"
        text = "".join((tasks / f"{skill}_search.jsonl").read_text() for skill in self.skills)
        if not place.exists() or place.read_text() != text:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        return place

    def study(self, goal: str, **sections: Any) -> Any:
        """A study of the family, in the form of the shipped study."""
        from search_spaces.study.file import parse_study

        root = self.directory()
        models = {"base": str(root / "base"), "experts": {s: str(root / "experts" / s) for s in self.skills}}
        document = {
            "name": self.name,
            "models": models,
            "objectives": self.objectives(goal),
            "engine": {"max_model_len": 64},
            **sections,
        }
        return parse_study(document)

    def objectives(self, goal: str) -> list[dict[str, Any]]:
        """Objectives of a study for one goal.

        `goal`: "skills", an objective each; "mean", a single one; or "judge", each skill's judge items.
        """
        if goal == "mean":
            return [objective("mean", self.mixed_file())]
        split = "holdout" if goal == "judge" else "search"
        return [objective(skill, self.directory() / "tasks" / f"{skill}_{split}.jsonl") for skill in self.skills]


FAMILIES: Mapping[str, TrainedFamily] = {
    family.name: family
    for family in (
        TrainedFamily("shipped", SHIPPED),
        TrainedFamily("letters", ("text", "lookup", "shift"), seed=1),
        TrainedFamily("numbers", ("math", "lookup", "order"), seed=2),
    )
}


def objective(name: str, file: Path) -> dict[str, Any]:
    return {"name": name, "task": {"file": str(file), "max_tokens": 9}, "metric": "exact_match"}
