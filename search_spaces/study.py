"""The study file: what to merge, what to search, what "better" means, and how much it may cost.

Frozen, validated models of every field users may write. Validation that needs the file system, the models or the
tasks is not done here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Engine",
    "Fidelity",
    "InlineTask",
    "Limits",
    "Models",
    "ObjectiveSpec",
    "Search",
    "SearchSpaceSpec",
    "Study",
    "Verify",
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Models(_Section):
    base: str
    experts: dict[str, str]


class SearchSpaceSpec(_Section):
    kind: Literal["lfs"]
    layer_groups: int = 4
    component_groups: Literal[1, 3] = 3
    methods: tuple[str, ...] = ("task_arithmetic", "ties", "slerp", "linear")
    method_per: Literal["layer_group", "component"] = "layer_group"
    preset: Literal["paper"] | None = None


class Search(_Section):
    algorithm: Literal["auto", "smac", "random"] = "auto"
    max_trials: int = 60
    seed: int = 0


class Fidelity(_Section):
    scheduler: Literal["hyperband", "none"] = "hyperband"
    min_samples: int | None = None
    max_samples: int | None = None
    eta: int = 3
    rungs: tuple[int, ...] | None = None


class InlineTask(_Section):
    file: str
    prompt: str = "{{prompt}}"
    answer: str = "{{answer}}"
    until: tuple[str, ...] = ("\n",)
    max_tokens: int = 64


class ObjectiveSpec(_Section):
    name: str
    task: str | InlineTask
    metric: str
    filter: str | None = None
    split: str | None = None
    num_fewshot: int | None = None
    direction: Literal["maximize", "minimize"] | None = None
    range: tuple[float, float] | None = None


class Verify(_Section):
    trials: int = 3
    samples: int = 16


class Engine(_Section):
    backend: Literal["vllm"] = "vllm"
    replicas: int = 1
    tensor_parallel_size: int = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int = 2048
    add_bos_token: bool | None = None
    chat_template: bool | str = False
    system_prompt: str | None = None
    verify: Verify | Literal[False] = Verify()


class Limits(_Section):
    max_gpu_hours: float | None = None
    max_wall_clock_s: float | None = None
    max_layers: int | None = None


class Study(_Section):
    name: str
    models: Models
    search_space: SearchSpaceSpec
    search: Search = Search()
    fidelity: Fidelity = Fidelity()
    objectives: Annotated[tuple[ObjectiveSpec, ...], Field(min_length=1)]
    holdout: tuple[ObjectiveSpec, ...] = ()
    engine: Engine = Engine()
    limits: Limits = Limits()

    def canonical(self) -> dict[str, Any]:
        return self.model_dump(mode="json")
