"""Zero-shot heads of CLIP: equal to transformers' own similarities, and to the published mean over templates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPModel, CLIPVisionModel, PreTrainedTokenizerFast

from workers.errors import InvalidTask
from workers.models.zero_shot import check_templates, class_embeddings, prompts_of

WORDS = ("<pad>", "<start>", "<end>", "a", "photo", "of", "the", "cat", "dog", "sea", "ice", ".")
CLASSES = ("cat", "dog", "sea_ice")
TEMPLATES = ("a photo of a {}.", "the {}.")


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<start>", eos_token="<end>")


def clip_config() -> CLIPConfig:
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 16, "max_position_embeddings": 12, "bos_token_id": 1, "eos_token_id": 2}
    return CLIPConfig(
        text_config={**text, "pad_token_id": 0},
        vision_config={**tower, "image_size": 28, "patch_size": 7},
        projection_dim=16,
    )


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("clip")
    CLIPModel(clip_config()).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def test_one_template_gives_the_similarities_of_transformers(clip: Path) -> None:
    """With one template, the head's outputs for images are `logits_per_image` of the whole model."""
    model = CLIPModel.from_pretrained(clip)
    images = torch.randn(5, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        texts = [texts[0] for texts in prompts_of(CLASSES, TEMPLATES[:1])]
        wanted = model(**tokenizer()(texts, padding=True, return_tensors="pt"), pixel_values=images).logits_per_image
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
                tokens = tokenizer()([template.format(name)], return_tensors="pt")
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
    with pytest.raises(InvalidTask, match="reads at most 12 tokens, and a prompt such as .* has 14"):
        class_embeddings(clip, ("cat",), ("the photo of a photo of a photo of a photo {}",))


def test_a_vision_tower_alone_is_refused(tmp_path: Path) -> None:
    CLIPVisionModel(clip_config().vision_config).save_pretrained(tmp_path)
    with pytest.raises(InvalidTask, match="no text tower"):
        class_embeddings(tmp_path, CLASSES, TEMPLATES)
