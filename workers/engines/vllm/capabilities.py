"""Program of a separate process that asks vLLM whether and how it can run models, given their configurations.

No weights are loaded and no device is used. The module `support` starts the process, whose function is `main`, and
decides from its answers which models can run.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.model_executor.models import ModelRegistry, registry
from vllm.platforms import current_platform

__all__ = ["describe", "main", "model_config"]

DTYPES = ("float32", "bfloat16", "float16")

# The first sentence of vLLM's message has the reason; lists of all architectures and advice follow.
SENTENCE_END = re.compile(r"\.(?:\s|$)")


def main(questions: str, answers: str) -> None:
    """Ask vLLM how it would run several models, and write the answers to a file.

    `questions` and `answers` are paths of JSON files, given on the command line. The file `questions` has a list of
    models' configurations (as in config.json). For each configuration, the file `answers` gets a dict that maps each
    dtype that engines can have to the result of the function `describe`: vLLM's implementation of the model and its
    limits.
    """
    # vLLM imports a model's code in a subprocess, which takes as long as importing vLLM; this process is one already.
    registry._run_in_subprocess = lambda function: function()
    configs = json.loads(Path(questions).read_bytes())
    found = [{dtype: describe(config, dtype=dtype) for dtype in DTYPES} for config in configs]
    Path(answers).write_text(json.dumps(found))


def describe(config: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Describe how vLLM would run a model with the configuration `config`, in an engine of `dtype`.

    The result contains `asked`, the architectures that the configuration names, joined by ", ". If vLLM refuses the
    model, there are two more keys:
    - `error`: the reason
    - `knows`: whether vLLM knows one of them

    Otherwise there are these keys:
    - `runs_as`: vLLM's class for the model
    - `runner`: "generate" or "pooling"
    - `is_multimodal`: whether the model is multimodal
    - `is_latent`: whether its attention is latent, as in DeepSeek
    - `layer_types`: the kinds of its layers
    - `head_size`: the size of an attention head
    - `head_sizes`: the sizes that attention kernels of this device support; None for any size
    """
    asked = [str(name) for name in config.get("architectures") or ()]
    with tempfile.TemporaryDirectory(prefix="mergesearch-model-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        try:
            model = model_config(folder, dtype=dtype)
        except Exception as error:  # vLLM raises any class
            known = ModelRegistry.get_supported_archs()
            return {
                "asked": ", ".join(asked),
                "error": _reason(error, asked).replace(folder, "it"),
                "knows": not asked or any(name in known for name in asked),
            }
    kind, _ = model.registry.inspect_model_cls(model.architectures, model)
    return {
        "asked": ", ".join(model.architectures),
        "runs_as": kind.architecture,
        "runner": model.runner_type,
        "is_multimodal": bool(model.is_multimodal_model),
        "is_latent": bool(model.use_mla),
        "layer_types": sorted(set(getattr(model.hf_text_config, "layer_types", None) or ())),
        "head_size": model.get_head_size(),
        "head_sizes": _head_sizes(model),
    }


def model_config(directory: str, *, dtype: str) -> Any:
    """The configuration object (`ModelConfig`) that vLLM makes for the model in `directory`, in an engine of `dtype`.

    Every error of vLLM is raised unchanged.
    """
    return ModelConfig(
        model=directory, dtype=dtype, skip_tokenizer_init=True, generation_config="vllm", trust_remote_code=False
    )


def _reason(error: Exception, asked: list[str]) -> str:
    """The reason why vLLM refuses a model, for users.

    `error` is the exception that vLLM raised, and `asked` are the architectures in the model's configuration. Usually
    the result is the first sentence of the error's message. If the message only refers to vLLM's log, vLLM inspects the
    model's classes again, and the result is the error that this inspection raises.
    """
    details = error.errors() if hasattr(error, "errors") else []  # pydantic's
    text = str(details[0].get("ctx", {}).get("error", details[0]["msg"]) if details else error)
    if "failed to be inspected" in text:
        for name in asked:
            try:
                ModelRegistry.models[name].inspect_model_cls()
            except Exception as cause:
                return f"{type(cause).__name__}: {cause}"
    sentence = SENTENCE_END.split(" ".join(text.split()), maxsplit=1)[0]
    return sentence or type(error).__name__


def _head_sizes(model: Any) -> list[int] | None:
    if not current_platform.is_cpu() or model.use_mla or model.is_attention_free:
        return None
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes())
