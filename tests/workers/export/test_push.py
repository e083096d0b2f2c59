"""Uploads of exports to a hub, with a local server as stand-in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hub_server import Hub, only_hub
from tests.workers.recipes import arithmetic
from workers.alignments.export import MODELING_FILE
from workers.export.checkpoint import export
from workers.export.push import push
from workers.merging.bank import Bank
from workers.models.checkpoints import open_checkpoint
from workers.models.fingerprints import fingerprint
from workers.models.remote import fetched, locate
from workers.models.remote.errors import HubUnusable
from workers.types import Family

SHARD = 200_000


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    with only_hub(hub, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        # This server takes files as LFS does. By default the client uploads by the protocol of the hub's own storage.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        yield hub


@pytest.fixture(scope="module")
def exports(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A merge in several files, and another one in a single file."""
    root, bank = tmp_path_factory.mktemp("exports"), Bank(tied_family)
    return (
        export(arithmetic(tied_family, 0.3, 0.5), bank, root / "a", dtype=torch.float32, max_shard_bytes=SHARD),
        export(arithmetic(tied_family, 0.1, 0.1), bank, root / "b", dtype=torch.float32),
    )


def test_what_is_pushed_is_what_others_download(hub: Hub, exports: tuple[Path, Path]) -> None:
    first, _ = exports
    assert len(list(first.glob("*.safetensors"))) > 1
    pushed = push(first, "owner/merge", private=True)
    assert (pushed.repository, pushed.url) == ("owner/merge", f"{hub.url}/owner/merge/commit/{pushed.commit}")
    assert hub.is_private == {"owner/merge": True}
    found = hub.repositories["owner/merge"].commits[pushed.commit]
    assert found == {file.name: file.read_bytes() for file in first.iterdir()}
    (downloaded,) = fetched([locate("owner/merge")])
    assert fingerprint(open_checkpoint(downloaded)) == fingerprint(open_checkpoint(first))


def test_another_push_replaces_the_model(hub: Hub, exports: tuple[Path, Path]) -> None:
    """Files of weights that only the earlier model had are removed, and commits stay."""
    first, second = exports
    before = push(first, "owner/merge")
    after = push(second, "owner/merge")
    commits = hub.repositories["owner/merge"].commits
    assert commits[after.commit] == {file.name: file.read_bytes() for file in second.iterdir()}
    assert before.commit in commits
    assert (
        json.loads(commits[after.commit]["recipe.json"])["digest"]
        != json.loads(commits[before.commit]["recipe.json"])["digest"]
    )


def test_another_push_leaves_the_users_own_files(hub: Hub, exports: tuple[Path, Path], tmp_path: Path) -> None:
    """Files that only the earlier export had are removed; an old chat_template.jinja would hide the new template."""
    first, second = shutil.copytree(exports[0], tmp_path / "first"), shutil.copytree(exports[1], tmp_path / "second")
    (second / "mergekit_config.yml").unlink()  # as of a merge that mergekit cannot express
    (first / "heads").mkdir()
    of_first = ("chat_template.jinja", "generation_config.json", "preprocessor_config.json", MODELING_FILE.name)
    for name in (*of_first, "heads/heads.json", "heads/math.safetensors"):
        (first / name).write_bytes(b"{}")
    push(first, "owner/merge")
    repository = hub.repositories["owner/merge"]
    assert {*of_first, "heads/math.safetensors", "mergekit_config.yml"} <= repository.commits[repository.head].keys()
    own = dict.fromkeys(("LICENSE", ".gitattributes", "notes/config.json", "results.json", "front.png"), b"mine")
    repository.commits[repository.head] |= own
    pushed = push(second, "owner/merge")
    assert repository.commits[pushed.commit] == {file.name: file.read_bytes() for file in second.iterdir()} | own


def test_a_repository_with_other_files_is_left_alone(hub: Hub, exports: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "own" / "README.md").write_text("mine")
    head = hub.push("owner/mine", tmp_path / "own")
    with pytest.raises(HubUnusable, match=r"owner/mine: the repository has files that no export wrote \(model.safet"):
        push(exports[0], "owner/mine")
    assert hub.repositories["owner/mine"].head == head


def test_refusals_of_the_hub_are_reasons(hub: Hub, exports: tuple[Path, Path]) -> None:
    hub.write_refusal = (403, "NotAllowed")
    with pytest.raises(HubUnusable, match=r"owner/merge: the hub \(http://127.0.0.1:\d+\) answers 403"):
        push(exports[0], "owner/merge")
    for name in ("merge", "owner/merge@main", "owner/merge/x"):
        with pytest.raises(ValueError, match="write the repository as owner/name"):
            push(exports[0], name)
