"""Models in an object store: checked by headers, downloaded once per machine, compared with given hashes."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.builders import tiny_llama
from tests.s3_server import S3, failing
from tests.workers.models.test_hub import shard
from workers.cache import CACHE_VARIABLE
from workers.engines.vllm.worker_extension import family_from_json, family_to_json
from workers.errors import InvalidModel
from workers.models.family import on_this_machine, open_family, open_sources, resolve_family
from workers.models.remote import (
    absent_bytes,
    commit_of,
    fetched,
    id_of,
    is_metadata_only,
    lack_of_space,
    locate,
    named,
    stated_hash,
)
from workers.models.remote.snapshots import FIRST_BYTES, SUMS
from workers.object_store import ObjectStore, blob_path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an expert in two shards, and an expert that does not fit."""
    root = tmp_path_factory.mktemp("models")
    for seed, (name, hidden) in enumerate({"base": 128, "math": 128, "wide": 256}.items()):
        tiny_llama(root / name, seed, hidden=hidden, layers=2)
    shard(root / "math")
    (root / "math" / "consolidated.safetensors").unlink()
    (root / "math" / "pytorch_model.bin").write_bytes(b"never read")
    for directory in root.iterdir():
        write_sums(directory)
    return root


def write_sums(directory: Path) -> None:
    """Write the sha256 of all files of a directory, in the format of `sha256sum *`."""
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in directory.iterdir() if f.name != SUMS]
    (directory / SUMS).write_text("".join(sorted(lines)))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket(s3: S3, models: Path) -> str:
    """URL of a bucket with all models."""
    url = s3.bucket()
    for directory in models.iterdir():
        push(directory, f"{url}/{directory.name}")
    s3.requests.clear()
    return url


def push(directory: Path, url: str) -> None:
    objects = ObjectStore(url)
    for file in directory.iterdir():
        objects.upload(file, file.name)


def downloads(s3: S3) -> list[str]:
    """Names of the files of weights that were read, one for each request."""
    return sorted(Path(path).name for method, path in s3.requests if method == "GET" and path.endswith(".safetensors"))


def test_family_is_checked_by_its_headers(bucket: str, s3: S3, models: Path) -> None:
    """A family is refused or accepted, with its fingerprints, from headers and stated hashes alone."""
    with pytest.raises(InvalidModel, match=rf"{bucket}/wide@\w+: hidden_size is 256; the base has 128"):
        resolve_family(f"{bucket}/base", {"wide": f"{bucket}/wide"})
    known = resolve_family(f"{bucket}/base", {"math": f"{bucket}/math"})
    assert all(is_metadata_only(place) for place in known.directories.values())
    local = open_family(models / "base", {"math": str(models / "math")})
    assert known.family.fingerprints == local.fingerprints
    assert known.commits == {}
    place = known.directories["math"]
    assert (commit_of(place), id_of(place)) == (None, None)
    assert named(f"{place}/x").startswith(f"{bucket}/math@")
    weights = [file for name in ("base", "math") for file in (models / name).glob("*.safetensors")]
    assert absent_bytes(known.directories.values()) == sum(file.stat().st_size for file in weights)
    assert all(file.stat().st_size > 10 * FIRST_BYTES for file in weights), "headers are a small part"


def test_family_is_downloaded_once(bucket: str, s3: S3, models: Path) -> None:
    """Weights are downloaded once, with no pickle, equal the sources, and are found again."""
    notes: list[str] = []
    experts = {"math": f"{bucket}/math"}
    family = open_family(f"{bucket}/base", experts, note=notes.append)
    assert notes[0].startswith(f"Downloading {bucket}/base@")
    assert notes[-1].startswith("Downloaded ")
    checkpoint = open_sources(family).checkpoints["math"]
    expected = {
        name: tensor for file in (models / "math").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in expected.items())
    assert not any("pytorch_model.bin" in path for _, path in s3.requests)
    s3.requests.clear()
    assert open_family(f"{bucket}/base", experts) == family
    assert downloads(s3) == []


def test_one_process_downloads_for_all(bucket: str, s3: S3) -> None:
    """Of several that need a model at the same time, one downloads each file."""
    place = locate(f"{bucket}/math")
    s3.requests.clear()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: fetched([place]), range(4)))
    assert len({*found}) == 1
    assert downloads(s3) == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]


def test_wrong_weights_are_refused(bucket: str, models: Path) -> None:
    """A file whose sha256 is not the stated one is refused, and is not kept."""
    content = bytearray((models / "math" / "model-00002-of-00002.safetensors").read_bytes())
    content[-1] ^= 1
    ObjectStore(f"{bucket}/math").write("model-00002-of-00002.safetensors", bytes(content))
    place = locate(f"{bucket}/math")
    for _ in range(2):
        with pytest.raises(InvalidModel, match=r"model-00002\S+: its content has the sha256 \w+; its stated sha256 is"):
            fetched([place])
    assert absent_bytes([place]) == len(content), "the other file is kept"


def test_interrupted_downloads_continue(bucket: str, s3: S3) -> None:
    place = locate(f"{bucket}/math")
    second = "model-00002-of-00002.safetensors"
    with (
        failing(s3, lambda method, path: (403, "AccessDenied") if method == "GET" and second in path else None),
        pytest.raises(InvalidModel, match=f"weights cannot be downloaded: .*{second}: cannot read it: .*refused"),
    ):
        fetched([place])
    s3.requests.clear()
    (found,) = fetched([place])
    assert downloads(s3) == [second]
    assert not list(found.glob(".*"))


def test_downloaded_model_outlives_the_store(bucket: str, s3: S3) -> None:
    """A store that does not answer is no obstacle for a model that is on this machine."""
    url = f"{bucket}/math"
    with (
        failing(s3, lambda *_: (401, "Gone")),
        pytest.raises(InvalidModel, match=f"{url}: cannot be read: {url}: cannot list it"),
    ):
        locate(url)
    (place,) = fetched([locate(url)])
    with failing(s3, lambda *_: (401, "Gone")):
        assert locate(url) == place


def test_changed_objects_are_another_version(bucket: str, models: Path, tmp_path: Path) -> None:
    url = f"{bucket}/math"
    (before,) = fetched([locate(url)])
    shutil.copytree(models / "base", tmp_path / "other")
    push(tmp_path / "other", url)
    ObjectStore(url).delete("model.safetensors.index.json")
    after = locate(url)
    assert is_metadata_only(after)
    (found,) = fetched([after])
    assert found != before
    assert (found / "model.safetensors").read_bytes() == (models / "base" / "model.safetensors").read_bytes()


def test_missing_hashes_are_asked_for(bucket: str) -> None:
    """Without SHA256SUMS a model cannot be identified before its download, and can be used after it."""
    ObjectStore(f"{bucket}/base").delete(SUMS)
    place = locate(f"{bucket}/base")
    with pytest.raises(InvalidModel, match=r"no sha256 is stated for it; add the output of `sha256sum \*`"):
        stated_hash(place / "model.safetensors")
    (found,) = fetched([place])
    assert stated_hash(found / "model.safetensors") is None


def test_other_machines_find_the_family(bucket: str, models: Path, tmp_path: Path, s3: S3) -> None:
    """A family's description is used on a machine without its directories: models are found by their origins."""
    experts = {"math": f"{bucket}/math", "local": str(models / "base")}
    family = open_family(f"{bucket}/base", experts)
    assert [model.origin for model in family.models] == [f"{bucket}/base", f"{bucket}/math", None]
    assert on_this_machine(family) is not None
    assert family_from_json(family_to_json(family)) == family
    (tmp_path / "cache" / "models").rename(tmp_path / "elsewhere")
    there = on_this_machine(family)
    assert there == family, "the same version has the same place in the cache"
    assert Path(there.base.directory).is_dir()

    (tmp_path / "cache" / "models").rename(tmp_path / "elsewhere again")
    push(models / "base", f"{bucket}/math")
    ObjectStore(f"{bucket}/math").delete("model.safetensors.index.json")
    with pytest.raises(InvalidModel, match=rf"model 'math': {bucket}/math has changed since it was checked"):
        on_this_machine(family)
    gone = replace(family, experts=(replace(family.experts[1], directory="/nowhere/base"),))
    with pytest.raises(InvalidModel, match=r"model 'local': /nowhere/base does not exist on the machine .* mount it"):
        on_this_machine(gone)


def test_full_disk_is_found_before_the_download(
    bucket: str, s3: S3, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = locate(f"{bucket}/math")
    s3.requests.clear()
    monkeypatch.setattr("workers.models.remote.downloads.shutil.disk_usage", lambda _: SimpleNamespace(free=2**30))
    with pytest.raises(InvalidModel, match=f"to {empty_cache}/models, .* make room, or set MERGESEARCH_CACHE"):
        fetched([place])
    assert lack_of_space([place]) is not None
    assert downloads(s3) == []


def test_what_is_no_model_is_named(s3: S3) -> None:
    with pytest.raises(InvalidModel, match=r"/nothing: has no objects; expected config.json"):
        locate(f"{s3.bucket()}/nothing")
    with pytest.raises(InvalidModel, match=r"s3://none: cannot be read: .*bucket does not exist"):
        locate("s3://none")
    with pytest.raises(InvalidModel, match="credentials do not belong in a URL"):
        locate("s3://key:secret@bucket/x")


@pytest.mark.parametrize("number", [1, 2])
def test_a_url_inside_another_is_not_opened(bucket: str, s3: S3, number: int) -> None:
    """What follows an allowed URL in the same text leads to no other store, whatever that holds."""
    private = f"{s3.bucket()}/private"
    ObjectStore(private).write(blob_path("ab" * 32), b"{}")
    s3.requests.clear()
    url = " ".join([f"{bucket}/base", *[f"{private}/{blob_path('ab' * 32)}"] * number])
    with pytest.raises(InvalidModel, match="has white space, a quote, a control character"):
        locate(url)
    with pytest.raises(InvalidModel, match="has white space, a quote, a control character"):
        resolve_family(url, {"math": f"{bucket}/math"})
    assert not [path for _, path in s3.requests if "private" in path]
