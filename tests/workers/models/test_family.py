"""A resolved family: how often its models are located, opened and fingerprinted, and the values that it passes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import workers.models.checkpoints
import workers.models.family
import workers.models.modalities.text
from tests.builders import tiny_family
from workers.errors import InvalidModel
from workers.merging.bank import Bank
from workers.models.family import ResolvedFamily, locate_family, open_sources, resolve_family, resolve_model
from workers.types import Family

OPENING = {
    workers.models.family: ("locate", "aligned", "fingerprint", "content_problems"),
    workers.models.checkpoints: ("read_headers",),
    workers.models.modalities.text: ("layout",),
}
EXPERTS = ("code", "math", "text")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of each function in `OPENING`."""
    found: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            found[name] += 1
            return function(*arguments, **options)

        return call

    for module, names in OPENING.items():
        for name in names:
            monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return found


@pytest.fixture
def family(tmp_path: Path) -> Family:
    return tiny_family(tmp_path, experts=EXPERTS)


def resolved(root: Path) -> ResolvedFamily:
    return resolve_family(root / "base", {alias: root / alias for alias in EXPERTS}, cache=root / "cache")


def test_four_models_are_opened_once_and_by_their_headers_alone(
    family: Family, tmp_path: Path, counts: Counter[str]
) -> None:
    sources = resolved(tmp_path)
    assert sources.result_dir == str(tmp_path / "base")
    assert (sources.layout.num_layers, sources.num_parameters > 0, sources.stored_bytes > 0) == (2, True, True)
    assert counts == {"locate": 4, "read_headers": 4, "layout": 4, "aligned": 1}


def test_a_bank_of_resolved_models_opens_none_of_them_again(
    family: Family, tmp_path: Path, counts: Counter[str]
) -> None:
    sources = resolved(tmp_path)
    assert sources.family == family
    bank = Bank(sources)
    assert (bank.sources, bank.family) == (sources, family)
    once = {"locate": 4, "read_headers": 4, "layout": 4, "aligned": 1, "fingerprint": 4, "content_problems": 4}
    assert counts == once
    assert Bank(family, cache=tmp_path / "cache").fingerprint == bank.fingerprint
    assert counts == {name: 2 * number for name, number in once.items()}


def test_a_bank_refuses_a_description_of_other_contents(family: Family, tmp_path: Path) -> None:
    sources = resolved(tmp_path)
    assert open_sources(family, cache=tmp_path / "cache").fingerprints == sources.fingerprints
    config = tmp_path / "math" / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(InvalidModel, match=r"model 'math': .* has changed: its fingerprint is .*, expected "):
        Bank(family, cache=tmp_path / "cache")


def test_one_model_is_a_family_too(family: Family, tmp_path: Path) -> None:
    sources = resolve_model(tmp_path / "math", alias="alone", cache=tmp_path / "cache")
    assert (list(sources.checkpoints), sources.family.experts) == (["alone"], ())
    assert sources.fingerprints == {"alone": family.fingerprints["math"]}
    with pytest.raises(InvalidModel, match=r"models\.experts: there are none"):
        resolve_family(tmp_path / "math", {})


def test_models_that_are_nowhere_are_told_with_all_else(family: Family, tmp_path: Path) -> None:
    (tmp_path / "text" / "config.json").unlink()
    located = locate_family(tmp_path / "base", {"math": tmp_path / "nowhere", "text": tmp_path / "text"})
    assert located.base_dir == tmp_path / "base"
    with pytest.raises(InvalidModel) as caught:
        located.resolve()
    first, second = caught.value.problems
    assert first.startswith(f"expert 'math': {tmp_path}/nowhere: does not exist")
    assert second.startswith(f"expert 'text': {tmp_path}/text: no config.json")


def test_a_vocabulary_that_no_model_has_is_refused(family: Family, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="tokenizer: 'other'; expected base, union, or one of math"):
        resolve_family(tmp_path / "base", {"math": tmp_path / "math"}, tokenizer="other")
