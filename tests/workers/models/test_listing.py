"""Lists of models in the directories that a study may read, and of nothing outside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from workers.file_access import FileAccess
from workers.models.listing import MAX_DEPTH, FoundModel, FoundModels, find_models


def write_model(directory: Path, config: str = "config.json", num_bytes: int = 100, **content: Any) -> Path:
    directory.mkdir(parents=True)
    (directory / config).write_text(json.dumps(content or {"architectures": ["LlamaForCausalLM"]}))
    (directory / "model.safetensors").write_bytes(bytes(num_bytes))
    return directory


def paths(found: FoundModels) -> list[str]:
    return [model.directory for model in found.models]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path.resolve()


def test_models_and_adapters_are_described(place: Path) -> None:
    """A checkpoint has its class and bytes, an adapter its base; a model in the hub's cache its id and commit."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = write_model(place / f"models--owner--name/snapshots/{commit}", model_type="qwen2", num_bytes=7)
    plain = write_model(place / "plain")
    (plain / "model-2.safetensors").write_bytes(bytes(50))
    adapter = write_model(place / "zz", "adapter_config.json", base_model_name_or_path="owner/base", peft_type="LORA")
    found = find_models(FileAccess((str(place),)), limit=10)
    assert found == FoundModels(
        (
            FoundModel(str(cached), f"owner/name@{commit}", "qwen2", 7, False, None),
            FoundModel(str(plain), str(plain), "LlamaForCausalLM", 150, False, None),
            FoundModel(str(adapter), str(adapter), None, 100, True, "owner/base"),
        ),
        True,
        (str(place),),
    )


def test_what_is_no_model_is_left_out(place: Path) -> None:
    """Configurations that are no JSON objects, models without safetensors and hidden directories are not listed."""
    for name, text in (("list", "[]"), ("broken", "{"), ("deep", "[" * 100_000), ("large", f'"{"x" * 2**20}"')):
        (write_model(place / name) / "config.json").write_text(text)
    (write_model(place / "no weights") / "model.safetensors").unlink()
    write_model(place / ".hidden")
    os.mkfifo(place / "broken" / "adapter_config.json")
    (place / "pipe").mkdir()
    os.mkfifo(place / "pipe" / "config.json")
    assert find_models(FileAccess((str(place),)), limit=10).models == ()


def test_links_do_not_lead_out(place: Path) -> None:
    """Neither links to directories nor links to files show what lies outside of the readable directories."""
    secret = write_model(place / "outside" / "secret", num_bytes=999)
    inside = place / "inside"
    inside.mkdir()
    (inside / "way out").symlink_to(secret)
    (inside / "up").symlink_to(place)
    (inside / "loop").symlink_to(inside)
    (inside / "by files").mkdir()
    for name in ("config.json", "model.safetensors"):
        (inside / "by files" / name).symlink_to(secret / name)
    (write_model(inside / "config outside") / "config.json").unlink()
    (inside / "config outside" / "config.json").symlink_to(secret / "config.json")
    mixed = write_model(inside / "mixed", num_bytes=1)
    (mixed / "more.safetensors").symlink_to(secret / "model.safetensors")
    access = FileAccess((str(inside),))
    (model,) = find_models(access, limit=10).models
    assert (model.directory, model.num_bytes) == (str(mixed), 1)
    for under in (inside / "way out", inside / "up", secret, place):
        with pytest.raises(PermissionError, match="is not below a directory that studies may read"):
            find_models(access, under=str(under), limit=10)


def test_links_within_are_files_of_the_model(place: Path) -> None:
    """Files may be links to readable places, as in the hub's cache; each model is listed once."""
    blobs = write_model(place / "blobs", num_bytes=5)
    (place / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / "snapshot" / name).symlink_to(blobs / name)
    (place / "again").symlink_to(blobs)
    assert paths(find_models(FileAccess((str(place), str(place / "blobs"))), limit=10)) == [
        str(blobs),
        str(place / "snapshot"),
    ]


def test_closed_directories_are_not_shown(place: Path) -> None:
    """A server's own files are not listed for users, but a readable directory among them is."""
    write_model(place / "data" / "jobs" / "of others")
    shared = write_model(place / "data" / "shared" / "model")
    free = write_model(place / "free")
    access = FileAccess((str(place), str(place / "data" / "shared")), closed=(str(place / "data"),))
    assert paths(find_models(access, limit=10)) == [str(shared), str(free)]
    with pytest.raises(PermissionError, match="server's own files"):
        find_models(access, under=str(place / "data" / "jobs"), limit=10)


def test_a_search_is_narrowed_by_directory_and_text(place: Path) -> None:
    """The text may be in the path or in the architecture; case does not matter."""
    one, other = write_model(place / "a" / "Math"), write_model(place / "b" / "code", model_type="gpt2")
    access = FileAccess((str(place),))
    assert paths(find_models(access, under=str(place / "b"), limit=10)) == [str(other)]
    assert paths(find_models(access, text="mATH", limit=10)) == [str(one)]
    assert paths(find_models(access, text="GPT", limit=10)) == [str(other)]
    assert paths(find_models(access, text="none", limit=10)) == []
    for under in ("b", str(place / "nowhere"), str(place / "b\0b")):
        with pytest.raises(NotADirectoryError):
            find_models(access, under=under, limit=10)


def test_the_search_ends_at_its_limits(place: Path) -> None:
    """Limits of models, entries, time and depth end the search, which says so."""
    for number in range(3):
        write_model(place / f"m{number}")
    access = FileAccess((str(place),))
    assert find_models(access, limit=3).is_complete
    fewer = find_models(access, limit=2)
    assert (len(fewer.models), fewer.is_complete) == (2, False)
    assert not find_models(access, limit=3, max_entries=3).is_complete
    assert not find_models(access, limit=3, max_seconds=0.0).is_complete
    write_model(place.joinpath(*"abcdefghij"[:MAX_DEPTH], "deep"))
    deep = find_models(access, limit=10)
    assert (len(deep.models), deep.is_complete) == (3, False)


def test_without_limits_of_access_a_directory_is_needed(place: Path) -> None:
    """A server whose jobs may read everything searches only the directory that is asked for."""
    model = write_model(place / "m")
    assert find_models(None, limit=10) == FoundModels((), True, ())
    assert paths(find_models(None, under=str(place), limit=10)) == [str(model)]
