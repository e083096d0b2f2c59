"""Zero-shot heads of CLIP, whose weights are embeddings of the class names, computed once by the text tower.

The construction follows Radford et al. 2021 (section 3.1.4, "Prompt engineering and ensembling"). Each template is a
text with a placeholder for the class's name. The texts of a class are embedded; the embeddings are normalised, averaged
over templates, and normalised again. The head's output for an image and a class is the cosine of their embeddings,
times the model's `logit_scale`. The text tower is not merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.errors import InvalidModel, InvalidTask
from workers.models.headers import read_headers

if TYPE_CHECKING:
    import torch

__all__ = ["CLASS", "check_prompts", "check_templates", "class_embeddings", "prompts_of"]

CLASS = "{}"  # where a template has the name of the class
BATCH = 256
TEXT_TOWER = "text_model."  # the beginning of names of its tensors
VOCABULARIES = ("tokenizer.json", "vocab.json")  # files with the words of CLIP's tokenizer


def check_templates(templates: Sequence[str], *, where: str) -> None:
    """Raise InvalidTask if there are no templates, or if a template does not contain {} exactly once."""
    if not templates:
        raise InvalidTask(
            f"{where}: has no templates; give at least one, such as 'a photo of a {CLASS}.'", "task.templates"
        )
    for template in templates:
        if template.count(CLASS) != 1:
            raise InvalidTask(
                f"{where}: the template {template!r} has {CLASS} {template.count(CLASS)} times; expected once, where "
                "the name of the class belongs",
                "task.templates",
            )


def prompts_of(classes: Sequence[str], templates: Sequence[str]) -> list[list[str]]:
    """For each of `classes`, the texts that describe it: all templates, with the class's name in place of {}.

    Underscores in names are replaced by spaces.
    """
    return [[template.replace(CLASS, name.replace("_", " ")) for template in templates] for name in classes]


def check_prompts(model: str | Path, classes: Sequence[str], templates: Sequence[str]) -> None:
    """Check that the CLIP model in the directory `model` can embed class names, without reading weights.

    `templates` are the texts with the placeholder {} for a class's name. Raises InvalidModel if the model has no text
    tower, and InvalidTask if it has no tokenizer, or if a prompt is longer than the tower reads.
    """
    from transformers import AutoConfig

    names = read_headers(Path(model), [], is_needed=lambda _: False)
    if not any(name.startswith(TEXT_TOWER) for name in names):
        raise InvalidModel((f"{model}: has no text tower, which embeds the names of classes; take a whole CLIP model",))
    tokenizer = _tokenizer(model)
    longest = AutoConfig.from_pretrained(model, trust_remote_code=False).text_config.max_position_embeddings
    for texts in prompts_of(classes, templates):
        for text in texts:
            _check_length(model, texts=[text], length=len(tokenizer(text)["input_ids"]), longest=longest)


def class_embeddings(
    model: str | Path, classes: Sequence[str], templates: Sequence[str], *, dtype: str = "float32"
) -> torch.Tensor:
    """Embed class names with the text tower of the CLIP model in the directory `model`, in float32 on the CPU.

    `templates` are the texts with the placeholder {} for a class's name. The tower's weights are first rounded to
    `dtype`, because an export in this dtype has rounded weights.

    Returns:
        Normalised embeddings times the model's logit scale, [num_classes, projection_dim].

    Raises:
        InvalidTask: The model's files have no text tower or no tokenizer, or a prompt is longer than the tower reads.
    """
    import torch
    from transformers import CLIPModel

    try:
        tower, report = CLIPModel.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidTask(f"{model}: its text tower cannot be loaded: {error}") from error
    tower = tower.to(getattr(torch, dtype)).float()
    if missing := sorted(name for name in report["missing_keys"] if name.startswith("text")):
        raise InvalidTask(f"{model}: has no text tower ({missing[0]} is missing); take a whole CLIP model as base")
    tokenizer = _tokenizer(model)
    longest = tower.config.text_config.max_position_embeddings
    embedded = []
    with torch.inference_mode():
        for texts in prompts_of(classes, templates):
            features = []
            for start in range(0, len(texts), BATCH):
                batch: Mapping[str, torch.Tensor] = tokenizer(
                    texts[start : start + BATCH], padding=True, return_tensors="pt"
                )
                _check_length(model, texts=texts[start:], length=batch["input_ids"].shape[1], longest=longest)
                features.append(tower.get_text_features(**batch).pooler_output)
            each = torch.cat(features)
            mean = (each / each.norm(dim=-1, keepdim=True)).mean(dim=0)
            embedded.append(mean / mean.norm())
        heads: torch.Tensor = torch.stack(embedded) * tower.logit_scale.exp()
    return heads.clone()  # outside inference mode, so that losses on its logits have gradients


def _tokenizer(model: str | Path) -> Any:
    """Load the tokenizer of the model in the directory `model`. Raises InvalidTask if there is none."""
    from transformers import AutoTokenizer

    if not any((Path(model) / name).is_file() for name in VOCABULARIES):  # transformers would make one without words
        raise InvalidTask(
            f"{model}: has no tokenizer, which zero-shot heads need; expected {' or '.join(VOCABULARIES)}"
        )
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidTask(f"{model}: its tokenizer cannot be loaded: {error}") from error


def _check_length(model: str | Path, *, texts: Sequence[str], length: int, longest: int) -> None:
    """Raise InvalidTask if prompts of `length` tokens are longer than the text tower of `model` reads.

    The tower reads at most `longest` tokens; the message has the first of the prompts `texts`.
    """
    if length > longest:
        raise InvalidTask(
            f"{model}: reads at most {longest} tokens, and a prompt such as {texts[0]!r} has {length}; shorten the "
            "templates or the names of classes",
            "task.templates",
        )
