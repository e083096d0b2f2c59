"""Studies of models on a hub: reports before and after the download of their weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import Study, parse_study
from service.jobs.base import RequestContext
from service.jobs.search.dry_run import check
from service.jobs.search.request import accept
from service.merges.merge import check_merge, merge_file
from service.resolved_study import ResolvedStudy
from service.studies.planning.named import profile_named
from service.studies.preflight.examine import examine
from service.studies.preflight.models import with_revisions
from tests.builders import lora_adapter, tiny_llama
from tests.hub_server import Hub, only_hub
from tests.s3_server import S3
from workers.cache import CACHE_VARIABLE
from workers.engines.vllm.support import CapabilityProbe
from workers.file_access import FileAccess
from workers.models.remote.snapshots import FIRST_BYTES
from workers.object_store import ObjectStore

pytestmark = pytest.mark.slow  # vLLM is asked about the models, in a process of its own

EXPERTS = ("math", "text")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", *EXPERTS)):
        tiny_llama(directory / name, seed, hidden=128)
    lines = [json.dumps({"prompt": str(i), "answer": str(i)}) for i in range(9)]
    (directory / "sums.jsonl").write_text("\n".join(lines) + "\n")
    config = json.loads((directory / "base" / "config.json").read_text())
    CapabilityProbe([config], cache=directory / "cache").answers(dtype="float32")  # once for all tests
    return directory


@pytest.fixture
def hub(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    for name in ("base", *EXPERTS):
        hub.push(f"owner/{name}", root / name)
    shutil.copytree(root / "cache", tmp_path / "cache")
    with only_hub(hub, monkeypatch, tmp_path):
        yield hub


def study_of(root: Path) -> Study:
    """A study whose base is on this machine, and whose experts are not."""
    document: dict[str, Any] = {
        "name": "small",
        "models": {"base": str(root / "base"), "experts": {name: f"owner/{name}" for name in EXPERTS}},
        "search_space": {"kind": "lfs", "layer_groups": 2},
        "search": {"max_trials": 3, "seed": 5},
        "fidelity": {"rungs": [3, 9]},
        "objectives": [{"name": "sums", "task": {"file": "sums.jsonl", "max_tokens": 8}, "metric": "exact_match"}],
        "engine": {"max_model_len": 64, "dtype": "float32"},
    }
    return parse_study(document, root)


def size_of(hub: Hub, name: str) -> int:
    repository = hub.repositories[f"owner/{name}"]
    return len(repository.commits[repository.head]["model.safetensors"])


def test_check_downloads_nothing(hub: Hub, root: Path) -> None:
    """A check says what will be downloaded and downloads none of it."""
    plan = check(study_of(root), root)
    assert plan.disk_bytes["download"] == size_of(hub, "math") + size_of(hub, "text")
    phases = {phase.name: phase.elapsed_s.least for phase in plan.machine.phases}
    assert phases["download"] == plan.disk_bytes["download"] / 250e6
    assert phases["check"] > 0
    absent = [f"owner/{name}@{hub.repositories[f'owner/{name}'].head}" for name in EXPERTS]
    assert list(plan.absent_models) == absent
    assert f"of weights before it starts: {', '.join(absent)}; they are checked for NaN and infinity" in plan.to_text()
    assert hub.sent == {f"owner/{name}/model.safetensors": FIRST_BYTES for name in EXPERTS}
    examine(study_of(root))
    plan = check(study_of(root), root)
    assert plan.disk_bytes["download"] == 0
    assert "download " not in plan.to_text()
    assert "download" not in [phase.name for phase in plan.machine.phases]


def test_posted_study_has_commits(hub: Hub, root: Path) -> None:
    """A posted study resolves to what its driver finds and has the models' commits."""
    study = study_of(root)
    body = json.dumps(study.canonical()).encode()
    resolved = ResolvedStudy.from_json(accept(json.loads(body), RequestContext()).facts)
    assert ResolvedStudy.from_json(json.loads(json.dumps(resolved.to_json()))) == resolved
    assert hub.sent == {f"owner/{name}/model.safetensors": FIRST_BYTES for name in EXPERTS}
    assert resolved.commits == {f"owner/{name}": hub.repositories[f"owner/{name}"].head for name in EXPERTS}
    hub.push("owner/math", root / "text")
    notes: list[str] = []
    found = examine(with_revisions(study, resolved), note=notes.append)
    assert found.resolved().fingerprints == resolved.fingerprints
    assert found.models.absent_bytes == 0
    assert len(notes) == 2
    assert examine(study).resolved().fingerprints != resolved.fingerprints


def test_what_only_weights_tell_is_told_once_they_are_here(hub: Hub, root: Path, tmp_path: Path) -> None:
    found = load_file(root / "math" / "model.safetensors")
    found["model.norm.weight"][0] = float("nan")
    for file in (root / "math").iterdir():
        (tmp_path / "bad").mkdir(exist_ok=True)
        (tmp_path / "bad" / file.name).write_bytes(file.read_bytes())
    save_file(found, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    commit = hub.push("owner/math", tmp_path / "bad")
    check(study_of(root), root)
    with pytest.raises(InvalidStudy) as caught:
        examine(study_of(root))
    (problem,) = caught.value.problems
    assert problem.field == "models.experts.math"
    assert f"{commit}: tensor 'model.norm.weight' holds 1 values that are NaN or infinite" in problem.message


def test_no_room_for_a_download_is_told_with_all_other_problems(
    hub: Hub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.models.remote.downloads.shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
    study = study_of(root)
    wrong = study.model_copy(update={"fidelity": study.fidelity.model_copy(update={"rungs": (3, 90)})})
    with pytest.raises(InvalidStudy) as caught:
        check(wrong, root)
    messages = {problem.field: problem.message for problem in caught.value.problems}
    assert messages.keys() == {"models", "fidelity.rungs"}
    assert messages["models"].startswith("owner/math, owner/text: ")


def test_hub_merge_is_checked_early(hub: Hub, root: Path, tmp_path: Path) -> None:
    """A merge of Hub models is checked before their weights are downloaded."""
    file = tmp_path / "merge.yml"
    document = {
        "merge_method": "task_arithmetic",
        "base_model": "owner/base",
        "models": [{"model": "owner/math", "parameters": {"weight": 0.5}}],
        "dtype": "float32",
    }
    file.write_text(json.dumps(document))
    plan = check_merge(file, {}, tmp_path / "out")
    assert plan.disk_bytes.download == size_of(hub, "base") + size_of(hub, "math")
    assert [model.directory for model in plan.models] == [
        f"owner/{name}@{hub.repositories[f'owner/{name}'].head}" for name in ("base", "math")
    ]
    assert "of weights; they are checked for NaN and infinity" in plan.to_text()
    assert hub.sent
    assert max(hub.sent.values()) <= FIRST_BYTES
    notes: list[str] = []
    merge_file(file, {}, tmp_path / "out", note=notes.append)
    assert len(notes) == 2
    base, math, merged = (
        load_file(place / "model.safetensors") for place in (root / "base", root / "math", tmp_path / "out")
    )
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.allclose(merged[name], (base[name] + math[name]) / 2, atol=1e-6)
    # What it leaves names the models as the hub does, not as this machine's cache.
    with_revisions = {name: f"owner/{name}@{hub.repositories[f'owner/{name}'].head}" for name in ("base", "math")}
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == ["owner/base", "owner/math"]
    assert f"| math | expert | {with_revisions['math']} | " in card
    written = yaml.safe_load((tmp_path / "out" / "mergekit_config.yml").read_text())
    assert [source["model"] for source in written["slices"][0]["sources"]] == list(with_revisions.values())
    merge_file(tmp_path / "out" / "mergekit_config.yml", {}, tmp_path / "again")
    assert (tmp_path / "again" / "recipe.json").read_bytes() == (tmp_path / "out" / "recipe.json").read_bytes()


def test_an_adapter_here_to_a_base_that_is_not_is_checked(hub: Hub, root: Path) -> None:
    lora_adapter(root / "base", root / "tuned")
    models = {"base": "owner/base", "experts": {"tuned": str(root / "tuned")}}
    study = study_of(root)
    plan = check(study.model_copy(update={"models": type(study.models).model_validate(models)}), root)
    assert plan.disk_bytes["download"] == size_of(hub, "base")


def test_posted_study_reads_allowed_stores_only(
    root: Path, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A posted study may have models below an allowed URL, which its check does not download but its driver does."""
    shutil.copytree(root / "cache", tmp_path / "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    bucket = s3.bucket()
    for name in ("base", *EXPERTS):
        sums = "".join(
            f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in (root / name).iterdir()
        )
        objects = ObjectStore(f"{bucket}/{name}")
        objects.write("SHA256SUMS", sums.encode())
        for file in (root / name).iterdir():
            objects.upload(file, file.name)
    document = study_of(root).canonical()
    document["models"]["experts"] = {name: f"{bucket}/{name}" for name in EXPERTS}
    local = {**document, "models": {**document["models"], "experts": {name: str(root / name) for name in EXPERTS}}}
    with pytest.raises(InvalidStudy, match=f"{bucket}/math: is not below a URL .* with --allow-url"):
        accept(document, RequestContext(FileAccess((str(root),))))
    context = RequestContext(FileAccess((str(root),), urls=(bucket,)))
    resolved = ResolvedStudy.from_json(accept(document, context).facts)
    assert resolved.fingerprints == ResolvedStudy.from_json(accept(local, context).facts).fingerprints
    found = examine(with_revisions(Study.model_validate(document), resolved), access=resolved.access)
    assert found.resolved().fingerprints == resolved.fingerprints
    downloaded = sorted(file.parent.name.partition("@")[0] for file in tmp_path.glob("cache/models/**/*.safetensors"))
    assert downloaded == sorted(EXPERTS)


def test_plan_reads_no_weights(hub: Hub, root: Path) -> None:
    """A plan for other machines asks the hub for configurations and tokenizers alone."""
    plan = check(study_of(root), root, metadata_only=True, profile=profile_named("h100x1"))
    assert plan.machine.fits
    assert not [file for file in hub.sent if "safetensors" in file]
    (download,) = [phase.elapsed_s.least for phase in plan.machine.phases if phase.name == "download"]
    assert 250e6 * download == pytest.approx(size_of(hub, "math") + size_of(hub, "text"), rel=0.01)
