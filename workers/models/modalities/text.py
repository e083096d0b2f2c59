"""Text: decoder-only language models with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.models.components import IGNORED, Layout, layout
from workers.models.modalities.base import Modality
from workers.models.tokenizers import TOKENIZER_FILES, check_tokenizer

if TYPE_CHECKING:
    from workers.models.computed_tensors import SourceTensor

__all__ = ["BY_CONFIG", "TEXT"]

BY_CONFIG = "(by config.json, or transformers' default where it is silent)"


def _canonical(config: Mapping[str, Any], name: str) -> str | None:
    return None if IGNORED.search(name) else name


def _layout(settings: Mapping[str, Any], names: Iterable[str]) -> Layout:
    return layout(settings, names)


def _problems(settings: Mapping[str, Any], found: Layout, tensors: Mapping[str, SourceTensor]) -> Iterator[str]:
    if found.is_tied and settings.get("tie_word_embeddings") is False:
        yield f"tie_word_embeddings is false {BY_CONFIG}, but no output head (lm_head) is stored"


def _differences(base: Path, expert: Path) -> Iterator[str]:
    """Yield nothing: models with different tokenizers can be merged, because their vocabularies are aligned.

    The module `workers.models.vocabulary` aligns the vocabularies.
    """
    return iter(())


TEXT = Modality(
    name="text",
    model_types=frozenset(),
    auto_class="AutoModelForCausalLM",
    files=TOKENIZER_FILES,
    structure=("architectures",),
    has_vocabulary=True,
    runs_on_vllm=True,
    layout=_layout,
    canonical=_canonical,
    problems=_problems,
    differences=_differences,
    check_files=check_tokenizer,
    task_key=None,
    tasks="workers.evaluation.text_tasks:TEXT_TASKS",
    worker="workers.serving.engine_worker:EngineWorker",
    training="workers.training.finetuning.text:TEXT_TRAINING",
    losses="workers.training.text_losses:TextLosses",
    copies_on_cpu=2,  # vLLM computes with a packed copy, besides the plain weights that merges are written into
)
