"""Prompts of completions: BOS, chat templates, system messages, and the limit by the model's context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama
from tests.workers.serving.test_replica_faults import recipe
from workers.errors import InvalidPrompt
from workers.evaluation.prompts import Generation, Prompts
from workers.serving.completion_prompts import generation_of
from workers.serving.completions import CompletionRequest

HELLO = ({"role": "user", "content": "2+3"},)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
STRICT = "{{ raise_exception('no system messages') if messages[0].role == 'system' }}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def prompts_of(model: Path, template: Any = None, **options: Any) -> Prompts:
    prompts = Prompts(str(model), EngineOptions(max_model_len=32, **options))
    prompts.tokenizer.chat_template = template
    return prompts


def generation(prompts: Prompts, **request: Any) -> Generation:
    return generation_of(CompletionRequest(recipe(0.3), **request), prompts)


def text(prompts: Prompts, found: Generation) -> str:
    return str(prompts.tokenizer.decode(found.tokens, skip_special_tokens=False))


def test_text_has_one_bos(model: Path) -> None:
    """A text is tokenized as the scorer does it; token ids are taken as they are."""
    prompts = prompts_of(model)
    assert list(generation(prompts, prompt="2+3").tokens) == prompts.encode("2+3")
    assert generation(prompts, prompt=(1, 2, 3)).tokens == (1, 2, 3)
    with pytest.raises(InvalidPrompt, match="is no token") as caught:
        generation(prompts, prompt=(1, 10**6))
    assert caught.value.field == "prompt"


def test_chat_is_rendered_with_the_template(model: Path) -> None:
    """The template ends where the answer begins; a BOS that it writes is not repeated."""
    prompts = prompts_of(model, TEMPLATE)
    found = generation(prompts, messages=HELLO)
    bos = prompts.tokenizer.bos_token
    assert text(prompts, found).replace(" ", "") == f"{bos}u2+3;a"
    assert list(found.tokens).count(prompts.tokenizer.bos_token_id) == 1


def test_system_prompt_of_the_study_comes_first(model: Path) -> None:
    """The study's system prompt is put before a chat that has no system message."""
    prompts = prompts_of(model, TEMPLATE, system_prompt="7")
    assert "s7;u2+3;a" in text(prompts, generation(prompts, messages=HELLO)).replace(" ", "")
    own = ({"role": "system", "content": "9"}, *HELLO)
    assert "s9;u2+3;a" in text(prompts, generation(prompts, messages=own)).replace(" ", "")


def test_template_that_the_study_names_is_used(model: Path) -> None:
    prompts = prompts_of(model, {"default": TEMPLATE, "short": "{{ messages[0].content }}"}, chat_template="short")
    assert "a" not in text(prompts, generation(prompts, messages=HELLO)).removeprefix(prompts.tokenizer.bos_token)


@pytest.mark.parametrize(
    ("template", "request_", "field", "message"),
    [
        (None, {"messages": HELLO}, "messages", "no chat template, which chat completions need; .* /completions"),
        (STRICT, {"messages": ({"role": "system", "content": "x"},)}, "messages", "refuses these messages: no system"),
        (None, {"prompt": "1" * 40}, "prompt", "has 41 tokens, but the context has 32"),
        (None, {"prompt": "1+2", "max_tokens": 29}, "max_tokens", "29 is too large: .* give at most 28"),
    ],
)
def test_prompts_that_cannot_be_completed(
    model: Path, template: Any, request_: dict[str, Any], field: str, message: str
) -> None:
    """The error names the field, and says what is accepted."""
    with pytest.raises(InvalidPrompt, match=message) as caught:
        generation(prompts_of(model, template), **request_)
    assert caught.value.field == field


def test_completion_may_fill_the_context(model: Path) -> None:
    """Without a number of tokens, the completion has all the room that the context has."""
    assert generation(prompts_of(model), prompt="1+2").max_tokens == 28
    assert generation(prompts_of(model), prompt="1+2", max_tokens=28).max_tokens == 28
