"""Section `engine` of a study file, and the options with which one engine is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from search_spaces.section import Line, Section, one_of

__all__ = ["NOT_OF_ONE_ENGINE", "Engine", "EngineOptions", "Verify"]


def _tag_of_verify(value: object) -> str | None:
    return "<off>" if value is False else "<on>" if isinstance(value, Mapping | Verify) else None


def _tag_of_template(value: object) -> str | None:
    return "<bool>" if isinstance(value, bool) else "<name>" if isinstance(value, str) else None


class Verify(Section):
    trials: Annotated[int, Field(ge=1)] = 3
    samples: Annotated[int, Field(ge=1)] = 16


class Engine(Section):
    backend: Literal["vllm", "torch"] = "vllm"
    """The program that scores samples: vllm for text, torch for images. It follows from the tasks."""
    replicas: Annotated[int, Field(ge=1)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The data type of weights and activations. auto: bfloat16 on GPU, float32 on CPU."""
    max_model_len: Annotated[int, Field(ge=1)] = 2048
    """The largest number of tokens of a prompt and its completion together."""
    add_bos_token: bool | None = None
    """Whether prompts begin with the BOS token. Default: as the model's own tokenizer does."""
    chat_template: Annotated[
        Annotated[bool, Tag("<bool>")] | Annotated[Line, Tag("<name>")],
        one_of(_tag_of_template, "true, false or the name of a template"),
    ] = False
    system_prompt: str | None = None
    model_runner: Literal["v1", "v2"] = "v1"
    """The generation of vLLM's model runner. vLLM itself would choose by device and model."""
    rank_cache: bool = False
    """Whether the ranks of magnitudes in each expert's rows, which DELLA uses, are kept in memory: two bytes for each
    parameter, and no sorting for every candidate.
    """
    verify: Annotated[
        Annotated[Verify, Tag("<on>")] | Annotated[Literal[False], Tag("<off>")],
        one_of(_tag_of_verify, "false or {trials: 3, samples: 16}"),
    ] = Verify()
    """How many trials are scored again by plain transformers, on how many samples; false: none."""

    @property
    def num_gpus(self) -> int:
        """The number of GPUs that all engines use together."""
        return self.replicas * self.tensor_parallel_size

    @property
    def options(self) -> EngineOptions:
        """The options with which each engine is started."""
        return EngineOptions(**{name: value for name, value in self if name not in NOT_OF_ONE_ENGINE})


# Fields that are not options of one engine: the number of engines, and the verification after the search.
NOT_OF_ONE_ENGINE = frozenset({"replicas", "verify"})


class EngineOptions(Engine):
    """Options for starting one engine: the options of the study file's section `engine`, and further options.

    The further options are not keys of the study file; only programs set them. The class inherits all fields of the
    section, so a field that is added to the section becomes an option of engines.
    """

    threads: int = 0
    """The number of threads for arithmetic on CPU; 0: the cores of the machine but one, divided by its engines."""
    max_layers: int = 0
    """The largest number of layers of a merge, for an engine whose merges may have any number and order of layers; 0:
    every merge has as many layers as the base.
    """
    gpu_share_left: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of its GPU's memory that the engine leaves free for gradients and verification on the same GPU."""
    merges_parts: bool = False
    """Whether all merges are such that each GPU of an engine computes only the part of a tensor that it holds. If so,
    less memory is reserved for merging, and a merge of another kind is computed on the CPU if it needs more.
    """
    seed: int = 0
    """The seed of vLLM."""

    def document(self) -> dict[str, Any]:
        """The options, keyed by name, as plain data. Engines with equal options are interchangeable.

        The document of an old study keeps its digest: options that were added later are left out if they have their
        default, and `backend` is always "vllm", whichever program scores the tasks.
        """
        fields = type(self).model_fields
        added = ("max_layers", "model_runner", "gpu_share_left", "merges_parts")
        newer = {name for name in added if getattr(self, name) == fields[name].default}
        return self.model_dump(exclude={*NOT_OF_ONE_ENGINE, *newer}) | {"backend": "vllm"}
