"""`mergesearch merge` with our files and mergekit's: the places of models, and plans of merges."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from service.cli.main import main
from tests.builders import lora_adapter, opposed_family, with_tokens
from tests.workers.recipes import arithmetic
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.models.family import open_family
from workers.models.fingerprints import fingerprint
from workers.types import Family

CONFIGURATION: dict[str, Any] = {
    "models": [
        {"model": "math", "parameters": {"weight": 0.3}},
        {"model": "text", "parameters": {"weight": 0.4}},
    ],
    "merge_method": "task_arithmetic",
    "base_model": "base",
}


@pytest.fixture
def home(tied_family: Family, tmp_path: Path) -> Path:
    """A directory with the models base, math and text (Qwen2 in float32)."""
    for model in tied_family.models:
        (tmp_path / model.alias).symlink_to(model.directory)
    return tmp_path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def written(file: Path, document: Any, **changes: Any) -> Path:
    file.write_text(yaml.safe_dump({**document, **changes}) if isinstance(document, dict) else document)
    return file


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main(["merge", *map(str, arguments)]) == 2
    lines = capsys.readouterr().err.splitlines()
    return "\n".join(line.removeprefix("mergesearch: ") for line in lines)


def merged(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_configuration_merges_the_directories_beside_it(home: Path, tied_family: Family) -> None:
    out = home / "out"
    assert main(["merge", str(written(home / "merge.yml", CONFIGURATION)), "--out", str(out)]) == 0
    bank = Bank(tied_family)
    expected = dict(merged_tensors(arithmetic(tied_family, 0.3, 0.4), bank, torch.float32))
    found = merged(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert json.loads((out / "recipe.json").read_text())["digest"] == arithmetic(tied_family, 0.3, 0.4).digest


def test_the_file_is_told_by_what_it_holds(home: Path, tied_family: Family) -> None:
    places = [part for model in tied_family.models for part in ("--model", f"{model.alias}={model.directory}")]
    recipe = {**arithmetic(tied_family, 0.3, 0.4).to_json(), "dtype": "float16"}
    files = [
        (written(home / "recipe.yml", recipe), places),
        (home / "merge.json", []),
        (written(home / "merge.txt", CONFIGURATION, dtype="float16"), []),
    ]
    files[1][0].write_text(json.dumps({**CONFIGURATION, "out_dtype": "float16", "dtype": "float32"}))
    outs = [home / file.stem / file.suffix[1:] for file, _ in files]
    for (file, options), out in zip(files, outs, strict=True):
        assert main(["merge", str(file), "--out", str(out), *options]) == 0
    first, *others = [merged(out) for out in outs]
    for other in others:
        assert all(torch.equal(other[name], tensor) and tensor.dtype == torch.float16 for name, tensor in first.items())


def test_a_recipe_says_what_it_lacks(home: Path, tied_family: Family, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = {**arithmetic(tied_family, 0.3, 0.4).to_json(), "dtype": "int8"}
    file = written(home / "recipe.json", json.dumps(recipe))
    found = refused(capsys, file, "--out", home / "out")
    assert found.splitlines() == [
        f"{file}: dtype: 'int8' is not supported; give float32, bfloat16, float16",
        f"{file}: no directory is given for base, math, text; add --model base=DIR --model math=DIR --model text=DIR",
    ]
    file.write_text(json.dumps({**recipe, "dtype": "float16"}))
    here = [f"--model={alias}={home / alias}" for alias in ("base", "math")]
    assert (
        refused(capsys, file, "--out", home / "out", *here)
        == f"{file}: no directory is given for text; add --model text=DIR"
    )


def test_a_model_that_is_elsewhere_is_named_as_in_the_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "text").rename(home / "elsewhere")
    file = written(home / "merge.yml", CONFIGURATION)
    found = refused(capsys, file, "--out", home / "out")
    assert found.startswith("expert 'text': text: neither a directory nor a hub model that can be loaded here")
    assert main(["merge", str(file), "--out", str(home / "out"), "--model", f"text={home}/elsewhere"]) == 0
    (home / "elsewhere").rename(home / "text")
    for place in ("./gone", "/no/such", "a/b/c", "C:\\models\\x"):
        other = written(home / "other.yml", CONFIGURATION, base_model=place)
        found = refused(capsys, other, "--out", home / "new")
        assert found.startswith(f"{other}: {place}: there is no such directory")
        assert f"give it with --model {place}=DIR" in found
    found = refused(capsys, file, "--out", home / "other", "--model", "code=x")
    assert found == f"{file}: has no model code; it names base, math, text"


def test_check_says_what_would_be_done_and_writes_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slices = [
        {"sources": [{"model": "math", "layer_range": [0, 3]}]},
        {
            "sources": [
                {"model": "text", "layer_range": [1, 3], "parameters": {"scale": {"filter": "q_proj", "value": 2}}}
            ]
        },
    ]
    file = written(home / "merge.yml", {"slices": slices, "merge_method": "passthrough", "dtype": "bfloat16"})
    before = sorted(home.iterdir())
    assert main(["merge", str(file), "--out", str(home / "out"), "--check"]) == 0
    text = capsys.readouterr().out
    assert "math (base): " in text
    assert "text (expert): " in text
    assert re.search(r"0-2 +attention +passthrough +math\n", text)
    assert "in 5 layers, bfloat16" in text
    assert main(["merge", str(file), "--out", str(home / "out"), "--check", "--json", "--dtype", "float32"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_layers"], plan["dtype"]) == (5, "float32")
    assert plan["disk_bytes"]["export"] == 4 * plan["num_parameters"]
    rows = [row for row in plan["merges"] if row[2:3] == ["passthrough"]]
    assert ["3-4", "mlp", "passthrough", "text (layers 1-2)", ""] in rows
    assert [row[1] for row in rows if row[0] == "tensor"] == [
        f"model.layers.{layer}.self_attn.q_proj.{kind}" for layer in (3, 4) for kind in ("bias", "weight")
    ]
    assert sorted(home.iterdir()) == before
    assert main(["merge", str(file), "--out", str(home / "out"), "--dtype", "float32"]) == 0
    assert sum(tensor.numel() for tensor in merged(home / "out").values()) == plan["num_parameters"]
    assert not plan["is_done"]
    assert main(["merge", str(file), "--out", str(home / "out"), "--check", "--dtype", "float32"]) == 0
    assert re.search(r"in 5 layers, float32, \d+\.\d GiB, there already\n", capsys.readouterr().out)


def test_check_refuses_what_the_merge_would(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(home / "merge.yml", CONFIGURATION)
    (home / "taken").mkdir()
    (home / "taken" / "file").write_text("mine")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    for options in ([], ["--check"]):
        found = refused(capsys, file, "--out", home / "taken", *options)
        assert "taken: exists and is not an export of recipe" in found
        assert "out: the disk has 0.0 GiB free" in refused(capsys, file, "--out", home / "out", *options)
        assert "merge_method: 'x' is not supported" in refused(
            capsys, written(home / "x.yml", CONFIGURATION, merge_method="x"), "--out", home / "out", *options
        )


def test_all_faults_are_reported_together(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faults of file, models and place are reported together."""
    shutil.copytree(home / "text", home / "broken")
    (home / "broken" / "model.safetensors").write_bytes(b"")
    (home / "taken").mkdir()
    (home / "taken" / "file").write_text("mine")
    models = [
        {"model": "math", "parameters": {"weight": "much"}},
        {"model": "broken", "parameters": {"weight": 0.4}},
        {"model": "./gone", "parameters": {"weight": 0.4}},
    ]
    file = written(home / "merge.yml", CONFIGURATION, models=models, chat_template="vicuna")
    expected = [
        f"{file}: models.0.parameters.weight: 'much' is not accepted; give a number",
        f"{file}: ./gone: there is no such directory",
        f"{file}: chat_template: 'vicuna' is neither a name, nor a file, nor a template; give auto, ",
        f"expert 'broken': {home / 'broken' / 'model.safetensors'}: not a complete safetensors file: it has 0 bytes",
        f"{home / 'taken'}: exists and is not an export; expected a new or empty directory",
    ]
    for options in ([], ["--check"]):
        found = refused(capsys, file, "--out", home / "taken", *options).splitlines()
        assert len(found) == len(expected), found
        assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_problems_of_several_documents_are_reported_together(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {**CONFIGURATION, "name": "first", "chat_template": "vicuna"}
    final = {**CONFIGURATION, "base_model": "./gone"}
    file = home / "merge.yml"
    file.write_text(f"{yaml.safe_dump(first)}---\n{yaml.safe_dump(final)}")
    found = refused(capsys, file, "--out", home / "out", "--check").splitlines()
    assert [line.removeprefix(f"{file}: ").split(": ")[0] for line in found] == ["chat_template", "./gone"]


def test_models_here_are_found_from_a_file_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "configurations").mkdir()
    file = written(home / "configurations" / "merge.yml", CONFIGURATION, base_model="~/base")
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    assert main(["merge", str(file), "--out", "out", "--check"]) == 0


def test_what_a_merge_refuses_names_the_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [{"model": model, "parameters": {"weight": weight}} for model, weight in (("math", 1), ("text", -1))]
    file = written(home / "merge.yml", {"models": models, "merge_method": "linear"})
    assert refused(capsys, file, "--out", home / "out").startswith(f"{file}: models: linear: weights ")


def test_reading_for_long_is_told(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any, **options: Any) -> str:
        time.sleep(0.05)
        return fingerprint(*arguments, **options)

    monkeypatch.setattr("workers.models.family.fingerprint", slow)
    for patience_s, expected in ((0.01, "reading the models: "), (60, "")):
        monkeypatch.setattr("service.merges.merge.PATIENCE_S", patience_s)
        assert main(["merge", str(written(home / "m.yml", CONFIGURATION)), "--out", str(home / "o"), "--check"]) == 0
        assert capsys.readouterr().err[: len("reading the models: ")] == expected


def test_a_disk_that_fills_meanwhile_is_told(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workers.export.shards._write_shard", full)
    before = sorted(home.iterdir())
    found = refused(capsys, written(home / "merge.yml", CONFIGURATION), "--out", home / "out")
    assert found.startswith(f"{home / 'out'}: No space left on device: the incomplete model was removed; make room")
    assert sorted(home.iterdir()) == sorted([*before, home / "merge.yml"])


def test_what_a_killed_merge_has_left_counts_as_room(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from service.disk import MARGIN_BYTES

    file = written(home / "merge.yml", CONFIGURATION)
    partial = home / ".out.0badf00d.partial"
    partial.mkdir()
    (partial / "half").write_bytes(bytes(10**6))
    size = sum((home / alias / "model.safetensors").stat().st_size for alias in ("base",))
    free = shutil._ntuple_diskusage(1, 1, size + MARGIN_BYTES - 500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert main(["merge", str(file), "--out", str(home / "out")]) == 0
    assert not partial.exists()
    assert main(["merge", str(file), "--out", str(home / "other")]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [", "line 1: not YAML: "),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2}\n", "is neither a mergekit configuration"),
        ("sources: []\n", "is neither a mergekit configuration (it has no merge_method) nor a recipe (it has no "),
        ("experts: []\n", "experts: a file of mergekit-moe, which builds a mixture of experts from whole models"),
        ("just text", "is neither a mergekit configuration"),
        ("merge_method: ties", "expected exactly one of models and slices"),
        ("format: mergesearch-recipe/0", "recipe: format is 'mergesearch-recipe/0'; this version reads "),
        ("- " * 3000 + "x", "is nested too deeply"),
        ("!!python/object/apply:os.system ['true']", "line 1: not YAML: could not determine a constructor"),
    ],
)
def test_files_that_cannot_be_read(home: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    file = written(home / "merge.yml", text)
    assert f"{file}: {message}" in refused(capsys, file, "--out", home / "out")


def test_what_has_no_effect_is_warned_of_and_refused_if_strict(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = yaml.safe_dump({**CONFIGURATION, "parameters": {"lamda": 0.5}})
    file = written(home / "merge.yml", "dtype: float16\n" + text + "dtype: float32\n")
    lines = [
        f"{file}: line {text.count(chr(10)) + 2}: key 'dtype' is given twice (first in line 1); the last one counts",
        f"{file}: parameters.lamda: 0.5 has no effect: task_arithmetic takes no such parameter; did you mean "
        '"lambda"? it takes weight, density, lambda, normalize, rescale',
    ]
    out = home / "out"
    assert main(["merge", str(file), "--out", str(out), "--check"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")] == [
        f"warning   {line}" for line in lines
    ]
    assert main(["merge", str(file), "--out", str(out), "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == lines
    for options in (["--strict"], ["--strict", "--check"]):
        assert refused(capsys, file, "--out", out, *options).splitlines() == lines
    assert not out.exists()
    assert main(["merge", str(file), "--out", str(out)]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "warning" in line] == [
        f"warning: {line}" for line in lines
    ]
    assert merged(out)["model.norm.weight"].dtype == torch.float32


def test_models_of_one_name_have_numbered_aliases(home: Path) -> None:
    for owner in ("one", "two"):
        (home / owner).mkdir()
        (home / owner / "base").symlink_to(home / "base")
    models = [{"model": f"{owner}/base", "parameters": {"weight": 1}} for owner in ("one", "two")]
    models.append({"model": "./math", "parameters": {"weight": 2}})
    file = written(home / "merge.yml", {"models": models, "merge_method": "linear"})
    assert main(["merge", str(file), "--out", str(home / "out")]) == 0
    card = (home / "out" / "README.md").read_text()
    assert all(f"| {alias} |" in card for alias in ("base", "base-2", "math"))


# Tokenizers.


@pytest.mark.parametrize("source", ["base", "union", "text", {"path": "text"}])
def test_a_tokenizer_is_taken_where_all_have_the_same_tokens(
    home: Path, tied_family: Family, tmp_path_factory: pytest.TempPathFactory, source: Any
) -> None:
    (home / "text").unlink()
    copy = shutil.copytree(tied_family.experts[1].directory, home / "text")
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    file = written(home / "merge.yml", CONFIGURATION, tokenizer_source=source)
    assert main(["merge", str(file), "--out", str(home / "out")]) == 0
    assert (home / "out" / "chat_template.jinja").exists() == (source not in ("base", "union"))
    assert (home / "out" / "tokenizer.json").read_bytes() == (copy / "tokenizer.json").read_bytes()


def test_models_with_other_tokens_are_brought_to_one_vocabulary(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "text").unlink()
    copy = with_tokens(home / "base", home / "text", "<tool>", rows=390)
    stored = merged(copy)["model.embed_tokens.weight"]
    for tokenizer, rows in ((None, 384), ({"source": "union"}, 384), ({"source": "text"}, 390)):
        file = written(home / "merge.yml", CONFIGURATION, tokenizer=tokenizer)
        out = home / f"out-{rows}-{tokenizer is None}"
        assert main(["merge", str(file), "--out", str(out)]) == 0
        assert (
            len(merged(out)["model.embed_tokens.weight"]) == json.loads((out / "config.json").read_text())["vocab_size"]
        )
        assert len(merged(out)["model.embed_tokens.weight"]) == rows
        ids = {
            token["content"]: token["id"] for token in json.loads((out / "tokenizer.json").read_text())["added_tokens"]
        }
        assert ("<tool>" in ids) == (tokenizer is not None)
        if tokenizer is not None:
            torch.testing.assert_close(merged(out)["model.embed_tokens.weight"][ids["<tool>"]], stored[ids["<tool>"]])
        recipe = ["merge", str(out / "recipe.json"), "--out", str(home / f"again-{out.name}")]
        assert main([*recipe, *(f"--model={alias}={home / alias}" for alias in ("base", "math", "text"))]) == 0
        assert all(
            torch.equal(tensor, merged(home / f"again-{out.name}")[name]) for name, tensor in merged(out).items()
        )
    file = written(home / "merge.yml", CONFIGURATION, tokenizer_source="code")
    assert "tokenizer_source: code: neither a directory nor a hub model" in refused(capsys, file, "--out", home / "out")
    (copy / "tokenizer.json").unlink()
    file = written(home / "merge.yml", CONFIGURATION)
    assert "has 390 rows for tokens, the base 384, and " in refused(capsys, file, "--out", home / "out")


def test_shards_are_as_large_as_asked(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(home / "merge.yml", CONFIGURATION)
    assert main(["merge", str(file), "--out", str(home / "out"), "--max-shard-size", "0.3MB"]) == 0
    assert len(list((home / "out").glob("model-*.safetensors"))) > 1
    with pytest.raises(SystemExit):
        main(["merge", str(file), "--out", str(home / "out"), "--max-shard-size", "large"])
    assert "'large' is not a size; write it as 500MB, 5GB or 8GiB" in capsys.readouterr().err


def test_a_model_of_another_shape_is_refused_by_its_header(
    home: Path, untied_family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "text").unlink()
    (home / "text").symlink_to(untied_family.base.directory)
    found = refused(capsys, written(home / "merge.yml", CONFIGURATION), "--out", home / "out", "--check")
    assert "expert 'text': " in found
    assert "architectures is ['LlamaForCausalLM']; the base has ['Qwen2ForCausalLM']" in found


def test_one_model_alone_is_a_family(home: Path) -> None:
    slices = [{"sources": [{"model": "math", "layer_range": [start, 3]}]} for start in (0, 1)]
    file = written(home / "merge.yml", {"slices": slices, "merge_method": "passthrough"})
    assert main(["merge", str(file), "--out", str(home / "out")]) == 0
    family = open_family(home / "base", {"math": home / "math"})
    source = Bank(family)
    found = merged(home / "out")
    assert torch.equal(
        found["model.layers.4.mlp.up_proj.weight"], source.get("math", "model.layers.2.mlp.up_proj.weight")
    )
    assert json.loads((home / "out" / "config.json").read_text())["num_hidden_layers"] == 5


# Adapters.


def test_an_adapter_is_merged_like_the_model_that_it_makes(
    home: Path, tied_family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = lora_adapter(home / "base", home / "tuned").merge_and_unload()
    whole.save_pretrained(home / "whole")
    files = {}
    for name, model in {"tuned": "tuned", "plus": "base+tuned", "whole": "whole"}.items():
        models = [CONFIGURATION["models"][0], {"model": model, "parameters": {"weight": 0.4}}]
        files[name] = written(home / f"{name}.yml", CONFIGURATION, models=models)
        assert main(["merge", str(files[name]), "--check", "--out", str(home / "new")]) == 0
        assert f"{home / name if name != 'plus' else home / 'tuned'}" in capsys.readouterr().out
        assert main(["merge", str(files[name]), "--out", str(home / f"{name}-out")]) == 0
    expected = merged(home / "whole-out")
    for name in ("tuned", "plus"):
        found = merged(home / f"{name}-out")
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, atol=1e-6, rtol=1e-6)
    # What it leaves makes it again: its recipe, and its configuration for mergekit, which names the adapter.
    out = home / "tuned-out"
    places = [f"--model={alias}={home / alias}" for alias in ("base", "math", "tuned")]
    for left, arguments in (("recipe.json", places), ("mergekit_config.yml", [])):
        again = home / f"again-{left}"
        assert main(["merge", str(out / left), *arguments, "--out", str(again)]) == 0
        assert all(torch.equal(tensor, merged(again)[key]) for key, tensor in merged(out).items())


def test_adapters_without_a_base(home: Path) -> None:
    """Adapters without a base are merged into the model of their configuration."""
    made = [
        lora_adapter(home / "base", home / name, seed).merge_and_unload().state_dict()
        for seed, name in enumerate(("one", "two"))
    ]
    name = "model.layers.1.mlp.down_proj.weight"
    alone = {"merge_method": "passthrough", "models": [{"model": "base+one"}]}
    both = [{"model": model, "parameters": {"weight": 1}} for model in ("math", "base+two")]
    for out, document, expected in (
        ("alone", alone, made[0][name]),
        ("named", {**alone, "base_model": "base+one"}, made[0][name]),
        ("both", {"merge_method": "linear", "models": both}, (merged(home / "math")[name] + made[1][name]) / 2),
    ):
        assert main(["merge", str(written(home / f"{out}.yml", document)), "--out", str(home / out)]) == 0
        torch.testing.assert_close(merged(home / out)[name], expected, atol=1e-6, rtol=1e-6)
        config = json.loads((home / out / "config.json").read_text())
        assert config["architectures"] == ["Qwen2ForCausalLM"]


@pytest.mark.parametrize("filter_wise", [False, True])
def test_model_stock_pole_gives_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], filter_wise: bool
) -> None:
    """Near Model Stock's pole, a configuration has mergekit's value and a warning."""
    from mergekit.merge_methods.api import merge_tensors as theirs

    family = opposed_family(tmp_path)
    document = {
        "models": [{"model": "math"}, {"model": "text"}],
        "merge_method": "model_stock",
        "base_model": "base",
        "parameters": {"filter_wise": filter_wise},
    }
    out = tmp_path / "out"
    assert main(["merge", str(written(tmp_path / "merge.yml", document)), "--out", str(out)]) == 0
    found, bank = merged(out), Bank(family)
    for name, tensor in found.items():
        sources = [bank.get(alias, name) for alias in ("base", "math", "text")]
        parameters = {"filter_wise": filter_wise}
        names = ["base", "math", "text"]
        expected = theirs(sources, "model_stock", parameters=parameters, ids=names, base_index=0)
        torch.testing.assert_close(tensor, expected, rtol=1e-2, atol=1e-2)
        assert f"{name}: the ratio of model_stock is -" in caplog.text

    # As a recipe of a search it is refused.
    recipe = json.loads((out / "recipe.json").read_text())
    text = json.dumps(recipe).replace('"coefficients": {"unbounded": 1.0}', '"coefficients": {}')
    assert text != json.dumps(recipe)
    models = [part for model in family.models for part in ("--model", f"{model.alias}={model.directory}")]
    message = refused(capsys, written(tmp_path / "recipe.json", text), "--out", tmp_path / "other", *models)
    assert ": the ratio of model_stock is -" in message
    assert "; expected -2 to 1: leave out a model, or use another method" in message
    assert not (tmp_path / "other").exists()
