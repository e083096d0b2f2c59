"""Inputs for learning alignments between two small models."""

from __future__ import annotations

import pytest

from tests.conftest import OPTIONS
from tests.workers.recipes import whole_model
from workers.alignments.pairs import AlignmentInputs
from workers.types import Family, TaskSpec


@pytest.fixture(scope="module")
def inputs(untied_family: Family, sums: TaskSpec) -> AlignmentInputs:
    pool = {alias: whole_model(untied_family, alias) for alias in ("math", "text")}
    return AlignmentInputs(untied_family, pool, OPTIONS, {"sums": sums}, {"sums": range(12)}, "moments")
