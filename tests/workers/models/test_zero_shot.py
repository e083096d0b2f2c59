"""Zero-shot heads of CLIP equal transformers' own similarities, and the published mean over templates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CLIPModel

from tests.vision import clip_tokenizer, tiny_clip
from workers.errors import InvalidTask
from workers.models.zero_shot import check_templates, class_embeddings, prompts_of

CLASSES = ("cat", "dog", "sea_ice")
TEMPLATES = ("a photo of a {}.", "the {}.")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


def test_one_template_gives_the_similarities_of_transformers(clip: Path) -> None:
    """With one template, the head's outputs for images are `logits_per_image` of the whole model."""
    model = CLIPModel.from_pretrained(clip)
    images = torch.randn(5, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        texts = [texts[0] for texts in prompts_of(CLASSES, TEMPLATES[:1])]
        wanted = model(
            **clip_tokenizer()(texts, padding=True, return_tensors="pt"), pixel_values=images
        ).logits_per_image
        seen = model.get_image_features(images).pooler_output
        found = (seen / seen.norm(dim=-1, keepdim=True)) @ class_embeddings(clip, CLASSES, TEMPLATES[:1]).T
    assert wanted.std() > 0.01
    torch.testing.assert_close(found, wanted)


def test_embeddings_are_normalised_before_and_after_their_mean(clip: Path) -> None:
    """The published construction, written out: normalise each text, average over templates, normalise the mean."""
    model = CLIPModel.from_pretrained(clip)
    rows = []
    with torch.inference_mode():
        for name in ("cat", "dog", "sea ice"):
            features = []
            for template in TEMPLATES:
                tokens = clip_tokenizer()([template.format(name)], return_tensors="pt")
                hidden = model.text_projection(model.text_model(**tokens).pooler_output)[0]
                features.append(hidden / hidden.norm())
            mean = sum(features) / len(features)
            rows.append(mean / mean.norm())
        wanted = torch.stack(rows) * model.logit_scale.exp()
    torch.testing.assert_close(class_embeddings(clip, CLASSES, TEMPLATES), wanted)


@pytest.mark.parametrize(
    ("templates", "message"),
    [((), "at least one"), (("a photo.",), "0 times"), (("{} and {}",), "2 times")],
)
def test_templates_that_do_not_name_the_class_once_are_refused(templates: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidTask, match=message):
        check_templates(templates, where="pets")


def test_a_prompt_longer_than_the_tower_reads_is_refused(clip: Path) -> None:
    with pytest.raises(InvalidTask, match=r"reads at most 12 tokens, and a prompt such as .* has 14"):
        class_embeddings(clip, ("cat",), ("the photo of a photo of a photo of a photo {}",))


def test_a_vision_tower_alone_is_refused(tmp_path: Path) -> None:
    tiny_clip(tmp_path, kind="CLIPVisionModel")
    with pytest.raises(InvalidTask, match="no text tower"):
        class_embeddings(tmp_path, CLASSES, TEMPLATES)
