"""Fine-tuning of text models: documents in packed rows, the loss over target tokens, tasks scored by generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.errors import Problem
from search_spaces.study.engine import EngineOptions
from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.lm_eval_tasks import content_hash
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import lack_of_references
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint
from workers.models.remote import locate
from workers.training.finetuning.data import Document, pack, read_documents, tensors_of, writes_chats
from workers.training.finetuning.document_attention import document_bounds, use_document_attention, within_documents
from workers.training.finetuning.evaluation import Evaluator, check_greedy
from workers.training.finetuning.merge_losses import MergeLosses
from workers.training.finetuning.modality import EvaluationCheck
from workers.training.finetuning.models import check_packing, computes_in
from workers.training.finetuning.result import save_model
from workers.training.finetuning.spec import FinetuneSpec
from workers.training.finetuning.target_loss import TargetLoss
from workers.training.mergopt.tangent import LinearizedModel, TangentModel

if TYPE_CHECKING:
    import torch

    from workers.training.finetuning.models import TrainedModel
    from workers.types import TaskSpec

__all__ = ["TEXT_TRAINING", "TextExamples", "TextTraining", "pad_token"]


class TextExamples:
    """Training rows of packed documents; implements the interface `modality.Examples`.

    `rows` are the rows of the whole training data; each row consists of one or several documents. `pad` is the id of
    the token with which rows are padded. `has_bounds` says whether the bounds of the documents are passed to the model,
    so that tokens attend only to tokens of their own document (module `document_attention`).
    """

    unit = "tokens"

    def __init__(self, rows: Sequence[tuple[Document, ...]], *, pad: int) -> None:
        self.rows, self._pad = rows, pad
        self.has_bounds = False

    def __len__(self) -> int:
        return len(self.rows)

    def num_targets(self, row: int) -> int:
        return sum(sum(document.has_loss[1:]) for document in self.rows[row])

    def origins(self, row: int) -> Sequence[str]:
        return [document.origin for document in self.rows[row]]

    def inputs(self, rows: Sequence[int]) -> dict[str, Any]:
        batch = tensors_of([self.rows[row] for row in rows] or [()], pad=self._pad)
        bounds = document_bounds(batch.positions) if self.has_bounds else {}
        return {"labels": batch.labels, "input_ids": batch.tokens, "position_ids": batch.positions, **bounds}

    def forward_pass(self) -> AbstractContextManager[None]:
        return within_documents() if self.has_bounds else nullcontext()


class TextTraining:
    """Fine-tuning of decoder-only language models; implements the interface `modality.TrainingModality`."""

    reads_by_unit = True

    def check(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> None:
        prompts = _prompts(spec, base)
        reads = open_checkpoint(base).settings.get("max_position_embeddings")
        if reads is not None and spec.data.max_length > reads:
            raise InvalidModel(
                (f"data.max_length: {spec.data.max_length}; the model in {base} reads at most {reads} tokens",)
            )
        pad_token(spec, prompts.tokenizer, base)
        read_documents(spec.data, prompts)

    def examples(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> TextExamples:
        prompts = _prompts(spec, base)
        rows = pack(
            read_documents(spec.data, prompts), length=spec.data.max_length, packing=spec.data.packing, seed=spec.seed
        )
        return TextExamples(rows, pad=pad_token(spec, prompts.tokenizer, base))

    def network(
        self, spec: FinetuneSpec, base: Path, access: FileAccess | None, options: Mapping[str, Any]
    ) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, **options)
        return model

    def is_head(self, name: str) -> bool:
        return False

    def loss(self, model: torch.nn.Module) -> TargetLoss:
        return TargetLoss(model)

    def output_of(self, model: torch.nn.Module) -> str:
        return "logits"

    def save(
        self,
        base: Path,
        model: Any,
        place: Path,
        *,
        dtype: torch.dtype,
        weights: Mapping[str, torch.Tensor] | None,
    ) -> None:
        save_model(model, place, dtype=dtype, weights=weights)

    def prepare(self, spec: FinetuneSpec, model: TrainedModel, examples: TextExamples, device: torch.device) -> None:
        if not spec.data.packing:
            return
        check_packing(model.module, model.called)
        if model.tangent is None:
            examples.has_bounds = use_document_attention(
                model.module,
                max_length=spec.data.max_length,
                device=device,
                dtype=computes_in(spec, device),
                called=model.called,
            )

    def linearized(self, tangent: TangentModel) -> LinearizedModel:
        return LinearizedModel(tangent)

    def adapter_options(self) -> Mapping[str, Any]:
        return {"task_type": "CAUSAL_LM"}

    def tokens_of_row(self, spec: FinetuneSpec, settings: Mapping[str, Any]) -> int:
        return spec.data.max_length

    def evaluation(
        self, spec: FinetuneSpec, base: Path, model: Any, called: Any, access: FileAccess | None
    ) -> Evaluator:
        assert spec.evaluation is not None
        return Evaluator(
            spec.evaluation,
            base,
            model,
            max_length=_evaluated_length(spec),
            seed=spec.seed,
            chat_template=writes_chats(spec),
            called=called,
            access=access,
        )

    def check_evaluation(self, spec: FinetuneSpec, base: Path, tasks: Mapping[int, TaskSpec]) -> EvaluationCheck:
        assert spec.evaluation is not None
        options = EngineOptions(max_model_len=_evaluated_length(spec), chat_template=writes_chats(spec))
        prompts = Prompts(str(base), options)
        if options.chat_template and not prompts.tokenizer.chat_template:
            message = f"true; the tokenizer of {base} has no chat template; write false, or leave it out"
            return EvaluationCheck((Problem("evaluation.chat_template", message),))
        problems, notes = list[Problem](), list[str]()
        evaluator = TaskEvaluator(None, prompts)
        for index, task in tasks.items():
            try:
                info = evaluator.describe(task)
                check_greedy(task, evaluator, samples=min(spec.evaluation.samples, info.num_samples))
            except InvalidTask as error:
                problems.append(Problem(f"evaluation.objectives.{index}.{error.field}", str(error)))
            else:
                if info.num_truncated:
                    notes.append(
                        f"{spec.name}: evaluation.objectives.{index}: {info.num_truncated} of {info.num_samples} "
                        "prompts lose their beginning, because a prompt and its completion have at most "
                        f"{prompts.max_length} tokens; a larger data.max_length allows more if the model reads more"
                    )
        return EvaluationCheck(tuple(problems), tuple(notes))

    def lack_of_losses(self, spec: FinetuneSpec, task: TaskSpec) -> str | None:
        lack = lack_of_references(task)
        return None if lack is None else f"has no reference answers to measure merges on: {lack}"

    def merge_losses(
        self,
        experts: Mapping[str, FinetuneSpec],
        directories: Mapping[str, Path],
        tasks: Mapping[str, Sequence[TaskSpec]],
        *,
        samples: int,
        is_linearized: bool,
    ) -> MergeLosses:
        return MergeLosses(
            locate(next(iter(experts.values())).base),
            directories,
            tasks,
            samples=samples,
            max_length=max(map(_evaluated_length, experts.values())),
            chats=[alias for alias, spec in experts.items() if writes_chats(spec)],
            is_linearized=is_linearized,
        )

    def data_digest(self, spec: FinetuneSpec) -> str | None:
        return None if spec.data.file is None else content_hash(spec.data.file)


TEXT_TRAINING = TextTraining()


def pad_token(spec: FinetuneSpec, tokenizer: Any, base: Path) -> int:
    """Id of the padding token of rows: the token that `spec` names, else the pad token of `tokenizer`.

    Raises InvalidModel if there is no such token. `base` is the directory of the base model, for the message.
    """
    name = spec.data.pad_token
    if name is not None:
        found = tokenizer.get_vocab().get(name)
        if found is None:
            raise InvalidModel((f"data.pad_token: {name!r}; the tokenizer of {base} has no such token",))
        return int(found)
    if tokenizer.pad_token_id is None:
        raise InvalidModel((f"{base}: its tokenizer has no pad token; name one of its tokens in data.pad_token",))
    return int(tokenizer.pad_token_id)


def _evaluated_length(spec: FinetuneSpec) -> int:
    """The largest number of tokens of a prompt with its completion in evaluations and analyses of an expert.

    The limit is the default of studies or, if training rows are longer, `data.max_length`. A smaller maximum of the
    model also limits texts (property `Prompts.max_length`).
    """
    return max(EngineOptions().max_model_len, spec.data.max_length)


def _prompts(spec: FinetuneSpec, base: Path) -> Prompts:
    """Tokenizer of the base model, and options of prompts. Raises InvalidTask if the training data are images."""
    if spec.data.images is not None:
        raise InvalidTask(f"data.images: {base} reads text; give file or dataset, or a model that reads images")
    return Prompts(str(base), EngineOptions(max_model_len=spec.data.max_length))
