"""Chat templates of models, and published chat formats by name.

This module renders no templates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["NAMED", "most_common", "stated_template", "write_template"]

FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"

_TURNS = "{% for message in messages %}"
_EACH = _TURNS + "{% set content = message['content'] | trim %}"

# Formats as their authors describe them.
NAMED: Mapping[str, str] = {
    "alpaca": (
        _EACH + "{% if message['role'] == 'user' %}{{ '\n\n### Instruction:\n' + content }}"
        "{% elif message['role'] == 'assistant' %}{{ '\n\n### Response:\n' + content }}"
        "{% else %}{{ content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
    ),
    "chatml": (
        _TURNS + "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "exaone": (
        "{% if not messages or messages[0]['role'] != 'system' %}{{ '[|system|][|endofturn|]\n' }}{% endif %}"
        + _EACH
        + "{{ '[|' + message['role'] + '|]' + content }}"
        "{% if message['role'] != 'user' %}{{ '[|endofturn|]' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}" + _EACH + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{ content + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{% set state = namespace(system='') %}{{ bos_token }}"
        + _TURNS
        + "{% if message['role'] == 'system' %}{% set state.system = message['content'] + '\n\n' %}"
        "{% elif message['role'] == 'user' %}{{ ' [INST] ' + state.system + message['content'] + ' [/INST]' }}"
        "{% set state.system = '' %}"
        "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
}


def stated_template(directory: Path) -> str | None:
    """Default chat template of the model in `directory`; None if the model has none, or if its files cannot be read."""
    try:
        file = directory / FILE
        if file.is_file():
            return file.read_text()
        found = json.loads((directory / TOKENIZER_CONFIG).read_text()).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def most_common(directories: Iterable[Path]) -> str | None:
    """Most common chat template among the models in `directories`; None if no model has one.

    If several templates are equally common, the first template is chosen.
    """
    stated = (template.strip() for directory in directories if (template := stated_template(directory)))
    return next((template for template, _ in Counter(stated).most_common(1)), None)


def write_template(directory: Path, template: str) -> None:
    """Make `template` the chat template of the tokenizer in `directory`.

    Templates in tokenizer_config.json are removed.
    """
    (directory / FILE).write_text(template)
    file = directory / TOKENIZER_CONFIG
    if file.is_file():
        config: dict[str, Any] = json.loads(file.read_text())
        if config.pop("chat_template", None) is not None:
            file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
