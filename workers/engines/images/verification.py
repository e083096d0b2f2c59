"""Verification of image classifiers: transformers scores stored samples again, on the exported checkpoint of a merge.

Users get this checkpoint, with its heads and its image processor. Therefore the comparison covers merge, swap,
preprocessing, scoring and export. A sample is equal if the class with the largest logit is the same, and the
log-probabilities that are stored with the sample agree with those of transformers within the tolerance for rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file

from workers.engines.images.pixels import Pixels
from workers.engines.images.scoring import ImageEvaluator, value_of
from workers.errors import InvalidTask
from workers.evaluation.image_responses import Response
from workers.evaluation.image_tasks import PreparedTask
from workers.evaluation.prompts import LOGPROB_TOLERANCE
from workers.models.checkpoints import Checkpoint
from workers.models.task_heads import HEADS_DIR, PROJECTION, TaskHead
from workers.models.zero_shot import class_embeddings
from workers.types import SampleDifference, SampleResult, Span, VerificationReport

__all__ = ["verify_images"]

BATCH = 32

# Replaces infinite differences and NaN, which JSON does not have.
FAR = 1e6


def verify_images(
    recipe_digest: str,
    directory: str | Path,
    *,
    samples: Sequence[SampleResult],
    spans: Sequence[Span],
    dtype: str,
    evaluator: ImageEvaluator,
) -> VerificationReport:
    """Score samples of an exported merge with transformers, and compare them with the engine's stored `samples`.

    `directory` has the export, with its heads and its image processor. `spans` are the ranges of samples, each of one
    task; `evaluator` reads the tasks. `dtype` is the engine's dtype, which the tolerance depends on. Raises InvalidTask
    if a sample of a span is missing in `samples`.
    """
    model = _loaded(directory)
    pixels = Pixels(str(directory))
    known = {(sample.objective, sample.position): sample for sample in samples}
    tolerance = LOGPROB_TOLERANCE[dtype]
    differences: list[SampleDifference] = []
    largest, num_logprobs, num_samples = 0.0, 0, 0
    for span in spans:
        prepared = evaluator.task(span.task)
        logits = _classifier(model, Path(directory), prepared.head, evaluator)
        logprobs = _logprobs(logits, pixels, prepared, range(span.start, span.stop))
        for position, of_image in zip(range(span.start, span.stop), logprobs, strict=True):
            stored = known.get((span.objective, position))
            if stored is None:
                raise InvalidTask(f"verify: no stored sample of {span.objective} at position {position}")
            apart, difference = _compare(stored, of_image, prepared, tolerance)
            largest, num_samples = max(largest, apart), num_samples + 1
            num_logprobs += len(Response.from_json(stored.response).top)
            differences += [] if difference is None else [difference]
    del model
    gc.collect()
    return VerificationReport(
        recipe_digest=recipe_digest,
        num_samples=num_samples,
        num_equal=num_samples - len(differences),
        max_logprob_difference=largest,
        tolerance=tolerance,
        differences=tuple(differences),
        num_beyond=sum(difference.is_beyond for difference in differences),
        num_logprobs=num_logprobs,
    )


def _loaded(directory: str | Path) -> Any:
    """Load the exported model in float32, as a CLIP model or an image classifier of transformers."""
    from transformers import AutoConfig, AutoModelForImageClassification, CLIPModel

    is_clip = AutoConfig.from_pretrained(directory).model_type == "clip"
    loader = CLIPModel if is_clip else AutoModelForImageClassification
    return loader.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()


def _classifier(
    model: Any, directory: Path, head: TaskHead, evaluator: ImageEvaluator
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make the function that maps preprocessed images to the logits of a task's classes.

    `model` is the exported model, `directory` has the export, and `head` is the task's classification head. A zero-shot
    head is computed from the names of classes by a text tower: that of the expert to which the head belongs, or that of
    the export if it belongs to none.
    """
    if head.templates is None:
        found = load_file(directory / HEADS_DIR / f"{head.alias}.safetensors")
        weight, bias = found["classifier.weight"].float(), found["classifier.bias"].float()
        model.classifier = torch.nn.Linear(weight.shape[1], weight.shape[0])
        model.classifier.load_state_dict({"weight": weight, "bias": bias})
        return lambda batch: cast(torch.Tensor, model(pixel_values=batch).logits)
    assert head.labels is not None
    own = evaluator.checkpoint_of(head)
    place, projection = directory, model.visual_projection
    if own is not None:
        place, projection = own.directory, _projection(own, evaluator.dtype)
    classes = class_embeddings(place, head.labels, head.templates, dtype=evaluator.dtype)

    def logits(batch: torch.Tensor) -> torch.Tensor:
        seen = projection(model.vision_model(pixel_values=batch).pooler_output)
        return cast(torch.Tensor, seen / seen.norm(dim=-1, keepdim=True)) @ classes.T

    return logits


def _projection(checkpoint: Checkpoint, dtype: str) -> torch.nn.Module:
    weight = checkpoint.read(PROJECTION).to(getattr(torch, dtype)).float()
    made = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.load_state_dict({"weight": weight})
    return made


@torch.inference_mode()
def _logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor], pixels: Pixels, prepared: PreparedTask, positions: range
) -> torch.Tensor:
    """Compute the log-probabilities [num_images, num_classes] of a task's classes for the images at `positions`.

    `logits` is the function that maps preprocessed images to logits, and `pixels` preprocesses the images of the task
    `prepared`. The positions are indices in the order of scoring.
    """
    found = [torch.empty(0, prepared.head.num_classes)]
    for start in range(positions.start, positions.stop, BATCH):
        batch = pixels.of(prepared.task, range(start, min(start + BATCH, positions.stop)))
        found.append(logits(batch).log_softmax(-1))
    return torch.cat(found)


def _compare(
    stored: SampleResult, logprobs: torch.Tensor, prepared: PreparedTask, tolerance: float
) -> tuple[float, SampleDifference | None]:
    """Compare a stored sample with the log-probabilities that transformers computes for its image.

    Returns two values. The first is the largest absolute difference between a stored log-probability and transformers'
    log-probability of the same class. The second describes how the sample differs, or is None if it does not differ.

    If the engine and transformers find different classes likeliest, rounding explains this only if transformers'
    log-probabilities of the two classes differ by at most `tolerance`.
    """
    top = Response.from_json(stored.response).top
    outputs = {name: output for output, name in enumerate(prepared.names)}
    own = float(logprobs.max())
    ranked = torch.sort(logprobs, descending=True, stable=True).indices.tolist()
    value = value_of(prepared, stored.position, logprobs)
    gaps = [abs(float(logprobs[outputs[name]]) - logprob) for name, logprob in top]
    apart = max((gap if gap == gap else FAR for gap in gaps), default=FAR)
    behind = own - float(logprobs[outputs[top[0][0]]]) if top else FAR
    what = ""
    if not top or outputs[top[0][0]] != ranked[0]:
        what, size = "class", min(behind, FAR)
    elif apart > tolerance:
        what, size = "log-probabilities", min(apart, FAR)
    elif prepared.task.is_entropy:
        if not (size := abs(value - stored.value)) <= tolerance:
            what, size = "value", min(size, FAR)
    elif value != stored.value:
        what, size = "value", min(_gap_at(logprobs, ranked, prepared.task.num_largest), FAR)
    if not what:
        return apart, None
    difference = SampleDifference(
        objective=stored.objective,
        position=stored.position,
        engine=stored.value,
        reference=value,
        top2_gap=size,
        what=what,
        is_beyond=size > tolerance or apart > tolerance,
    )
    return apart, difference


def _gap_at(logprobs: torch.Tensor, ranked: Sequence[int], count: int) -> float:
    """Gap in log-probability between the class at rank `count` and the class at the next rank.

    `ranked` has the classes in descending order of log-probability. The first `count` classes are the model's answer,
    so a small gap means that rounding can change the metric. The result is FAR, a very large number, if there is no
    next rank.
    """
    if count >= len(ranked):
        return FAR
    return float(logprobs[ranked[count - 1]] - logprobs[ranked[count]])
