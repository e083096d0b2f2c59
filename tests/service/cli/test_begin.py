"""`begin`: a study file that begins with the models and the merge of a mergekit configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from search_spaces.study.file import load_study
from tests.service.cli.terminals import Terminal

CONFIGURATION = {
    "merge_method": "linear",
    "models": [
        {"model": "models/base", "parameters": {"weight": 0.5}},
        {"model": "models/math", "parameters": {"weight": 0.5}},
    ],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "mergekit.yml"
    written.write_text(yaml.safe_dump(CONFIGURATION))
    return written


def test_a_study_begins_with_it(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    """Once its objectives are filled in, the written file is a study whose recipes have the merge."""
    terminal, out = Terminal(capsys), tmp_path / "study.yaml"
    code, said, warned = terminal.run("begin", file, "--name", "mine", "--out", out)
    assert (code, said) == (0, f"study file: {out}; fill in its objectives\n")
    assert f"{file}: the configuration names no base_model" in warned
    document = yaml.safe_load(out.read_text())
    assert document["models"] == {"base": "models/base", "experts": {"math": "models/math"}}
    out.write_text(
        yaml.safe_dump({**document, "objectives": [{"name": "a", "task": "gsm8k", "metric": "exact_match"}]})
    )
    study = load_study(out)
    assert [recipe.name for recipe in study.search.recipes] == ["mine"]


def test_it_is_printed_without_a_file(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """Standard output has the same document as YAML, or as JSON."""
    terminal = Terminal(capsys)
    printed = yaml.safe_load(terminal.run("begin", file)[1])
    assert printed["name"] == "mergekit"
    assert json.loads(terminal.run("begin", file, "--json")[1]) == printed


def test_it_is_written_and_printed(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    """With --json and --out, the file is written and standard output has its content."""
    terminal, out = Terminal(capsys), tmp_path / "study.yaml"
    code, said, _ = terminal.run("begin", file, "--json", "--out", out)
    assert code == 0
    assert json.loads(said) == yaml.safe_load(out.read_text())
    code, said, error = terminal.run("begin", file, "--json", "--out", out)
    assert (code, said) == (2, "")
    assert f"{out}: File exists" in error


def test_directories_are_found_from_another_folder(
    capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories beside the mergekit file, or in the current directory, are absolute in the study file.

    Names of other models stay.
    """
    terminal, elsewhere = Terminal(capsys), tmp_path / "elsewhere"
    (file.parent / "models" / "base").mkdir(parents=True)
    (elsewhere / "models" / "base").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)

    def experts(*names: str) -> dict[str, str]:
        models = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
        file.write_text(yaml.safe_dump({"merge_method": "linear", "models": models}))
        study = json.loads(terminal.run("begin", file, "--json")[1])
        assert study["models"]["base"] == str(file.parent / "models" / "base"), "the file's folder comes first"
        return dict(study["models"]["experts"])

    assert experts("models/base", "models/math") == {"math": "models/math"}
    (elsewhere / "models" / "math").mkdir()
    assert experts("models/base", "models/math") == {"math": str(elsewhere / "models" / "math")}
    lora = elsewhere / "models" / "lora"
    lora.mkdir()
    names = ("models/base", "models/base+models/lora", "s3://bucket/models/math")
    assert experts(*names) == {"lora": str(lora), "math": "s3://bucket/models/math"}


def test_refusals_name_the_file(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    """Wrong names, other files and files that exist are refused; nothing is overwritten."""
    terminal = Terminal(capsys)
    code, _, error = terminal.run("begin", file, "--name", "a b")
    assert code == 2
    assert "name: 'a b' does not match" in error
    before = file.read_text()
    code, _, error = terminal.run("begin", file, "--out", file)
    assert (code, file.read_text()) == (2, before)
    assert f"{file}: File exists" in error
    other = tmp_path / "other.yaml"
    other.write_text("models: []")
    code, _, error = terminal.run("begin", other)
    assert (code, error) == (2, f"mergesearch: {other}: is no mergekit configuration: it has no merge_method\n")
