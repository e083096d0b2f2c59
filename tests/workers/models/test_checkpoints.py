from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.builders import character_tokenizer
from workers.errors import InvalidModel
from workers.models import fingerprints
from workers.models.checkpoints import BY_CONFIG, Checkpoint, open_checkpoint
from workers.models.family import open_family, resolve_family
from workers.models.fingerprints import content_problems, fingerprint
from workers.models.headers import TensorInfo
from workers.models.remote import locate
from workers.models.tokenizers import check_tokenizer, load_tokenizer, stated_directory
from workers.types import Family

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 4,
    "tie_word_embeddings": True,
}


def tensors(hidden: int = 4, layers: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    found = {"model.embed_tokens.weight": torch.ones(8, hidden), "model.norm.weight": torch.ones(hidden)}
    for layer in range(layers):
        found[f"model.layers.{layer}.self_attn.q_proj.weight"] = torch.ones(hidden, hidden)
        found[f"model.layers.{layer}.mlp.up_proj.weight"] = torch.ones(2 * hidden, hidden)
        found[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(hidden)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def write(directory: Path, found: dict[str, torch.Tensor] | None = None, **config: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors() if found is None else found, directory / "model.safetensors")
    return directory


def records(cache: Path) -> list[Path]:
    return [file for file in (cache / "records").rglob("*") if file.is_file()]


def problems_of(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidModel) as caught:
        call()
    return str(caught.value)


def test_a_checkpoint_is_read_lazily_and_exactly(untied_family: Family) -> None:
    checkpoint = open_checkpoint(untied_family.base.directory)
    name = "model.layers.4.mlp.down_proj.weight"
    stored_as = checkpoint.tensors[name]
    assert isinstance(stored_as, TensorInfo)
    assert stored_as.dtype == "BF16"
    hidden, intermediate = checkpoint.config["hidden_size"], checkpoint.config["intermediate_size"]
    assert stored_as.shape == (hidden, intermediate)
    assert stored_as.num_bytes == hidden * intermediate * 2
    stored = load_file(Path(untied_family.base.directory) / "model.safetensors")[name]
    assert checkpoint.read(name).dtype == stored.dtype == torch.bfloat16
    assert torch.equal(checkpoint.read(name), stored)
    assert checkpoint.config["model_type"] == "llama"
    assert not checkpoint.layout.is_tied
    with pytest.raises(InvalidModel, match=r"no tensor 'model\.nothing'"):
        checkpoint.read("model.nothing")


def test_missing_layers_are_found(tmp_path: Path) -> None:
    found = {name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors().items()}
    message = problems_of(lambda: open_checkpoint(write(tmp_path, found)))
    assert "expected decoder layers 0..n-1 under one module, found ['model.layers.'] with layers [1]" in message


def test_a_family_of_one_layout_is_accepted(untied_family: Family, tied_family: Family) -> None:
    for family in (untied_family, tied_family):
        resolve_family(family.base.directory, {expert.alias: expert.directory for expert in family.experts})


def test_no_experts_are_refused(tmp_path: Path) -> None:
    assert "models.experts: there are none" in problems_of(lambda: resolve_family(write(tmp_path), {}))


def test_all_problems_of_all_models_come_together(tmp_path: Path) -> None:
    wide = write(tmp_path / "wide", tensors(hidden=6), hidden_size=6)
    message = problems_of(lambda: resolve_family(tmp_path / "nowhere", {"a": tmp_path / "neither", "wide": wide}))
    assert message.splitlines() == [
        f"base model: {tmp_path}/nowhere: does not exist; expected a directory with config.json, tokenizer files and "
        "*.safetensors",
        f"expert 'a': {tmp_path}/neither: does not exist; expected a directory with config.json, tokenizer files and "
        "*.safetensors",
    ]
    message = problems_of(lambda: resolve_family(write(tmp_path / "base"), {"a": tmp_path / "neither", "wide": wide}))
    assert "expert 'a'" in message
    assert "expert 'wide'" in message


def test_a_shape_mismatch_names_tensor_model_and_both_shapes(tmp_path: Path) -> None:
    odd = tensors() | {"model.layers.0.mlp.up_proj.weight": torch.ones(9, 4)}
    base, expert = write(tmp_path / "base"), write(tmp_path / "odd", odd)
    assert problems_of(lambda: resolve_family(base, {"math": expert})) == (
        f"expert 'math': {expert}: tensor 'model.layers.0.mlp.up_proj.weight' has shape [9, 4]; the base has [8, 4]"
    )


def test_another_architecture_and_depth_are_named_by_field(tmp_path: Path) -> None:
    base = write(tmp_path / "base")
    expert = write(tmp_path / "deep", tensors(layers=2), num_hidden_layers=2, architectures=["MistralForCausalLM"])
    message = problems_of(lambda: resolve_family(base, {"deep": expert}))
    assert "architectures is ['MistralForCausalLM']; the base has ['LlamaForCausalLM']" in message
    assert "num_hidden_layers is 2; the base has 1" in message
    assert "has 3 tensors that the base lacks: model.layers.1.input_layernorm.weight, " in message


def test_another_rotary_embedding_is_named_however_it_is_written(tmp_path: Path) -> None:
    base = write(tmp_path / "base", rope_theta=10000.0)
    expert = write(tmp_path / "long", rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"})
    message = problems_of(lambda: resolve_family(base, {"long": expert}))
    assert message.endswith("rope_theta is 1000000.0; the base has 10000.0")
    scaled = write(tmp_path / "scaled", rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0})
    message = problems_of(lambda: resolve_family(expert, {"scaled": scaled}))
    assert message.endswith("rope_type is 'yarn'; the base has 'default'")
    plain = write(tmp_path / "plain", rope_theta=1e6, rope_scaling=None)
    message = problems_of(lambda: resolve_family(plain, {"scaled": scaled}))
    assert message.endswith("rope_type is 'yarn'; the base has 'default'")
    message = problems_of(lambda: resolve_family(scaled, {"plain": plain}))
    assert message.endswith("rope_type is 'default'; the base has 'yarn'")


def test_a_rotary_embedding_that_is_no_mapping_is_none(tmp_path: Path) -> None:
    base, expert = write(tmp_path / "base"), write(tmp_path / "odd", rope_parameters=["default"], rope_scaling="linear")
    resolve_family(base, {"odd": expert})


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    found = tensors()
    del found["model.layers.0.input_layernorm.weight"]
    base, expert = write(tmp_path / "base"), write(tmp_path / "thin", found)
    message = problems_of(lambda: resolve_family(base, {"thin": expert}))
    assert message.endswith("lacks 1 tensors of the base: model.layers.0.input_layernorm.weight")


def test_tied_and_untied_models_are_not_mixed(tmp_path: Path) -> None:
    untied = tensors() | {"lm_head.weight": torch.ones(8, 4)}
    base, expert = write(tmp_path / "base"), write(tmp_path / "untied", untied, tie_word_embeddings=False)
    message = problems_of(lambda: resolve_family(base, {"untied": expert}))
    assert "its output head is a tensor of its own, the base's is tied to the embedding" in message
    resolve_family(base, {"copy": write(tmp_path / "copy", untied)})  # tied, and the head stored all the same


def test_an_untied_model_must_store_its_head(tmp_path: Path) -> None:
    message = problems_of(lambda: open_checkpoint(write(tmp_path, tie_word_embeddings=False)))
    assert f"tie_word_embeddings is false {BY_CONFIG}, but no output head (lm_head) is stored" in message


def test_config_and_tensors_must_agree_on_depth(tmp_path: Path) -> None:
    message = problems_of(lambda: open_checkpoint(write(tmp_path, num_hidden_layers=12)))
    assert message == f"{tmp_path}: num_hidden_layers is 12 {BY_CONFIG}, its tensors are of 1 layers"


def test_broken_config_is_refused(tmp_path: Path) -> None:
    """A directory without a config or with a broken one is refused."""
    write(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: cannot be read as JSON" in problems_of(lambda: open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    assert "holds a list; expected an object" in problems_of(lambda: open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert problems_of(lambda: open_checkpoint(tmp_path)) == f"{tmp_path}/config.json: is nested too deeply"
    (tmp_path / "config.json").unlink()
    assert "no config.json; expected a Hugging Face model directory" in problems_of(lambda: open_checkpoint(tmp_path))


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    message = problems_of(lambda: open_checkpoint(tmp_path))
    assert message == (
        f"{tmp_path}: only pickles (pytorch_model.bin), which are never loaded, because they can run code; convert "
        "a model that you trust to safetensors: `AutoModelForCausalLM.from_pretrained(DIR, "
        "dtype='auto').save_pretrained(NEW_DIR)` of transformers does so"
    )


def test_an_adapter_and_an_empty_directory_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no model.safetensors and no model.safetensors.index.json" in problems_of(lambda: open_checkpoint(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "a PEFT adapter; expected a whole model" in problems_of(lambda: open_checkpoint(tmp_path))


def test_truncated_files_are_found_without_reading_them(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    message = problems_of(lambda: open_checkpoint(tmp_path))
    assert message == (
        f"{file}: is truncated: its header declares {len(content)} bytes, the file has {len(content) - 10}"
    )
    file.write_bytes(content + b"more")
    assert "has bytes that belong to no tensor" in problems_of(lambda: open_checkpoint(tmp_path))
    file.write_bytes(content[:100])
    assert "not a complete safetensors file: it has 100 bytes" in problems_of(lambda: open_checkpoint(tmp_path))
    file.write_bytes(b"")
    assert problems_of(lambda: open_checkpoint(tmp_path)).endswith("not a complete safetensors file: it has 0 bytes")
    file.write_bytes(content[:8] + b"x" + content[9:])
    assert "its safetensors header cannot be read" in problems_of(lambda: open_checkpoint(tmp_path))
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "a Git LFS pointer" in problems_of(lambda: open_checkpoint(tmp_path))


def test_a_header_that_lies_about_sizes_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"shape":[8,4]', b'"shape":[8,5]', 1))
    assert "of shape [8, 5] in F32 needs 160 bytes" in problems_of(lambda: open_checkpoint(tmp_path))


def shard(directory: Path) -> Path:
    """Write the checkpoint of `write` in two shards with an index; returns the directory."""
    write(directory)
    (directory / "model.safetensors").unlink()
    found = tensors()
    weight_map: dict[str, str] = {}
    for number, names in enumerate((list(found)[:2], list(found)[2:]), start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({key: found[key] for key in names}, directory / name)
        weight_map |= dict.fromkeys(names, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def test_sharded_checkpoints_are_one_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(shard(tmp_path))
    assert set(checkpoint.tensors) == set(tensors())
    assert [file.name[:11] for file in checkpoint.files] == ["model-00001", "model-00002"]


def test_missing_shards_and_tensors_are_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = problems_of(lambda: open_checkpoint(tmp_path))
    assert message == f"{tmp_path}: 1 of 2 shards are missing: model-00002-of-00002.safetensors"
    shutil.copy(tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors")
    assert "tensor 'model.embed_tokens.weight' is also in" in problems_of(lambda: open_checkpoint(tmp_path))
    save_file({"model.extra.norm": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    assert "the index names tensors that no shard holds: model.layers.0." in problems_of(
        lambda: open_checkpoint(tmp_path)
    )


def test_an_index_may_not_point_outside(tmp_path: Path) -> None:
    shard(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../other/model.safetensors"}}))
    assert "shards must be in the folder of the index" in problems_of(lambda: open_checkpoint(tmp_path))
    index.write_text("{}")
    assert "not a safetensors index" in problems_of(lambda: open_checkpoint(tmp_path))


def test_quantised_and_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    quantised = write(tmp_path / "q", quantization_config={"quant_method": "gptq"})
    assert "the model is quantised (gptq); merge the float32" in problems_of(lambda: open_checkpoint(quantised))
    t5 = write(tmp_path / "t5", is_encoder_decoder=True, model_type="t5")
    assert "an encoder-decoder model (t5)" in problems_of(lambda: open_checkpoint(t5))
    eyes = write(tmp_path / "eyes", vision_config={}, model_type="llava")
    assert "a vision-language model (llava)" in problems_of(lambda: open_checkpoint(eyes))
    integers = tensors() | {"model.norm.weight": torch.ones(4, dtype=torch.int8)}
    message = problems_of(lambda: open_checkpoint(write(tmp_path / "int", integers)))
    assert "dtype I8 of model.norm.weight cannot be merged; expected one of F32, F16, BF16" in message


def test_fingerprint_is_of_the_content_alone(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    one = write(tmp_path / "one")
    two = shutil.copytree(one, tmp_path / "two")
    (two / "README.md").write_text("notes")
    assert fingerprint(open_checkpoint(one), cache=cache) == fingerprint(open_checkpoint(two), cache=cache)
    changed = tensors()
    changed["model.norm.weight"][0] = 2
    save_file(changed, two / "model.safetensors")
    assert fingerprint(open_checkpoint(one), cache=cache) != fingerprint(open_checkpoint(two), cache=cache)
    three = shutil.copytree(one, tmp_path / "three")
    (three / "tokenizer.json").write_text("{}")
    assert fingerprint(open_checkpoint(one), cache=cache) != fingerprint(open_checkpoint(three), cache=cache)


def test_fingerprint_remembers_by_size_and_modification_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, model = tmp_path / "cache", write(tmp_path / "model")
    before = fingerprint(open_checkpoint(model), cache=cache)
    assert {file.name for file in model.iterdir()} == {"config.json", "model.safetensors"}
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", lambda *_: pytest.fail("read again"))
        assert fingerprint(open_checkpoint(model), cache=cache) == before
    for finding in records(cache):
        finding.write_text("nonsense")
    assert fingerprint(open_checkpoint(model), cache=cache) == before
    assert (
        fingerprint(open_checkpoint(model), cache=model / "config.json") == before
    )  # no directory: nothing is kept, nothing fails


def test_open_family_names_places_and_contents(tmp_path: Path) -> None:
    base, expert = write(tmp_path / "base"), write(tmp_path / "math", tensors(dtype=torch.bfloat16))
    family = open_family(base, {"math": expert}, cache=tmp_path / "cache")
    assert family.fingerprints == {
        "base": fingerprint(open_checkpoint(base), cache=tmp_path / "cache"),
        "math": fingerprint(open_checkpoint(expert), cache=tmp_path / "cache"),
    }
    assert family.experts[0].directory == str(expert)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for the hub, which cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_model_is_found_in_the_hubs_cache(hub_cache: Path, tmp_path: Path) -> None:
    repository = hub_cache / "models--owner--tiny"
    snapshot = repository / "snapshots" / ("c" * 40)
    write(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    assert locate("owner/tiny") == snapshot
    family = open_family("owner/tiny", {"math": write(tmp_path / "math")}, cache=tmp_path / "cache")
    assert family.base.directory == str(snapshot)
    assert family.base.fingerprint == fingerprint(open_checkpoint(snapshot), cache=tmp_path / "cache")


def test_neither_directory_nor_hub_model(hub_cache: Path, tmp_path: Path) -> None:
    """A name that is neither a directory nor a Hub model is refused with what is accepted."""
    for name in ("owner/nothing", "nothing"):
        message = problems_of(partial(open_checkpoint, name))
        assert message.startswith(
            f"{name}: neither a directory nor a hub model that can be loaded here: it is not completely in the "
            "hub's cache, and the hub cannot be reached: HF_HUB_OFFLINE is set; expected a directory with config.json"
        )
        assert "the id of a hub model that is in the hub's cache or can be downloaded" in message
    for path in (tmp_path / "nothing", Path("a/b/c"), Path("../nothing")):
        assert problems_of(partial(open_checkpoint, path)).startswith(f"{path}: does not exist; expected a di")


def test_the_contents_are_told_by_tensor_and_only_once(tmp_path: Path) -> None:
    found = tensors()
    found["model.norm.weight"][1] = float("nan")
    found["model.layers.0.mlp.up_proj.weight"][2, :2] = float("-inf")
    checkpoint, cache = open_checkpoint(write(tmp_path / "bad", found)), tmp_path / "cache"
    expected = tuple(
        f"{tmp_path}/bad: tensor {name!r} holds {count} values that are NaN or infinite; expected finite weights"
        for name, count in (("model.layers.0.mlp.up_proj.weight", 2), ("model.norm.weight", 1))
    )
    assert content_problems(checkpoint, "1", cache=cache) == expected
    good = open_checkpoint(write(tmp_path / "good"))
    assert content_problems(good, "2", cache=cache) == ()
    assert content_problems(checkpoint, "2", cache=cache) == (), "what is known of a content is not looked for again"


@pytest.mark.parametrize("is_writable", [True, False])
def test_processes_that_start_together_read_models_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_writable: bool
) -> None:
    """One of several readers computes hashes and checks contents; each does where no lock can be made."""
    checkpoint, cache = open_checkpoint(write(tmp_path / "model")), tmp_path / "cache"
    if not is_writable:
        cache.write_text("not a directory")
    barrier, hashed, scanned = threading.Barrier(4), list[str](), list[str]()
    digest, bad_tensors = hashlib.file_digest, fingerprints._bad_tensors

    def slow_digest(stream: Any, name: Any) -> Any:
        hashed.append(Path(stream.name).name)
        time.sleep(0.1)
        return digest(stream, name)

    def slow_scan(checkpoint: Checkpoint) -> Iterator[str]:
        scanned.append(checkpoint.directory.name)
        time.sleep(0.1)
        return bad_tensors(checkpoint)

    def open_it(_: int) -> tuple[str, tuple[str, ...]]:
        barrier.wait()
        found = fingerprint(checkpoint, cache=cache)
        return found, content_problems(checkpoint, found, cache=cache)

    monkeypatch.setattr(hashlib, "file_digest", slow_digest)
    monkeypatch.setattr(fingerprints, "_bad_tensors", slow_scan)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(open_it, range(4)))) == 1
    times = 1 if is_writable else 4
    assert sorted(hashed) == sorted(["config.json", "model.safetensors"] * times)
    assert scanned == ["model"] * times


def test_damaged_record_is_made_again(tmp_path: Path) -> None:
    """A damaged record of the contents is made again."""
    found = tensors()
    found["model.norm.weight"][1] = float("nan")
    checkpoint, cache = open_checkpoint(write(tmp_path / "bad", found)), tmp_path / "cache"
    expected = content_problems(checkpoint, "1", cache=cache)
    assert expected
    (record,) = records(cache)
    for size in (0, 10, record.stat().st_size - 1):
        os.truncate(record, size)
        assert content_problems(checkpoint, "1", cache=cache) == expected


def test_what_a_damaged_record_says_of_a_file_is_found_again(tmp_path: Path) -> None:
    checkpoint, cache = open_checkpoint(write(tmp_path / "model")), tmp_path / "cache"
    expected = fingerprint(checkpoint, cache=cache)
    for record in records(cache):
        record.write_text("0" * 64)  # a hash, of nothing that is there
    assert fingerprint(checkpoint, cache=cache) == expected


def test_a_file_that_replaces_another_is_read_whatever_its_time(tmp_path: Path) -> None:
    directory, cache = write(tmp_path / "model"), tmp_path / "cache"
    before = fingerprint(open_checkpoint(directory), cache=cache)
    file = directory / "model.safetensors"
    changed, status = bytearray(file.read_bytes()), file.stat()
    changed[-1] ^= 1
    (directory / "new").write_bytes(changed)
    os.utime(directory / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
    (directory / "new").replace(file)
    assert fingerprint(open_checkpoint(directory), cache=cache) != before


def stated(directory: Path) -> Any:
    """The tokenizer according to tokenizer.json."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_agreeing_tokenizer_uses_the_folder(untied_family: Family, tied_family: Family) -> None:
    """Tokenizers that agree with their own file are read from the folder."""
    for family in (untied_family, tied_family):
        tokenizer = load_tokenizer(family.base.directory)
        assert stated_directory(family.base.directory, tokenizer) is None


def test_tokenizer_encodes_as_its_file_says(tied_family: Family, tmp_path: Path) -> None:
    """A tokenizer that transformers builds differently encodes as its file says."""
    # For a Qwen2 folder transformers builds its own class, under which a character tokenizer loses white space.
    shutil.copy(Path(tied_family.base.directory) / "config.json", tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    text = "a b\n1 2"
    expected = stated(tmp_path).encode(text, add_special_tokens=False).ids
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected
    # Programs that choose a class by themselves are given a folder from which they choose this one.
    made = stated_directory(tmp_path, tokenizer)
    assert made is not None
    with made as directory:
        assert AutoTokenizer.from_pretrained(directory)(text, add_special_tokens=False)["input_ids"] == expected


def test_tokenizer_decodes_as_its_file_says(tied_family: Family, tmp_path: Path) -> None:
    """A tokenizer that transformers builds differently decodes as its file says."""
    # Its class restores the byte-level alphabet by itself, whatever decoder the file names.
    for file in Path(tied_family.base.directory).glob("*.json"):
        shutil.copy(file, tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["decoder"] = {"type": "Fuse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    ids = stated(tmp_path).encode("Hello world", add_special_tokens=False).ids
    assert load_tokenizer(tmp_path).decode(ids, clean_up_tokenization_spaces=False) == "Hello\u0120world"


def test_unreadable_tokenizer_is_refused(tied_family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that no class reads as its file says is refused."""
    from workers.models import tokenizers

    load = tokenizers._loaded

    def uppercase(name: str, path: Path) -> Any:
        tokenizer = load(name, path)
        encode = type(tokenizer).__call__
        other = type("Other", (type(tokenizer),), {"__call__": lambda self, text, **o: encode(self, text.upper(), **o)})
        tokenizer.__class__ = other
        return tokenizer

    monkeypatch.setattr(tokenizers, "_loaded", uppercase)
    message = problems_of(lambda: load_tokenizer(tied_family.base.directory))
    assert "transformers (Other) encodes 'Hello world' as [" in message
    assert "; expected the same: correct the tokenizer files" in message


def test_tokenizer_findings_are_kept(
    tied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The findings about a tokenizer are kept until one of its files changes."""
    from workers.models import tokenizers

    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    shutil.copy(Path(tied_family.base.directory) / "config.json", model)
    character_tokenizer().save_pretrained(model)  # which transformers' class for a Qwen2 reads otherwise
    load, loads = tokenizers._loaded, []
    monkeypatch.setattr(tokenizers, "_loaded", lambda name, path: loads.append(name) or load(name, path))
    assert check_tokenizer(model, cache=cache) == ()
    assert len(loads) == 2
    caplog.clear()
    assert check_tokenizer(model, cache=cache) == ()
    assert len(loads) == 2
    assert "the tokenizer is used as tokenizer.json says" in caplog.text
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    assert set(check_tokenizer(model, cache=cache)) == {"default", "tools"}
    (model / "tokenizer.json").write_text("{}")
    for _ in range(2):  # nothing is kept of one that is refused
        assert "its tokenizer cannot be loaded: " in problems_of(lambda: check_tokenizer(model, cache=cache))


def test_a_missing_or_broken_tokenizer_is_refused(tied_family: Family, tmp_path: Path) -> None:
    shutil.copy(Path(tied_family.base.directory) / "config.json", tmp_path)
    assert "no tokenizer; expected one of tokenizer.json, " in problems_of(lambda: load_tokenizer(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    assert "its tokenizer cannot be loaded: " in problems_of(lambda: load_tokenizer(tmp_path))
