"""Tiny model families with random weights, as complete Hugging Face folders: real input, made in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workers.models.family import open_family
from workers.types import Family

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

# Texts from which the byte-level tokenizer learns its merges.
TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "what is the sum of twelve and thirty? the answer is forty two.",
    "name: Ada, city: Paris; name: Grace, city: New York",
    "12 + 34 = 46\n100 - 1 = 99\n",
]


def tiny_llama(
    directory: str | Path,
    seed: int = 0,
    *,
    tied: bool = True,
    layers: int = 2,
    hidden: int = 32,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A Llama with a character tokenizer that adds a beginning-of-text token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": 128,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(1, hidden // 32),  # vLLM's CPU attention has no kernel for smaller heads
        "num_key_value_heads": max(1, hidden // 32),
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = with_random_norms_and_biases(LlamaForCausalLM(LlamaConfig(**(settings | config))))
    return save(model.to(dtype), character_tokenizer(), directory)


def tiny_qwen2(
    directory: str | Path,
    seed: int = 0,
    *,
    tied: bool = True,
    layers: int = 3,
    hidden: int = 64,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A Qwen2: grouped-query attention, biases on q, k and v, and a byte-level BPE tokenizer without a BOS token."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = byte_tokenizer()
    settings = {
        "vocab_size": 384,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model = with_random_norms_and_biases(Qwen2ForCausalLM(Qwen2Config(**(settings | config))))
    return save(model.to(dtype), tokenizer, directory)


# Words that the tokenizer of `tiny_bert` knows, beside single letters and the ends of words.
BERT_WORDS = (
    "classify sentence text review positive negative question answer content rate judge label decide movie good bad "
    "as whether this the is or following please respond with task ##s ##ing ##fy senti ##ment"
)


def tiny_bert(directory: str | Path, seed: int = 0, *, hidden: int = 32, **config: Any) -> Path:
    """A BERT for masked tokens, with a WordPiece tokenizer of a few words and all letters."""
    from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*special, *BERT_WORDS.split(), *letters, *(f"##{letter}" for letter in letters), *",.:'{}?"]
    settings = {
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    model = BertForMaskedLM(BertConfig(**(settings | config)))
    return save(model, BertTokenizerFast(vocab={token: i for i, token in enumerate(tokens)}), directory)


def tiny_family(
    directory: str | Path,
    *,
    build: Callable[..., Path] = tiny_llama,
    experts: tuple[str, ...] = ("math", "text", "lookup"),
    noise: float = 0.02,
    seed: int = 0,
    **settings: Any,
) -> Family:
    """Write a base, and experts that are the base plus normal noise, to `directory`/ALIAS; `settings` go to `build`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root = Path(directory)
    base_dir = build(root / "base", seed, **settings)
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    for number, alias in enumerate(experts, start=1):
        model = AutoModelForCausalLM.from_pretrained(base_dir, dtype="auto")
        generator = torch.Generator().manual_seed(1000 * seed + number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += noise * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        save(model, tokenizer, root / alias)
    return open_family(base_dir, {alias: root / alias for alias in experts}, cache=root / "cache")


def opposed_family(directory: str | Path, **settings: Any) -> Family:
    """A family of two experts, math and text, whose task vectors are nearly opposite: their cosine is about -0.99."""
    from safetensors.torch import load_file, save_file

    family = tiny_family(directory, experts=("math", "text"), **settings)
    files = [Path(model.directory) / "model.safetensors" for model in family.models]
    base, math, text = map(load_file, files)
    opposed = {name: base[name] - (math[name] - base[name]) + 0.14 * (text[name] - base[name]) for name in base}
    save_file(opposed, files[2], {"format": "pt"})
    experts = {expert.alias: expert.directory for expert in family.experts}
    return open_family(family.base.directory, experts, cache=Path(directory) / "cache")


def character_tokenizer() -> Any:
    """A tokenizer with one token per printable character, which begins every text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for character in CHARACTERS:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def byte_tokenizer() -> Any:
    """A byte-level BPE tokenizer in the form that transformers gives to every Qwen2 folder."""
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(learner.to_str())["model"]
    return Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(merge) for merge in model["merges"]])


def with_random_norms_and_biases(model: Any) -> Any:
    """Give norms and biases random values: in a new model they are 1 and 0, which would hide mistakes about them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def save(model: Any, tokenizer: Any, directory: str | Path) -> Path:
    """Write a complete Hugging Face folder, and return its path."""
    path = Path(directory)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def lora_adapter(
    base_dir: str | Path, directory: str | Path, seed: int = 0, *, scale: float = 0.1, **config: Any
) -> Any:
    """Write a PEFT LoRA adapter of the model in `base_dir`, with random weights; `config` goes to LoraConfig.

    Returns peft's model, not merged.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype="auto")
    model = get_peft_model(base, LoraConfig(**(settings | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += scale * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    model.save_pretrained(directory)
    return model


def with_tokens(
    base_dir: str | Path,
    directory: str | Path,
    *tokens: str,
    seed: int = 1,
    rows: int | None = None,
    noise: float = 0.02,
) -> Path:
    """Copy a model with random noise on its weights, and with `tokens` added to its tokenizer.

    Its embedding has `rows` rows; None: one for each token.
    """
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
    model = AutoModelForCausalLM.from_pretrained(base_dir, dtype="auto")
    model.resize_token_embeddings(rows or len(tokenizer), mean_resizing=False)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return save(model, tokenizer, directory)
