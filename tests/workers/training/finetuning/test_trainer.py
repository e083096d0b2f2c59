"""Training: it learns, continues after a kill with the same bits, and stops at values that are not finite."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from search_spaces.errors import InvalidStudy
from tests.builders import tiny_llama, tiny_qwen2
from tests.layouts import layout_family
from tests.vision import image_folder, tiny_vit
from workers.errors import InvalidModel, InvalidTask, TrainingFailed
from workers.models.checkpoints import open_checkpoint, read_expert
from workers.training.finetuning import checkpoints, trainer
from workers.training.finetuning.evaluation import Evaluator
from workers.training.finetuning.history import CHECKPOINTS, EXPERT, METRICS, read_history
from workers.training.finetuning.methods import make_optimizer
from workers.training.finetuning.models import check_packing, load_model
from workers.training.finetuning.result import TRAINING_FILE, sources_of
from workers.training.finetuning.spec import FinetuneSpec, Training, load_spec, parse_spec
from workers.training.finetuning.task_vectors import task_vector
from workers.training.finetuning.trainer import check, learning_rate_at, noise_seed, train
from workers.training.mergopt.optimizer import MergOPT, draw_of

pytestmark = pytest.mark.slow  # models are trained


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("finetuning")
    tiny_llama(directory / "base")
    lines = [json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)}) for i in range(40)]
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture(scope="module")
def image_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a ViT with a head, and a folder of images of its classes."""
    directory = tmp_path_factory.mktemp("finetuning-of-images")
    tiny_vit(directory / "base", initializer_range=0.02)
    image_folder(directory / IMAGES)
    return directory


@pytest.fixture(params=["text", "images"])
def any_place(request: pytest.FixtureRequest) -> Path:
    """A base model and data of each modality."""
    found: Path = request.getfixturevalue("place" if request.param == "text" else "image_place")
    return found


IMAGES = "images"


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_noise_of_adapters_is_on_the_weights_they_change(targets: str | list[str], tmp_path: Path) -> None:
    """MergOPT's offset is on the weights of adapted modules, and not on their biases, which no merge moves."""
    tiny_qwen2(tmp_path / "base")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    model = load_model(
        spec_of(tmp_path, adapter={"rank": 2, "targets": targets}), tmp_path / "base", torch.device("cpu")
    )
    assert model.moved is not None
    moved = {id(p) for p in model.moved}
    names = {name for name, p in model.module.named_parameters() if id(p) in moved}
    adapted = {name.partition(".lora_A.")[0] for name in dict(model.module.named_parameters()) if ".lora_A." in name}
    assert names == {f"{name}.base_layer.weight" for name in adapted}
    assert any(name.endswith(".q_proj.base_layer.bias") for name, _ in model.module.named_parameters())


def spec_of(place: Path, **changes: Any) -> FinetuneSpec:
    """A training of six updates, on images if `place` has them."""
    document: dict[str, Any] = {
        "name": "sums",
        "base": "base",
        "data": {"images": IMAGES} if (place / IMAGES).exists() else {"file": "data.jsonl", "max_length": 64},
        "method": {"kind": "mergopt", "scale": 0.01},
        "training": {"steps": 6, "batch": 4, "learning_rate": 0.003, "checkpoint_every": 2, "warmup_steps": 1},
        "dtype": "float32",
    }
    for key, value in changes.items():
        document[key] = {**document.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_spec(document, place)


def run(place: Path, out: Path, **changes: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return train(spec_of(place, **changes), out)


def weights(out: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(out / EXPERT / "model.safetensors")
    return tensors


def are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["mergopt", "adamw", "sgd", "sam", "asam", "tangent"])
def test_every_method_learns(any_place: Path, tmp_path: Path, kind: str) -> None:
    rate = 0.05 if kind == "sgd" else 0.002
    method = {"kind": kind, "scale": 0.002, "rho": 0.02}
    facts = run(any_place, tmp_path / "out", method=method, training={"steps": 12, "learning_rate": rate})
    losses = [line["loss"] for line in read_history(tmp_path / "out" / METRICS)]
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert facts["loss"] == losses[-1]


def test_the_expert_is_one_of_a_study(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out", dtype="bfloat16")
    expert = open_checkpoint(tmp_path / "out" / EXPERT)
    base = open_checkpoint(place / "base")
    assert expert.tensors.keys() == base.tensors.keys()
    assert {tensor.dtype for tensor in expert.tensors.values()} == {"BF16"}
    card = (tmp_path / "out" / EXPERT / "README.md").read_text()
    assert "6 updates of 4 rows" in card
    assert "optimizer mergopt" in card
    assert json.loads((tmp_path / "out" / EXPERT / TRAINING_FILE).read_text())["specification"]["name"] == "sums"


class Killed(Exception):
    pass


@pytest.mark.parametrize("kind", ["mergopt", "asam"])
def test_a_training_that_was_killed_ends_with_the_same_bits(any_place: Path, tmp_path: Path, kind: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(any_place, whole, method={"kind": kind})
    parts.mkdir()

    def killing(line: Mapping[str, Any]) -> None:
        if line["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        train(spec_of(any_place, method={"kind": kind}), parts, report=killing)
    assert checkpoints.step_of(checkpoints.latest(parts / CHECKPOINTS)) == 4
    assert [line["step"] for line in read_history(parts / METRICS)] == [1, 2, 3, 4, 5]
    seen: list[int] = []
    train(spec_of(any_place, method={"kind": kind}), parts, report=lambda line: seen.append(line["step"]))
    assert seen == [5, 6]
    assert [line["step"] for line in read_history(parts / METRICS)] == [1, 2, 3, 4, 5, 6]
    assert are_equal(weights(parts), weights(whole))
    assert not are_equal(weights(parts), load_file(any_place / "base" / "model.safetensors"))


@pytest.mark.parametrize("changed", ["data", "base"])
def test_a_training_does_not_continue_on_other_inputs(place: Path, tmp_path: Path, changed: str) -> None:
    """Rows of other data would be other batches, and the expert would name data that it was not trained on."""
    for name in ("base", "data.jsonl"):
        copied = shutil.copytree if name == "base" else shutil.copyfile
        copied(place / name, tmp_path / name)
    spec, out = spec_of(tmp_path), tmp_path / "out"
    out.mkdir()

    def killing(line: Mapping[str, Any]) -> None:
        if line["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        train(spec, out, report=killing)
    file = tmp_path / ("data.jsonl" if changed == "data" else "base/generation_config.json")
    before = file.read_bytes()
    file.write_bytes(before + b"\n")
    with pytest.raises(
        InvalidTask, match=rf"{changed}: .* has changed since the training began; restore it to continue"
    ):
        train(spec, out)
    file.write_bytes(before)
    train(spec, out)
    assert json.loads((out / EXPERT / TRAINING_FILE).read_text())["sources"] == sources_of(spec, tmp_path / "base")


def test_checkpoints_of_earlier_versions_are_continued(place: Path, tmp_path: Path) -> None:
    """A training continues from a checkpoint in the format of earlier versions, with the bits of one that was whole."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(place, whole)
    parts.mkdir()

    def killing(line: Mapping[str, Any]) -> None:
        if line["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        train(spec_of(place), parts, report=killing)
    newest = checkpoints.latest(parts / CHECKPOINTS)
    assert newest is not None
    (file,) = newest.glob("shard-*")
    stored = load_file(file)
    for name, prefix in (("weights", "weights."), ("optimizer", "optimizer.")):
        own = {key.removeprefix(prefix): tensor for key, tensor in stored.items() if key.startswith(prefix)}
        save_file(own, newest / f"{name}.safetensors")
    file.unlink()
    state = json.loads((newest / "state.json").read_text())
    del state["sources"]
    (newest / "state.json").write_text(json.dumps(state))
    train(spec_of(place), parts)
    assert are_equal(weights(parts), weights(whole))


@pytest.mark.parametrize("noise", ["task_vectors", "merges"])
def test_offsets_of_experts_also_after_a_kill(any_place: Path, tmp_path: Path, noise: str) -> None:
    """Offsets made of experts' task vectors change the training, and are the same after a kill; others are refused."""
    for seed in (1, 2):
        run(any_place, tmp_path / f"expert{seed}", method={"kind": "adamw"}, seed=seed)
    experts = [str(tmp_path / f"expert{seed}" / EXPERT) for seed in (1, 2)]
    method = {"noise": noise, "fit_to": experts}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(any_place, whole, method=method)
    run(any_place, tmp_path / "plain", method={"kind": "adamw"})
    assert not are_equal(weights(whole), weights(tmp_path / "plain"))
    parts.mkdir()

    def killing(line: Mapping[str, Any]) -> None:
        if line["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        train(spec_of(any_place, method=method), parts, report=killing)
    with pytest.raises(ValueError, match="the state is of other task vectors"):
        train(spec_of(any_place, method={**method, "fit_to": experts[:1]}), parts)
    train(spec_of(any_place, method=method), parts)
    assert are_equal(weights(parts), weights(whole))


def test_experts_of_another_base_are_refused(place: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other", layers=1)
    with pytest.raises(InvalidModel, match=r"method.fit_to: .*other has other tensors than .*base"):
        run(place, tmp_path / "out", method={"noise": "merges", "fit_to": [str(other)]})


def test_an_incomplete_checkpoint_is_not_loaded(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out")
    kept = sorted(path.name for path in (tmp_path / "out" / CHECKPOINTS).iterdir())
    assert kept == ["step-00000004", "step-00000006"]
    hidden = tmp_path / "out" / CHECKPOINTS / ".step-00000008.checkpoint.partial" / "model"
    hidden.mkdir(parents=True)
    assert checkpoints.step_of(checkpoints.latest(tmp_path / "out" / CHECKPOINTS)) == 6


def test_reading_fewer_rows_at_once_changes_rounding_only(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "whole", training={"micro_batch": 4})
    run(place, tmp_path / "parts", training={"micro_batch": 1})
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.allclose(tensor, weights(tmp_path / "parts")[name], rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_and_noise(place: Path, tmp_path: Path) -> None:
    """Gradient checkpointing and noise in layers change nothing."""
    run(place, tmp_path / "plain")
    run(place, tmp_path / "other", method={"in_layers": True}, training={"gradient_checkpointing": True})
    for name, tensor in weights(tmp_path / "plain").items():
        assert torch.allclose(tensor, weights(tmp_path / "other")[name], rtol=1e-4, atol=1e-5)


def test_only_the_named_layers_are_trained(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out", training={"layers": [1]})
    base = load_file(place / "base" / "model.safetensors")
    changed = {name for name, tensor in weights(tmp_path / "out").items() if not torch.equal(tensor, base[name])}
    assert changed
    assert all(".layers.1." in name for name in changed)
    with pytest.raises(InvalidModel, match=r"training.layers: 2; the model has the layers 0 to 1"):
        run(place, tmp_path / "none", training={"layers": [2]})


def moved_by(spec: FinetuneSpec, place: Path) -> set[str]:
    """Names of the weights that MergOPT offsets in a training, found within a step."""
    model = load_model(spec, place / "base", torch.device("cpu"))
    optimizer = make_optimizer(
        spec.method, model.trained.values(), learning_rate=0.1, seed=3, model=model.module, moved=model.moved
    )
    assert isinstance(optimizer, MergOPT)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with optimizer.offset():
        return {name for name, p in model.module.named_parameters() if not torch.equal(p, before[name])}


def test_noise_is_where_merges_move_weights(place: Path) -> None:
    """Noise is on all weights by default, also if only some layers are trained, because merges move the others."""
    every = moved_by(spec_of(place), place)
    assert moved_by(spec_of(place, training={"layers": [1]}), place) == every
    of_layer = moved_by(spec_of(place, training={"layers": [1]}, method={"noise_layers": [0]}), place)
    assert of_layer == {name for name in every if ".layers.0." in name}
    with pytest.raises(InvalidModel, match=r"method.noise_layers: 5; the model has the layers 0 to 1"):
        moved_by(spec_of(place, method={"noise_layers": [5]}), place)


def test_noise_is_where_other_adapters_change_weights(place: Path) -> None:
    """With `noise_targets`, noise is on the weights of these modules, whether this adapter changes them or not."""

    def modules(**method: Any) -> set[str]:
        names = moved_by(spec_of(place, adapter={"targets": ["q_proj"]}, method=method), place)
        return {name.removesuffix(".weight").removesuffix(".base_layer").rsplit(".", 1)[-1] for name in names}

    assert modules() == {"q_proj"}
    assert modules(noise_targets=["q_proj", "down_proj"]) == {"q_proj", "down_proj"}
    assert modules(noise_targets=["down_proj"]) == {"down_proj"}
    assert {"q_proj", "o_proj", "gate_proj", "down_proj"} <= modules(noise_targets="all-linear")
    assert "embed_tokens" not in modules(noise_targets="all-linear")
    with pytest.raises(
        InvalidModel, match=r"method.noise_targets: .*; the model has no such modules, its linear modules are down_proj"
    ):
        modules(noise_targets=["nothing"])


def test_training_with_noise_on_trained(place: Path, tmp_path: Path) -> None:
    """A checkpoint of a version with noise on trained layers alone is refused unless these layers are named."""
    out = tmp_path / "out"
    named = {"training": {"layers": [1]}, "method": {"noise_layers": [1]}}
    run(place, out, **named)
    shutil.rmtree(out / EXPERT)
    for checkpoint in (out / CHECKPOINTS).iterdir():
        state = json.loads((checkpoint / "state.json").read_text())
        del state["optimizer"]["mergopt"]["moved"]
        (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(InvalidModel, match=r"expected method.noise_layers: \[1\] to continue it"):
        run(place, out, training={"layers": [1], "steps": 8})
    facts = run(place, out, training={"layers": [1], "steps": 8}, method={"noise_layers": [1]})
    assert facts["steps"] == 8


def test_experts_of_a_fleet_have_draws_of_their_own(place: Path) -> None:
    seeds = {noise_seed(spec_of(place, name=name, seed=seed)) for name in ("math", "text") for seed in (0, 1)}
    assert len(seeds) == 4


@pytest.mark.parametrize("kind", ["mergopt", "sam"])
def test_losses_at_the_weights_and_at_the_offset(any_place: Path, tmp_path: Path, kind: str) -> None:
    """The history has both losses: with MergOPT that at the weights at some updates, with SAM both at all."""
    run(any_place, tmp_path / "out", method={"kind": kind, "scale": 0.05, "rho": 0.5}, training={"steps": 12})
    lines = read_history(tmp_path / "out" / METRICS)
    if kind == "sam":
        assert all(line["offset_loss"] != line["loss"] for line in lines)
        return
    assert [line["step"] for line in lines if "weights_loss" in line] == [1, 11, 12]
    for line in lines:
        draw = draw_of(noise_seed(spec_of(any_place)), line["step"] - 1)
        assert (line["alpha"], line["models"]) == (draw.alpha, draw.num_models)
        if "weights_loss" in line:
            assert (line["weights_loss"] == line["loss"]) == (draw.factor == 0)


@pytest.mark.parametrize("kind", ["mergopt", "adamw"])
def test_lora_gives_an_adapter_of_the_base(place: Path, tmp_path: Path, kind: str) -> None:
    run(place, tmp_path / "out", adapter={"rank": 2, "targets": ["q_proj"]}, method={"kind": kind})
    base = open_checkpoint(place / "base")
    expert = read_expert(tmp_path / "out" / EXPERT, base)
    assert expert is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(expert.read(name), base.read(name))
    other = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(expert.read(other), base.read(other))


def test_a_loss_that_is_no_number_stops_with_step_and_batch(any_place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(TrainingFailed) as failed:
        run(any_place, out, method={"kind": "sgd"}, training={"learning_rate": 1e30, "max_gradient_norm": None})
    message = str(failed.value)
    assert "step 2: the loss is" in message or "step 3: the loss is" in message
    assert ("data.jsonl, line" if any_place.name.startswith("finetuning0") else ".png") in message
    assert not (out / EXPERT).exists()


def test_the_last_good_checkpoint_is_kept_and_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def poisoned(line: Mapping[str, Any]) -> None:
        if line["step"] == 3:
            monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("nan")))

    out.mkdir()
    with pytest.raises(TrainingFailed, match=r"step 4: .* the last good checkpoint is .*step-00000002"):
        train(spec_of(place), out, report=poisoned)
    assert checkpoints.step_of(checkpoints.latest(out / CHECKPOINTS)) == 2


def test_what_does_not_fit_the_model_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"max_length: 600; .* reads at most 512 tokens"):
        check(spec_of(place, data={"max_length": 600}))
    objective = {"name": "sums", "task": {"file": "none.jsonl"}, "metric": "exact_match"}
    with pytest.raises(InvalidTask, match=r"none.jsonl: cannot be read"):
        check(spec_of(place, evaluation={"objectives": [objective]}))
    check(spec_of(place))
    with pytest.raises(InvalidModel, match=r"adapter.targets: w_q: .* modules are .*q_proj"):
        run(place, tmp_path / "b", adapter={"targets": ["w_q"]})
    with pytest.raises(InvalidModel, match=r"data.pad_token: '<fill>'; .* has no such token"):
        run(place, tmp_path / "c", data={"pad_token": "<fill>"})
    base = tiny_llama(tmp_path / "without")
    for file in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
        if (base / file).exists():
            document = json.loads((base / file).read_text())
            document.pop("pad_token", None)
            (base / file).write_text(json.dumps(document))
    with pytest.raises(InvalidModel, match="its tokenizer has no pad token"):
        run(place, tmp_path / "d", base=str(base))
    run(place, tmp_path / "e", base=str(base), data={"pad_token": "</s>"}, training={"steps": 1})


def test_packing_is_refused_where_documents_see_each_other(place: Path, tmp_path: Path) -> None:
    """Layers with a state carry it from one document to the next; without packing such a model is trained."""
    base = layout_family(tmp_path, "granitemoehybrid").base.directory
    with pytest.raises(InvalidModel, match=r"data.packing: true; in models of type 'granitemoehybrid' a document"):
        run(place, tmp_path / "packed", base=str(base))
    run(place, tmp_path / "apart", base=str(base), data={"packing": False}, training={"steps": 1})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["gpt2", "gemma3_text", "qwen3_moe"])
def test_packing_is_accepted_where_attention(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    """Packing is accepted where attention ends with a document."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(layout_family(tmp_path, model_type).base.directory, dtype=dtype)
    check_packing(model.train())
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("lfm2", {"full_attn_idxs": [1, 3]}),
        ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "head_dim": 8}),
    ],
)
def test_states_are_noticed_in_each_precision(model_type: str, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    """With random weights, states change logits least; in bfloat16 by little more than its rounding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **common, **heads, **sizes)
    with pytest.raises(InvalidModel, match=r"data.packing: true"):
        check_packing(AutoModelForCausalLM.from_config(config).to(dtype))


def test_the_scale_is_fitted_to_experts(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "first", method={"kind": "adamw"})
    facts = run(place, tmp_path / "second", method={"scale": "auto", "fit_to": [str(tmp_path / "first" / EXPERT)]})
    assert facts["noise"]["distribution"] == "laplace"
    assert 0 < facts["noise"]["scale"] < 0.02
    # Tensors that were not trained are left out: they would make the noise too small.
    run(place, tmp_path / "layer", method={"kind": "adamw"}, training={"layers": [1]})
    base, expert = (load_file(d / "model.safetensors") for d in (place / "base", tmp_path / "layer" / EXPERT))
    changes = [(expert[name] - base[name]).abs().flatten() for name in base if ".layers.1." in name]
    (fitted,) = task_vector("layer", place / "base", tmp_path / "layer" / EXPERT).fits[:1]
    assert fitted.scale == pytest.approx(float(torch.cat(changes).mean()), rel=1e-3)
    assert 0 < facts["noise"]["distance"] < 1


def test_the_tasks_of_studies_are_scored_while_training(place: Path, tmp_path: Path) -> None:
    objective = {"name": "sums", "task": {"file": "data.jsonl", "max_tokens": 4}, "metric": "exact_match"}
    facts = run(
        place,
        tmp_path / "out",
        training={"steps": 4, "learning_rate": 0.01},
        evaluation={"every": 2, "samples": 10, "objectives": [objective]},
    )
    values = [line["values"] for line in read_history(tmp_path / "out" / METRICS) if "values" in line]
    assert len(values) == 2
    assert facts["values"] == values[-1]
    assert 0 <= values[-1]["sums"] <= 1
    assert "## Evaluation" in (tmp_path / "out" / EXPERT / "README.md").read_text()


def test_a_failed_evaluation_may_be_changed(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation comes after its checkpoint and changes no weight, so that the training continues with another."""
    objective = {"name": "sums", "task": {"file": "data.jsonl", "max_tokens": 4}, "metric": "exact_match"}
    given = {"training": {"steps": 4}, "method": {"kind": "adamw"}}
    whole, out = tmp_path / "whole", tmp_path / "out"
    run(place, whole, **given)
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "values", lambda _: pytest.fail("it ended"))
        with pytest.raises(pytest.fail.Exception):
            run(place, out, **given, evaluation={"every": 2, "samples": 4, "objectives": [objective]})
    assert checkpoints.step_of(checkpoints.latest(out / CHECKPOINTS)) == 2
    other = {"every": 2, "samples": 2, "objectives": [{**objective, "name": "other"}]}
    facts = run(place, out, **given, evaluation=other)
    values = {line["step"]: line["values"] for line in read_history(out / METRICS) if "values" in line}
    assert [(step, list(found)) for step, found in values.items()] == [(2, ["other"]), (4, ["other"])]
    assert facts["values"] == values[4]
    assert are_equal(weights(out), weights(whole))
    shutil.rmtree(out / EXPERT)
    assert run(place, out, **given)["values"] == {}


def test_tangent_experts_are_scored_as_trained_and_as_exported(place: Path, tmp_path: Path) -> None:
    """The linearization that is trained learns the sums; the exported weights, in the model itself, are not it."""
    objective = {"name": "sums", "task": {"file": "data.jsonl", "max_tokens": 4}, "metric": "exact_match"}
    out = tmp_path / "out"
    facts = run(
        place,
        out,
        method={"kind": "tangent"},
        training={"steps": 60, "batch": 8, "learning_rate": 0.02},
        evaluation={"every": 60, "samples": 20, "objectives": [objective]},
    )
    (line,) = (line for line in read_history(out / METRICS) if "values" in line)
    assert facts["values"] == line["values"]
    assert facts["linearized_values"] == line["linearized_values"]
    assert facts["linearized_values"]["sums"] > facts["values"]["sums"]
    assert "is the linearization of the base, not the model" in (out / EXPERT / "README.md").read_text()


def chat_model(directory: Path) -> Path:
    """A base whose tokenizer has a chat template, and data: questions in chats are answered by 7, other texts by 3."""
    base = tiny_llama(directory / "base")
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}|{% endfor %}"
    (base / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}a:{% endif %}")
    questions = [f"{i}?" for i in range(20)]
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": "7"}] for q in questions]
    plain = [{"prompt": q, "completion": "3"} for q in questions]
    lines = [*({"messages": chat} for chat in chats), *plain]
    (directory / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"prompt": q, "answer": "7"} for q in questions]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.mark.parametrize("given", [None, False])
def test_tasks_of_chats_are_asked_in_the_chat_template(tmp_path: Path, given: bool | None) -> None:
    """An expert trained on conversations is right when it is asked as it was trained, which is the default."""
    place = chat_model(tmp_path)
    objective = {"name": "sevens", "task": {"file": "data.jsonl", "max_tokens": 1}, "metric": "exact_match"}
    evaluation: dict[str, Any] = {"samples": 10, "objectives": [objective]}
    if given is not None:
        evaluation["chat_template"] = given
    facts = run(
        place,
        tmp_path / "out",
        data={"file": "chats.jsonl"},
        method={"kind": "adamw"},
        training={"steps": 40, "learning_rate": 0.01},
        evaluation=evaluation,
    )
    assert (facts["values"]["sevens"] == 1.0) == (given is None)


@pytest.mark.slow
def test_tasks_are_scored_in_a_thread(place: Path, tmp_path: Path) -> None:
    """Tasks are scored in a thread, as Ray Train calls a training."""
    objective = {"name": "sums", "task": {"file": "data.jsonl", "max_tokens": 4}, "metric": "exact_match"}
    changes = {"training": {"steps": 1}, "evaluation": {"samples": 2, "objectives": [objective]}}
    with ThreadPoolExecutor(1) as pool:
        facts = pool.submit(run, place, tmp_path / "out", **changes).result()
    assert facts["values"].keys() == {"sums"}


def test_learning_rates_by_hand() -> None:
    cosine = Training(steps=10, learning_rate=1.0, warmup_steps=2)
    assert [learning_rate_at(step, 10, cosine) for step in (0, 1, 2, 6)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    linear = Training(steps=10, learning_rate=1.0, schedule="linear")
    assert [learning_rate_at(step, 10, linear) for step in (0, 5, 9)] == pytest.approx([1.0, 0.5, 0.1])
    constant = Training(steps=10, learning_rate=1.0, schedule="constant")
    assert learning_rate_at(9, 10, constant) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"file": None}}, "data: give either file or dataset"),
        ({"training": {"epochs": 1.0}}, "training: give either steps or epochs"),
        ({"training": {"batch": 1}, "workers": 2}, "training.batch: 1 rows for 2 workers"),
        ({"method": {"scale": "auto"}}, "method.fit_to: is empty; scale: auto needs"),
        ({"method": {"noise": "merges"}}, "method.fit_to: is empty; noise: merges needs"),
        (
            {"method": {"noise": "task_vectors", "fit_to": ["base"]}, "adapter": {}},
            "method.noise: task_vectors works without adapter",
        ),
        ({"method": {"kind": "adam"}}, 'method.kind: "adam"'),
        ({"training": {"learning_rat": 1}}, "learning_rat"),
        ({"adapter": {}, "training": {"layers": [0]}}, "training.layers: is for full weights"),
    ],
)
def test_contradictions_are_refused(place: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStudy) as refused:
        spec_of(place, **changes)
    assert message in str(refused.value)


def test_no_gpu_is_used_that_was_not_given(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs are visible also to processes that have reserved none."""

    def load(spec: FinetuneSpec, base: Path, device: torch.device, **_: Any) -> None:
        raise InvalidModel((f"loaded on {device}",))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(trainer, "load_model", load)
    with pytest.raises(InvalidModel, match="loaded on cpu"):
        run(place, tmp_path / "out")


def test_the_largest_seed_is_one(place: Path, tmp_path: Path) -> None:
    assert run(place, tmp_path / "out", seed=2**32 - 1, training={"steps": 1})["steps"] == 1


def test_a_specification_is_read_and_repeated(place: Path) -> None:
    file = place / "spec.yaml"
    file.write_text("name: a\nbase: base\ndata: {file: data.jsonl}\ntraining: {epochs: 2}\n")
    spec = load_spec(file)
    assert spec.base == str(place / "base")
    assert spec.data.file == str(place / "data.jsonl")
    assert parse_spec(spec.canonical()) == spec
