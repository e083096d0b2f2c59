"""Reader of a LoRA adapter's adapter_config.json, for the settings that merging needs."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ADAPTER_CONFIG", "Settings", "read_settings"]

ADAPTER_CONFIG = "adapter_config.json"

# Settings that change the weights in another way than B A does, and how.
UNSUPPORTED = {
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it acts on some tokens only",
    "use_qalora": "QA-LoRA pools its inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA scales its ranks",
    "monteclora_config": "MonteCLoRA samples its weights",
}

# Initialisations that leave the base unchanged; others subtract the initial adapter from it.
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")

EMBEDDING_MODULES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")


@dataclass(frozen=True)
class Settings:
    """Settings in a LoRA adapter's adapter_config.json that merging needs.

    If adapter_config.json has another name for a setting, this name is in parentheses.

    - `r`: the rank of the LoRA matrices
    - `alpha` (`lora_alpha`): a number from which the factor of the matrices' product is computed (method `scaling`)
    - `ranks`, `alphas` (`rank_pattern`, `alpha_pattern`): other ranks and alphas for modules, by regular expressions
      for the end of a module's name
    - `is_rank_stabilized` (`use_rslora`): whether the factor is alpha / sqrt(rank) instead of alpha / rank
    - `whole_modules` (`modules_to_save`): modules that were trained as whole tensors
    - `ties_weights` (`ensure_weight_tying`): whether tied embedding and output head were trained as one tensor
    - `stated_base`: the base model as the file states it; "" if the file states none
    - `tokens` (`trainable_token_indices`): the ids of tokens whose rows were trained individually, keyed by embedding
      module
    - `parameters` (`target_parameters`): parameters, not modules, that the adapter changes
    - `is_dora` (`use_dora`): whether the adapter has magnitudes (DoRA)
    - `has_biases` (`lora_bias`): whether matrices B have biases
    """

    r: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    whole_modules: tuple[str, ...]
    ties_weights: bool
    stated_base: str
    tokens: Mapping[str, tuple[int, ...]]
    parameters: tuple[str, ...]
    is_dora: bool
    has_biases: bool

    def token_numbers(self, module: str) -> tuple[int, ...]:
        """Ids of the tokens whose rows in the embedding `module` were trained; empty if there are none.

        In adapter_config.json, the key `trainable_token_indices` has these ids.
        """
        fitting = (numbers for name, numbers in self.tokens.items() if f".{module}".endswith(f".{name}"))
        return next(fitting, ())

    def rank(self, module: str) -> int:
        return self.ranks.get(_pattern(self.ranks, module), self.r)

    def scaling(self, module: str) -> float:
        """Factor of the product of a module's LoRA matrices: alpha / rank, or alpha / sqrt(rank) if rank-stabilised.

        alpha is a setting of the adapter. Rank-stabilised adapters (arXiv:2312.03732) have the setting `use_rslora` in
        adapter_config.json.
        """
        rank = self.rank(module)
        return self.alphas.get(_pattern(self.alphas, module), self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """First regular expression in `patterns` that matches at the end of the name `module`; "" if none does."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), "")


def read_settings(path: Path, problems: list[str]) -> Settings | None:
    """Read a LoRA adapter's settings from adapter_config.json in the directory `path`.

    All problems are appended to `problems`. Returns None if the file cannot be read or does not describe a plain LoRA
    adapter.
    """
    file = path / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file}: cannot be read as JSON: {error}")
        return None
    if not isinstance(config, dict):
        problems.append(f"{file}: holds a {type(config).__name__}; expected an object")
        return None
    if (kind := config.get("peft_type")) != "LORA":
        problems.append(f"{file}: an adapter of peft_type {kind!r}; only LORA is merged")
        return None
    plain = "only plain LoRA adapters are merged"
    wrong = [f"{key} is set: {meaning}; {plain}" for key, meaning in UNSUPPORTED.items() if config.get(key)]
    beginning = config.get("init_lora_weights")
    if beginning not in PLAIN_BEGINNINGS:
        wrong.append(f"init_lora_weights is {beginning!r:.80}, which changes the base; {plain}: convert it with peft")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    modules = config.get("modules_to_save") or []
    r, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if not _is_rank(r):
        wrong.append(f"r is {r!r:.80}; expected a whole number from 1")
    if not _is_number(alpha):
        wrong.append(f"lora_alpha is {alpha!r:.80}; expected a number")
    if not _are_patterns(ranks, _is_rank):
        wrong.append(f"rank_pattern is {ranks!r:.80}; expected ranks by regular expressions")
    if not _are_patterns(alphas, _is_number):
        wrong.append(f"alpha_pattern is {alphas!r:.80}; expected numbers by regular expressions")
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        wrong.append(f"modules_to_save is {modules!r:.80}; expected a list of names")
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(parameter, str) for parameter in parameters):
        wrong.append(f"target_parameters is {parameters!r:.80}; expected a list of names")
    tokens = config.get("trainable_token_indices") or {}
    # PEFT finds the embedding by itself where only numbers are given.
    of_modules = tokens if isinstance(tokens, dict) else dict.fromkeys(EMBEDDING_MODULES, tokens)
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in of_modules.values()):
        wrong.append(f"trainable_token_indices is {tokens!r:.80}; expected numbers of tokens, by module or alone")
    problems += [f"{file}: {problem}" for problem in wrong]
    if wrong:
        return None
    return Settings(
        r=r,
        alpha=float(alpha),
        ranks=ranks,
        alphas=alphas,
        is_rank_stabilized=bool(config.get("use_rslora")),
        whole_modules=tuple(modules),
        ties_weights=bool(config.get("ensure_weight_tying")),
        stated_base=str(config.get("base_model_name_or_path") or ""),
        parameters=tuple(parameters),
        tokens={str(module): tuple(numbers or ()) for module, numbers in of_modules.items()},
        is_dora=bool(config.get("use_dora")),
        has_biases=bool(config.get("lora_bias")),
    )


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _are_patterns(value: Any, is_right: Callable[[Any], bool]) -> bool:
    try:
        return isinstance(value, dict) and all(re.compile(key) and is_right(entry) for key, entry in value.items())
    except re.error:
        return False
