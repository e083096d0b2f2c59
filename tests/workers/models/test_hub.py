"""Models on a hub: nothing large is downloaded before all checks have passed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import lora_adapter, tiny_llama
from tests.hub_server import Hub, only_hub
from workers.errors import InvalidModel
from workers.models.checkpoints import open_checkpoint
from workers.models.family import open_family, open_sources, resolve_family
from workers.models.fingerprints import fingerprint
from workers.models.remote import absent_bytes, commit_of, fetched, id_of, is_metadata_only, locate
from workers.models.remote import hub as remote_hub
from workers.models.remote.snapshots import FIRST_BYTES
from workers.telemetry.phases import report_to


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and experts of more than a megabyte each: `wide` does not fit the base, and one has shards."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "math", "text")):
        tiny_llama(root / name, seed, hidden=128, layers=2)
    tiny_llama(root / "wide", 3, hidden=256, layers=2)
    shard(root / "text")
    shutil.copy(root / "math" / "model.safetensors", root / "math" / "consolidated.safetensors")
    (root / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    lora_adapter(root / "base", root / "tuned")
    return root


def shard(directory: Path) -> None:
    """Store the model in two files, beside a copy in another format."""
    found = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").rename(directory / "consolidated.safetensors")
    names = sorted(found)
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    parts = dict(zip(files, (names[::2], names[1::2]), strict=True))
    for file, part in parts.items():
        save_file({name: found[name] for name in part}, directory / file, metadata={"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def hub(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with all of `models` as owner/NAME. The client knows no other hub, and its cache is empty."""
    hub = Hub()
    for directory in models.iterdir():
        hub.push(f"owner/{directory.name}", directory)
    with only_hub(hub, monkeypatch, tmp_path):
        yield hub


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def problems_of(base: str, **experts: str) -> list[str]:
    with pytest.raises(InvalidModel) as caught:
        open_family(base, experts)
    return list(caught.value.problems)


def test_unfit_hub_expert_costs_headers_only(hub: Hub) -> None:
    """An expert that does not fit is refused after a download of headers only."""
    problems = problems_of("owner/base", math="owner/math", wide="owner/wide", none="owner/none")
    commit = hub.repositories["owner/wide"].head
    assert f"expert 'wide': owner/wide@{commit}: hidden_size is 256; the base has 128" in problems
    assert any(problem.startswith("expert 'none': owner/none: ") for problem in problems)
    files = {file: len(data) for name in ("base", "math", "wide") for file, data in weights_of(hub, name).items()}
    assert hub.sent.keys() == files.keys()
    assert all(hub.sent[file] <= FIRST_BYTES < 0.1 * size for file, size in files.items())


def weights_of(hub: Hub, name: str) -> dict[str, bytes]:
    repository = hub.repositories[f"owner/{name}"]
    files = repository.commits[repository.head]
    return {
        f"owner/{name}/{file}": data
        for file, data in files.items()
        if file.startswith("model-") or file == "model.safetensors"
    }


def test_family_is_downloaded_once(hub: Hub, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A good family is downloaded once and found again without the Hub."""
    experts = {"math": str(models / "math"), "text": "owner/text", "tuned": "owner/tuned"}
    notes: list[str] = []
    known = resolve_family("owner/base", experts).family
    assert [is_metadata_only(Path(model.directory)) for model in known.models] == [True, False, True, True]
    family = open_family("owner/base", experts, note=notes.append)
    assert known.fingerprints == family.fingerprints, "the hub's hashes tell what the files will be"
    local = {alias: str(models / alias) for alias in experts}
    assert family.fingerprints == open_family(models / "base", local, cache=tmp_path).fingerprints
    assert [note.split(":")[0].split("@")[0] for note in notes] == [
        f"Downloading owner/{name}" for name in ("base", "text", "tuned")
    ]
    assert "owner/text/consolidated.safetensors" not in hub.sent, "a second copy in another format is not wanted"
    checkpoint = open_sources(family).checkpoints["text"]
    expected = load_file(models / "text" / "consolidated.safetensors")
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())
    assert (Path(family.base.directory) / "README.md").is_file(), "the licence is known"

    before = dict(hub.sent)
    assert open_family("owner/base", experts) == family
    assert hub.sent == before
    go_offline(monkeypatch)
    hub.requests.clear()
    assert open_family("owner/base", experts) == family
    assert hub.requests == []


def test_what_was_checked_is_what_is_downloaded(hub: Hub, models: Path, tmp_path: Path) -> None:
    first = hub.repositories["owner/math"].head
    checkpoints = tuple(resolve_family("owner/base", {"math": "owner/math"}).checkpoints.values())
    assert absent_bytes(checkpoint.directory for checkpoint in checkpoints) == sum(
        len(data) for name in ("base", "math") for data in weights_of(hub, name).values()
    )
    second = hub.push("owner/math", models / "wide")
    base_dir, math_dir = fetched([checkpoint.directory for checkpoint in checkpoints])
    assert math_dir.name == commit_of(math_dir) == first
    assert (id_of(math_dir), id_of(models / "math")) == ("owner/math", None)
    assert fingerprint(open_checkpoint(math_dir)) == fingerprint(open_checkpoint(models / "math"), cache=tmp_path)
    assert problems_of("owner/base", math="owner/math")[0].startswith(f"expert 'math': owner/math@{second}: ")
    hub.requests.clear()
    assert locate(f"owner/math@{first}") == math_dir
    assert hub.requests == [], "a commit that is here is not asked about"
    assert base_dir.name == hub.repositories["owner/base"].head


@pytest.mark.parametrize("branch", ["refs/pr/1", "user/better"])
def test_branches_have_slashes(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch, branch: str) -> None:
    """A model can be taken from the hub at a pull request or another branch; offline it is the downloaded commit."""
    repository = hub.repositories["owner/math"]
    repository.branches[branch] = first = repository.head
    second = hub.push("owner/math", models / "wide")
    assert [commit_of(locate(name)) for name in ("owner/math", f"owner/math@{branch}")] == [second, first]
    (fetched_dir,) = fetched([locate(f"owner/math@{branch}")])
    go_offline(monkeypatch)
    assert locate(f"owner/math@{branch}") == fetched_dir
    for name in ("owner/math@../x", "owner/math@a/../b", "owner/math@/a", "owner/math@a/"):
        with pytest.raises(InvalidModel, match="does not exist"):
            locate(name)


def test_a_check_leaves_what_the_cache_has_of_a_model(hub: Hub, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = fetched([locate("owner/math")])
    hub.push("owner/math", models / "wide")
    assert is_metadata_only(locate("owner/math"))
    assert id_of(locate("owner/math")) == "owner/math"
    go_offline(monkeypatch)
    assert locate("owner/math") == here
    with pytest.raises(InvalidModel, match="not completely in the hub's cache, and the hub cannot be reached: HF_HUB"):
        locate("owner/wide")


def test_weights_of_a_stand_in_cannot_be_read(hub: Hub) -> None:
    checkpoint = open_checkpoint("owner/base")
    with pytest.raises(
        InvalidModel, match=r"^owner/base@\w{40}/model.safetensors: its weights are not on this machine"
    ):
        checkpoint.read("model.norm.weight")


def test_unavailable_models_are_reported(hub: Hub, models: Path, tmp_path: Path) -> None:
    """Every unavailable model is reported with the reason."""
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (pickled / name).write_bytes((models / "base" / name).read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"\x80" * 2**20)
    hub.push("owner/pickled", pickled)
    hub.repositories["owner/math"].refusal = (403, "GatedRepo")
    hub.repositories["owner/text"].refusal = (403, "Forbidden")
    found = problems_of(
        "owner/base",
        absent="owner/absent",
        gated="owner/math",
        forbidden="owner/text",
        pickled="owner/pickled",
        revision="owner/wide@v2",
    )
    reasons = {
        "absent": "it does not exist on the hub, or you have no access; if it is private, log in with `hf auth login`",
        "gated": f"it is gated: ask for access at {hub.url}/owner/math, and log in with `hf auth login`, or set HF_TOK",
        "forbidden": f"the hub ({hub.url}) answers 403: ",
        "revision": "it has no branch, tag or commit 'v2'",
        "pickled": "only pickles (pytorch_model.bin), which are never loaded",
    }
    assert len(found) == len(reasons)
    for alias, reason in reasons.items():
        assert [reason in problem for problem in found if problem.startswith(f"expert {alias!r}: ")] == [True], found
    assert "owner/pickled/pytorch_model.bin" not in hub.sent


def test_hub_without_ranges_is_refused(hub: Hub) -> None:
    """A Hub that sends no parts of files is refused with a remedy."""
    hub.sends_ranges = False
    (problem,) = problems_of("owner/base", math="owner/base")[:1]
    assert "it does not send parts of files (status 200 for a range of model.safetensors)" in problem
    assert "download them with `hf download owner/base`" in problem


def test_a_hub_that_cannot_be_reached_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    (problem,) = problems_of("owner/base", math="owner/base")[:1]
    assert "the hub cannot be reached: http://127.0.0.1:9: ConnectError" in problem


def test_a_truncated_file_is_seen_from_its_header(hub: Hub) -> None:
    repository = hub.repositories["owner/math"]
    files = repository.commits[repository.head]
    files["model.safetensors"] = files["model.safetensors"][:-4096]
    (problem,) = problems_of("owner/base", math="owner/math")
    assert f"owner/math@{repository.head}/model.safetensors: is truncated: its header declares" in problem


def test_a_download_that_has_no_room_is_not_begun(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.models.remote.downloads.shutil.disk_usage", lambda _: SimpleNamespace(free=2**30))
    (problem,) = problems_of("owner/base", math="owner/math")
    assert problem.startswith("owner/base, owner/math: 2")
    assert "whose disk has 1.0 GiB free; make room, or set HF_HUB_CACHE" in problem
    assert hub.sent
    assert max(hub.sent.values()) <= FIRST_BYTES


def test_broken_download_continues(hub: Hub) -> None:
    """A download that was interrupted continues with the missing files."""
    repository = hub.repositories["owner/text"]
    place = locate("owner/text")
    repository.refusal, repository.refused = (403, "GatedRepo"), "-00002-of-00002.safetensors"
    with pytest.raises(
        InvalidModel, match=r"^owner/text: its weights cannot be downloaded: it is gated: .* kept, the same"
    ):
        fetched([place])
    repository.refusal = None
    sizes = {file: len(data) for file, data in weights_of(hub, "text").items()}
    second = "owner/text/model-00002-of-00002.safetensors"
    assert absent_bytes([place]) == sizes[second]
    hub.sent.clear()
    fetched([place])
    assert hub.sent == {second: sizes[second]}


def test_a_download_needs_no_lock_and_a_complete_one_no_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Models can be used with a cache whose lock files belong to another user."""
    opened = Path.open

    def refused(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".lock" and path.parent.name == "downloads":
            raise PermissionError(f"{path}: another user's")
        return opened(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", refused)
    place = locate("owner/math")
    (found,) = fetched([place])
    assert (found / "model.safetensors").is_file()
    assert "it cannot be locked" in caplog.text
    caplog.clear()
    hub.requests.clear()
    assert fetched([place]) == (found,)
    assert hub.requests == []
    assert caplog.text == ""
    # An interrupted download may lack a small file.
    (found / "config.json").unlink()
    fetched([place])
    assert (found / "config.json").is_file()


def test_how_far_a_download_is_can_be_heard(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.models.remote.hub.INTERVAL_S", 0.0)
    notes: list[str] = []
    fetched([locate("owner/base")], note=notes.append)
    assert notes[0].startswith(f"Downloading owner/base@{hub.repositories['owner/base'].head[:12]} from the hub: ")
    size = notes[0].split(": ")[1].removesuffix(" ...")
    assert notes[-1] == f"Downloaded {size} of {size}"


def test_unhashed_weights_come_whole(hub: Hub, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the Hub does not store by hash are small and are downloaded whole."""
    monkeypatch.setattr("tests.hub_server._is_lfs", lambda _: False)
    place = locate("owner/math")
    assert not is_metadata_only(place)
    assert fingerprint(open_checkpoint(place)) == fingerprint(open_checkpoint(models / "math"), cache=tmp_path)
    monkeypatch.setattr("workers.models.remote.hub.MAX_PLAIN_BYTES", 2**10)
    hub.sends_ranges = False
    with pytest.raises(InvalidModel, match="it does not send parts of files"):
        locate("owner/base")


def test_processes_of_a_machine_download_a_model_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two replicas one downloads; the other says that it waits, and finds the model without a request for weights.

    Threads replace processes here: their locks exclude each other, too.
    """
    monkeypatch.setattr("workers.directories.TOLD_AFTER_S", 0.05)
    download = remote_hub.Hub.download

    def slow(self: remote_hub.Hub, *args: Any) -> None:
        time.sleep(0.5)
        download(self, *args)

    monkeypatch.setattr(remote_hub.Hub, "download", slow)
    notes: list[str] = []
    told: list[str] = []
    (place,) = [locate("owner/math")]
    report_to(told.append)
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda _: fetched([place], note=notes.append), range(2)))
    finally:
        report_to(None)
    assert found[0] == found[1]
    assert [note.split(":")[0][:22] for note in notes if note.startswith("Downloading ")] == ["Downloading owner/math"]
    assert "downloads owner/math" in told
    assert any(text.startswith("waits for another process that works on owner--math@") for text in told)
    whole = sum(len(data) for data in weights_of(hub, "math").values())
    assert hub.sent_of("owner/math") <= whole + FIRST_BYTES, "the weights once, and their header before"
