"""A disk that is too small is reported before the first write to it."""

from __future__ import annotations

import pytest

from tests.service.cli.terminals import Workplace, model_options
from tests.workers.recipes import arithmetic
from workers.types import Family


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.disk.shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**25})())


NO_ROOM = "the disk has 0.0 GiB free, the merged model needs 0.1 GiB; make room or give a directory on another disk"


@pytest.mark.slow
@pytest.mark.usefixtures("full_disk")
def test_a_disk_too_small_for_the_export(place: Workplace) -> None:
    for check in ((), ("--check",)):
        message = place.refused("run", place.write(), "--out", place.run_dir, "--export", "best", *check)
        assert message == f"--export: {place.run_dir}/export: {NO_ROOM}"
        assert not place.run_dir.exists()
    assert place.run("run", place.write(), "--out", place.run_dir, "--check")[0] == 0
    place.begin(scored=True)
    out = place.directory / "merged"
    assert place.refused("export", place.run_dir, "1", "--out", out) == f"{out}: {NO_ROOM}"
    assert not out.exists()


@pytest.mark.usefixtures("full_disk")
def test_a_disk_too_small_for_a_merge(place: Workplace, family: Family) -> None:
    file, out = place.recipe_file(arithmetic(family, 0.5, 0.5).to_json()), place.directory / "merged"
    assert (
        place.refused("merge", file, "--out", out, *model_options(family, "base", "math", "text"))
        == f"{out}: {NO_ROOM}"
    )
    assert not out.exists()
