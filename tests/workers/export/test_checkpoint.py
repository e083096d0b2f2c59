from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from tests.workers.recipes import arithmetic, slerp
from workers.export.checkpoint import export, is_written, left_behind_bytes
from workers.export.shards import Progress
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.merging.shards import Shard
from workers.models.checkpoints import open_checkpoint
from workers.models.family import open_family
from workers.models.tokenizers import load_tokenizer
from workers.types import Family


@pytest.fixture(scope="module")
def untied(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tied(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(tied_family, cache=tmp_path_factory.mktemp("cache"))


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_bytes", [2 * 10**9, 100_000])
def test_the_files_hold_the_stream_bit_for_bit(
    untied: Bank, tmp_path: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    recipe = arithmetic(untied.family, 0.31, 0.47)
    out = export(recipe, untied, tmp_path / "out", dtype=dtype, max_shard_bytes=max_shard_bytes)
    expected, found = dict(merged_tensors(recipe, untied, dtype)), stored(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in expected.items())
    assert (out / "model.safetensors").exists() == (max_shard_bytes > 10**9)
    assert open_checkpoint(out).tensors.keys() == expected.keys()


def test_shards_stay_under_their_limit_and_are_indexed(untied: Bank, tmp_path: Path) -> None:
    out = export(arithmetic(untied.family, 0.5, 0.5), untied, tmp_path / "out", max_shard_bytes=300_000)
    files = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 1
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 300_000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(out).values())


def test_transformers_computes_with_the_merged_weights(untied: Bank, tied: Bank, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for bank in (untied, tied):
        recipe = slerp(bank.family, 0.4)
        out = export(recipe, bank, tmp_path / bank.base.config["model_type"])
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        expected = dict(merged_tensors(recipe, bank, torch.float32))
        parameters = dict(model.named_parameters())
        assert expected.keys() == parameters.keys()  # a tied head is no parameter of its own
        assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
        if bank.layout.is_tied:
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_an_export_is_a_whole_model_folder(tied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(tied.family, 0.3, 0.3)
    out = export(recipe, tied, tmp_path / "new" / "out", dtype=torch.bfloat16, study="demo")
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {**config, "dtype": "float32"} == tied.base.config
    base_dir = tied.base.directory
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (base_dir / name).read_bytes()
    load_tokenizer(out)
    document = json.loads((out / "recipe.json").read_text())
    assert Recipe.from_json(document) == recipe
    assert (document["digest"], document["dtype"], document["study"]) == (recipe.digest, "bfloat16", "demo")
    assert oct(out.stat().st_mode & 0o777) == oct(base_dir.stat().st_mode & 0o777)
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_another_depth_is_written_to_the_configuration(tied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(tied.family, 0.3, 0.3)
    out = export(replace(recipe, layers=recipe.layers[:2]), tied, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert len(config["layer_types"]) == 2
    assert open_checkpoint(out).layout.num_layers == 2


def test_what_the_configuration_says_of_each_layer_moves_with_it(untied: Bank, tmp_path: Path) -> None:
    config = {**untied.base.config, "no_rope_layers": [0, 1, 2, 3, 4], "window": [0, 1, 2, 3, 4]}
    shutil.copytree(untied.base.directory, tmp_path / "base")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    family = open_family(tmp_path / "base", {e.alias: e.directory for e in untied.family.experts}, cache=tmp_path)
    recipe = arithmetic(family, 0.3, 0.3)
    swapped = (Merge("passthrough", (Source("math", layer),)) for layer in (3, 1, 2, 0, 4))
    for layers, expected in (
        (tuple(LayerRecipe(merge, merge, merge) for merge in swapped), [3, 1, 2, 0, 4]),
        (recipe.layers, [0, 1, 2, 3, 4]),
    ):
        out = export(replace(recipe, layers=layers), Bank(family, cache=tmp_path), tmp_path / str(expected[0]))
        found = json.loads((out / "config.json").read_text())
        assert (found["no_rope_layers"], found["window"]) == (expected, [0, 1, 2, 3, 4])


def test_the_same_export_again_changes_nothing(untied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)
    out = export(recipe, untied, tmp_path / "out")
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert export(recipe, untied, out) == out
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before


def test_a_directory_with_anything_else_is_refused(untied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)
    out = export(recipe, untied, tmp_path / "out")
    for attempt in (
        lambda: export(arithmetic(untied.family, 0.3, 0.5), untied, out),
        lambda: export(recipe, untied, out, dtype=torch.bfloat16),
    ):
        with pytest.raises(FileExistsError, match=r"out: exists and is not an export of recipe [0-9a-f]{12} in \w+; "):
            attempt()
    (out / "model.safetensors").write_bytes(b"")  # no longer whole
    with pytest.raises(FileExistsError, match="expected a new or empty directory"):
        export(recipe, untied, out)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file: exists and is not an export"):
        export(recipe, untied, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert export(recipe, untied, tmp_path / "empty") == tmp_path / "empty"


def test_impossible_directory_is_refused(untied: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that cannot be made is refused before a file is written."""
    recipe = arithmetic(untied.family, 0.3, 0.3)
    (tmp_path / "file").write_text("mine")
    for check in (partial(export, recipe, untied), lambda out: is_written(recipe, out, torch.float32)):
        with pytest.raises(FileExistsError, match=r"file/a/b: cannot be created, because .*/file is not a directory"):
            check(tmp_path / "file" / "a" / "b")
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda path, _: path != tmp_path)
            with pytest.raises(PermissionError) as caught:
                check(tmp_path / "a" / "b")
        assert caught.value.filename == str(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_link_is_followed(untied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.3)
    (tmp_path / "empty").mkdir()
    for target in ("empty", "new"):
        (tmp_path / f"to-{target}").symlink_to(tmp_path / target)
        export(recipe, untied, tmp_path / f"to-{target}")
        assert is_written(recipe, tmp_path / target, torch.float32)
        assert (tmp_path / f"to-{target}").is_symlink()


def test_an_unknown_dtype_is_refused(untied: Bank, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype float64; expected one of float32, bfloat16, float16"):
        export(arithmetic(untied.family, 0.3, 0.4), untied, tmp_path / "out", dtype=torch.float64)


def test_a_failed_export_leaves_nothing(untied: Bank, tmp_path: Path) -> None:
    class Unfinished(Bank):
        def __init__(self) -> None:
            self.__dict__.update(untied.__dict__)

        def get(self, alias: str, name: str, shard: Shard | None = None) -> torch.Tensor:
            if name == "model.norm.weight":
                raise OSError("no space left on device")
            return super().get(alias, name, shard)

    with pytest.raises(OSError, match="no space left"):
        export(arithmetic(untied.family, 0.3, 0.4), Unfinished(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


KILLED_EXPORT = """
import os, signal, sys
from tests.workers.recipes import arithmetic
from workers.merging.bank import Bank
from workers.models.family import open_family
from workers.export.checkpoint import export

home, out, count, max_shard_bytes = sys.argv[1:]
family = open_family(f"{home}/base", {"math": f"{home}/math", "text": f"{home}/text"}, cache=f"{home}/cache")
left = int(count)

def killed(progress):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

bank = Bank(family, cache=f"{home}/cache")
export(arithmetic(family, 0.3, 0.4), bank, out, max_shard_bytes=int(max_shard_bytes), progress=killed)
"""

SHARDS = 300_000


def killed_after(num_tensors: int, family: Family, out: Path) -> Path:
    """Directory of an export that was killed at its `num_tensors`-th tensor."""
    home = Path(family.base.directory).parent
    command = [sys.executable, "-c", KILLED_EXPORT, str(home), str(out), str(num_tensors + 1), str(SHARDS)]
    assert subprocess.run(command, cwd=Path(__file__).parents[3]).returncode == -signal.SIGKILL
    assert not out.exists()
    (partial,) = out.parent.glob(f".{out.name}.*.partial")
    return partial / "model"


@pytest.mark.slow
def test_a_killed_export_goes_on_with_the_shards_that_are_whole(
    untied: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)
    whole = export(recipe, untied, tmp_path / "whole", max_shard_bytes=SHARDS)
    partial = killed_after(30, untied.family, tmp_path / "out")
    before = {file.name: file.stat() for file in sorted(partial.glob("*.safetensors"))}
    assert len(before) > 4
    *kept, spoilt, _unfinished = before
    with (partial / spoilt).open("r+b") as file:  # as a disk may lose what it said was written
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    merged: list[str] = []
    get = untied.get
    monkeypatch.setattr(untied, "get", lambda alias, name, *shard: merged.append(name) or get(alias, name, *shard))
    told: list[Progress] = []
    out = export(recipe, untied, tmp_path / "out", max_shard_bytes=SHARDS, progress=told.append)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(merged) == {name for name, file in index.items() if file not in kept}
    for name, status in before.items():
        found = (out / name).stat()
        assert ((found.st_ino, found.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)) == (name in kept)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }
    assert told[0].written == told[0].kept == told[-1].kept > 0
    assert told[-1].written == told[-1].total == sum(tensor.nbytes for tensor in stored(out).values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def interrupted(recipe: Recipe, bank: Bank, out: Path) -> Path:
    """Directory of an export that was interrupted in its second shard."""

    def interrupt(progress: Progress) -> None:
        if progress.written > SHARDS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(recipe, bank, out, max_shard_bytes=SHARDS, progress=interrupt)
    (partial,) = out.parent.iterdir()
    return partial


def test_what_another_export_has_left_is_not_used(untied: Bank, tmp_path: Path) -> None:
    partial = interrupted(arithmetic(untied.family, 0.3, 0.4), untied, tmp_path / "out")
    shards = partial.glob("model/*.safetensors")
    assert left_behind_bytes(tmp_path / "out") > sum(file.stat().st_size for file in shards) > 0
    recipe = arithmetic(untied.family, 0.3, 0.5)
    told: list[Progress] = []
    out = export(recipe, untied, tmp_path / "out", max_shard_bytes=SHARDS, progress=told.append)
    assert told[-1].kept == 0
    assert all(torch.equal(stored(out)[n], tensor) for n, tensor in merged_tensors(recipe, untied, torch.float32))
    assert left_behind_bytes(out) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("state", ["", "[]", "{", '{"model-00001-of-00015.safetensors": 5}'])
def test_a_state_that_says_nothing_keeps_nothing(untied: Bank, tmp_path: Path, state: str) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)
    partial = interrupted(recipe, untied, tmp_path / "out")
    assert json.loads((partial / "state.json").read_text())
    (partial / "state.json").write_text(state)
    told: list[Progress] = []
    export(recipe, untied, tmp_path / "out", max_shard_bytes=SHARDS, progress=told.append)
    assert told[0].kept == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_model_is_written_by_one_process_at_a_time(untied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)

    def again(progress: Progress) -> None:
        with pytest.raises(FileExistsError, match="out: another process is writing this model there; wait for it"):
            export(recipe, untied, tmp_path / "out")

    assert export(recipe, untied, tmp_path / "out", progress=again) == tmp_path / "out"


EXPORT_IN_LITTLE_MEMORY = """
import json, re, sys, threading
from pathlib import Path
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.merging.bank import Bank
from workers.models.family import open_family
from workers.export.checkpoint import export

home, layers = Path(sys.argv[1]), int(sys.argv[2])
family = open_family(home / "base", {"math": home / "math", "text": home / "text"}, cache=home / "cache")
bank = Bank(family, "mapped", keeps_statistics=False, cache=home / "cache")

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def recipe(method, coefficients, seed=None):
    def merge(layer):
        return Merge(method, (Source("math", layer), Source("text", layer)), coefficients, seed)
    rows = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(layers))
    return Recipe(family.fingerprints, "base", rows, merge(None), merge(None))

peaks = {}
for method, arguments in {
    "task_arithmetic": ({"lambda": 0.3},),
    "slerp": ({"t": 0.3},),
    "ties": ({"lambda": 0.5, "k": 0.3},),
}.items():
    merged = recipe(method, *arguments)
    # What is compiled and imported once: which kernels run depends on the elements, so all of them are merged.
    export(merged, bank, home / f"{method}_first")
    before, highest, is_over = anonymous(), 0, threading.Event()
    def watch():
        global highest
        while not is_over.wait(0.0005):
            highest = max(highest, anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    export(merged, bank, home / method)
    is_over.set()
    watcher.join()
    peaks[method] = highest - before
print(json.dumps(peaks))
"""


@pytest.mark.slow
def test_an_export_needs_two_tensors_per_source(tmp_path: Path) -> None:
    """Beside mapped files, whose pages the system takes back when it needs them: anonymous memory cannot be."""
    num_layers, hidden = 8, 512
    shapes = {"model.embed_tokens.weight": (256, hidden), "model.norm.weight": (hidden,)}
    for layer in range(num_layers):
        within: dict[str, tuple[int, ...]] = {f"mlp.{name}_proj": (4 * hidden, hidden) for name in ("up", "gate")}
        within |= {"mlp.down_proj": (hidden, 4 * hidden), "input_layernorm": (hidden,)}
        within |= {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in within.items()}
    generator = torch.Generator().manual_seed(0)
    for alias in ("base", "math", "text"):
        values = {shape: torch.randn(shape, generator=generator).bfloat16() for shape in set(shapes.values())}
        (tmp_path / alias).mkdir()
        save_file(
            {name: values[shape].clone() for name, shape in shapes.items()}, tmp_path / alias / "model.safetensors"
        )
        config = {"model_type": "llama", "num_hidden_layers": num_layers, "tie_word_embeddings": True}
        (tmp_path / alias / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", EXPORT_IN_LITTLE_MEMORY, str(tmp_path), str(num_layers)]
    # Left alone, glibc keeps some tens of MB of what was freed, whatever the model's size.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    largest = 4 * max(math.prod(shape) for shape in shapes.values())  # in float32
    limit = 2 * 3 * largest
    assert (tmp_path / "ties" / "model.safetensors").stat().st_size > 5 * limit
    peaks = json.loads(done.stdout)
    assert all(peak <= limit for peak in peaks.values()), (peaks, limit)


def test_killed_export_is_swept(untied: Bank, tmp_path: Path) -> None:
    """The next export removes a killed one's files, and not those of a running one."""
    code = (
        "import fcntl, os, sys, time; d = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(d, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(600)"
    )
    partial = tmp_path / ".out.0badf00d.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with subprocess.Popen([sys.executable, "-c", code, str(partial)], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"locked\n"
        recipe = arithmetic(untied.family, 0.3, 0.4)
        out = export(recipe, untied, tmp_path / "out")
        assert partial.exists()
        os.kill(running.pid, signal.SIGKILL)
    shutil.rmtree(out)
    export(recipe, untied, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
