"""Studies of earlier programs that are continued in their directory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_spaces.study.file import Study, same_but_limits
from service.jobs.search.local_run import _with_new_defaults
from service.types import JobRecord, JobState
from tests.service.resolved import resolved_study

MODELS = {"base": "org/base", "experts": {"a": "org/a", "b": "org/b"}}


def study_of(**hm3: Any) -> Study:
    objectives = [{"name": "x", "task": "gsm8k", "metric": "exact_match"}]
    return Study.model_validate({"name": "s", "models": MODELS, "objectives": objectives, "search": {"hm3": hm3}})


def differing(stored: Study, given: Study, *, algorithm: str, version: int) -> tuple[str, ...]:
    resolved = replace(resolved_study(algorithm=algorithm), searcher_version=version)
    record = JobRecord("1", "s", JobState.STOPPED, stored.canonical(), resolved.to_json(), 0.0, "search")
    return same_but_limits(_with_new_defaults(stored, record, given), given)


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
