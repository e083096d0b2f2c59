"""Every study file in docs/examples is accepted by `run FILE --check`, every merge file by `merge FILE --check`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from service.cli.main import main
from tests.builders import lora_adapter
from workers.tiny_family import family_dir

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
NEEDS_ADAPTERS = "lora.yaml"
STUDIES = sorted(file.name for file in EXAMPLES.glob("*.yaml"))


@pytest.fixture
def with_adapters(tmp_path: Path) -> Path:
    """The LoRA example, and beside it the files that it needs: a base, two adapters and tasks."""
    shutil.copytree(family_dir() / "tasks", tmp_path / "tasks")
    shutil.copytree(family_dir() / "base", tmp_path / "models" / "base")
    for name in ("math", "text"):
        lora_adapter(tmp_path / "models" / "base", tmp_path / "adapters" / name)
    return Path(shutil.copy(EXAMPLES / NEEDS_ADAPTERS, tmp_path))


def check(study: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code = main(["run", str(study), "--out", str(out), "--check"])
    printed, errors = capsys.readouterr()
    assert (code, errors) == (0, "")
    assert not out.exists()
    return printed


def test_there_are_examples() -> None:
    assert {"quickstart.yaml", "lfs.yaml", "asha.yaml", "lm_eval.yaml", NEEDS_ADAPTERS} <= set(STUDIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STUDIES if name != NEEDS_ADAPTERS])
def test_an_example_study_is_accepted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ": nothing is wrong with it\n" in check(EXAMPLES / name, tmp_path / "run", capsys)


@pytest.mark.slow
def test_quickstart_plan_names_auto_searcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstart's plan says which searcher `auto` is and what its gradients cost."""
    plan = check(EXAMPLES / "quickstart.yaml", tmp_path / "run", capsys)
    assert "search    gradient: merges in this space have gradients, and all objectives have reference answers" in plan
    assert "samples   12,960 in the search, about 48,000 held out, gradients charged as up to 6,912\n" in plan


@pytest.mark.slow
def test_the_example_of_adapters_is_accepted(
    with_adapters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "base + 2 experts" in check(with_adapters, tmp_path / "run", capsys)


def test_the_example_of_a_mergekit_configuration_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["merge", str(EXAMPLES / "mergekit.yml"), "--out", str(tmp_path / "merged"), "--check"]) == 0
    assert "ties_weighted" in capsys.readouterr().out


def test_an_example_that_is_wrong_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text((EXAMPLES / "lfs.yaml").read_text().replace("eta: 3", "eta: 1"))
    assert main(["run", str(broken), "--out", str(tmp_path / "run"), "--check"]) == 2
    assert "fidelity.eta" in capsys.readouterr().err
