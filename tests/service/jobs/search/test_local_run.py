"""Studies of earlier versions of the program that are continued in their directory."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.study.benchmarks import AddedBenchmarks, Contamination
from search_spaces.study.file import Study, parse_study, same_but_limits, with_benchmarks
from service.errors import Conflict
from service.jobs.search.local_run import (
    DATABASE,
    _created_or_resumed,
    _with_stored_benchmarks,
    _with_stored_defaults,
)
from service.store import Store
from service.store.steps import NoteRequest, NoteResult, NoteStep
from service.tune.refinement_stage import CHOICE
from tests.service.resolved import resolved_study

MODELS = {"base": "org/base", "experts": {"a": "org/a", "b": "org/b"}}


def study_of(**hm3: Any) -> Study:
    objectives = [{"name": "x", "task": "gsm8k", "metric": "exact_match"}]
    return Study.model_validate({"name": "s", "models": MODELS, "objectives": objectives, "search": {"hm3": hm3}})


def differing(stored: Study, given: Study, *, algorithm: str, version: int) -> tuple[str, ...]:
    with TemporaryDirectory() as directory:
        return same_but_limits(stored, continued(Path(directory), stored, given, algorithm=algorithm, version=version))


def continued(
    directory: Path,
    stored: Study,
    given: Study,
    *,
    algorithm: str = "hm3",
    version: int = 4,
    notes: list[str] | None = None,
) -> Study:
    """The study as which `given` continues `stored`, which an earlier version has stored in `directory`."""
    resolved = replace(resolved_study(algorithm=algorithm), searcher_version=version)
    with closing(Store(f"sqlite:///{directory / DATABASE}")) as store:
        store.create_job(kind="search", name="s", document=stored.canonical(), accepted=resolved.to_json())
    return _with_stored_defaults(given, directory, note=([] if notes is None else notes).append)


def test_an_earlier_default_is_no_other_study() -> None:
    """Earlier programs stored gamma 0.99 with every study; files that leave gamma out continue these studies."""
    earlier = study_of(gamma=0.99)
    assert differing(earlier, study_of(), algorithm="hm3", version=1) == ()
    assert differing(earlier, study_of(), algorithm="es", version=1) == ()
    assert differing(earlier, study_of(gamma=0.99), algorithm="hm3", version=1) == ()
    assert differing(study_of(), study_of(), algorithm="hm3", version=2) == ()
    # Where it was stated, or is stated now, it is another study.
    gamma = ("search.hm3.gamma",)
    assert differing(earlier, study_of(), algorithm="hm3", version=2) == gamma
    assert differing(study_of(gamma=0.9), study_of(), algorithm="hm3", version=1) == gamma
    assert differing(earlier, study_of(gamma=1.0), algorithm="hm3", version=1) == gamma


@pytest.mark.parametrize(
    ("option", "value"), [("archive", 4), ("archive", 16), ("epochs", 4), ("exploration", 0.1), ("neighbours", 12)]
)
def test_earlier_defaults_of_hm3_are_kept(tmp_path: Path, option: str, value: float) -> None:
    """A study continues with the defaults with which it began, and with them its document is stored again."""
    notes: list[str] = []
    earlier = study_of(**{option: value})
    found = continued(tmp_path, earlier, study_of(), notes=notes)
    assert found == earlier
    assert notes == [f"search.hm3.{option} stays {value}, the default when the study began"]
    resolved = resolved_study(algorithm="hm3")
    preflight: Any = SimpleNamespace(resolved=lambda: resolved)
    longer = found.model_copy(update={"limits": found.limits.model_copy(update={"max_wall_clock_s": 1e6})})
    with closing(Store(f"sqlite:///{tmp_path / DATABASE}")) as store:
        record = _created_or_resumed(store, longer, preflight, tmp_path, continues=False)
    assert record.document["search"]["hm3"][option] == value
    stated = study_of(**{option: getattr(study_of().search.hm3, option)})
    field = (f"search.hm3.{option}",)
    assert same_but_limits(earlier, _with_stored_defaults(stated, tmp_path)) == field
    assert differing(study_of(archive=8), study_of(), algorithm="hm3", version=4) == ("search.hm3.archive",)
    assert differing(earlier, study_of(), algorithm="smac", version=1) == ()


def test_a_refined_study_has_no_more_trials(tmp_path: Path) -> None:
    """Once the paths to refine are chosen, a larger number of trials is refused, and larger limits are not."""
    study = parse_study(
        {
            **study_of().canonical(),
            "search_space": {"kind": "hm3"},
            "search": {"algorithm": "hm3", "max_trials": 8, "refinement": {}},
            "fidelity": {"scheduler": "none"},
        }
    )
    resolved = resolved_study()
    preflight: Any = SimpleNamespace(resolved=lambda: resolved)
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    record = _created_or_resumed(store, study, preflight, tmp_path, continues=False)
    more = study.model_copy(update={"search": study.search.model_copy(update={"max_trials": 9})})
    step = NoteStep(0, 8, NoteRequest(label="", decision=f"{CHOICE}[]"), NoteResult())
    store.open_attempt(record.id).add_step(step)
    with pytest.raises(Conflict, match=r"search\.max_trials is 9, and the search ended at 8 trials, because its front"):
        _created_or_resumed(store, more, preflight, tmp_path, continues=False)
    longer = study.model_copy(update={"limits": study.limits.model_copy(update={"max_wall_clock_s": 1e6})})
    assert _created_or_resumed(store, longer, preflight, tmp_path, continues=False).id == record.id
    store.close()


def test_what_was_added_to_benchmarks_is_kept(tmp_path: Path) -> None:
    """The file of a study continues the study to which benchmarks, trials and accepted overlaps were added since."""
    mmlu, piqa = ({"name": name, "task": name, "metric": "acc"} for name in ("mmlu", "piqa"))
    study = parse_study({**study_of().canonical(), "fidelity": {"scheduler": "none"}, "benchmarks": [mmlu]})
    added = AddedBenchmarks.model_validate(
        {
            "benchmarks": [{**mmlu, "trials": [41]}, piqa],
            "contamination": {"allowed": ["mmlu"], "max_share": 0.2},
        }
    )
    later = with_benchmarks(study, added)
    assert later.benchmarks[0].trials[-1] == 41
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    store.create_job(kind="search", name="s", document=later.canonical(), accepted=resolved_study().to_json())
    store.close()
    given = study.model_copy(update={"contamination": Contamination()})  # as in a file that does not state it
    assert _with_stored_benchmarks(tmp_path, given) == later
