"""Attention within each document of a packed row, which computes nothing for pairs of tokens of different documents.

Transformers' own attention hides such pairs by a mask [rows, 1, length, length], but computes all pairs. Here, a GPU
computes all documents in one call of PyTorch's variable-length attention, which needs 16-bit activations, and a CPU
computes each document separately. Some models keep their own attention, for example models with sliding windows shorter
than a row, soft-capped attention logits, or ALiBi biases.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.training.finetuning.models import PROBE, ROUNDING

__all__ = ["DOCUMENTS", "document_bounds", "use_document_attention", "within_documents"]

log = logging.getLogger(__name__)

# The name under which transformers knows this attention, and its own attention, which is used outside of training.
DOCUMENTS, DEFAULT = "mergesearch_documents", "sdpa"

# Head sizes that PyTorch's variable-length attention takes.
MOST_HEAD_SIZE = 256

# The largest difference of two kernels in 16 bits, relative to the largest element.
KERNEL_ROUNDING = 0.05

# Configuration keys of attention that this one does not compute; a value of None or 0 means without.
UNSUPPORTED = ("attn_logit_softcapping", "attention_chunk_size", "alibi", "position_embedding_type")

_makes_no_mask: ContextVar[bool] = ContextVar("makes_no_mask", default=False)


def use_document_attention(
    model: Any, *, max_length: int, device: torch.device, dtype: torch.dtype, called: Any = None
) -> bool:
    """Let `model` compute attention within documents if its logits stay the same; return whether it does.

    The logits of a row of two documents are computed with both attentions. If they differ by more than rounding, or the
    new attention fails, the model keeps its own attention. Later the new attention is used only in calls whose inputs
    have the bounds of documents (function `document_bounds`), and not in evaluations.

    `model` is a transformers or peft model. If it has shards, `called` is the wrapper that calls it on all ranks
    together; otherwise `called` is the model itself or None. `max_length` is the largest number of tokens of a row,
    `device` is the model's device, and `dtype` is the dtype of activations.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    if reason := _lack(causal.config, max_length=max_length, device=device, dtype=dtype):
        log.info("packed rows are computed with masks: %s", reason)
        return False

    def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        return None if _makes_no_mask.get() else sdpa_mask(*args, **kwargs)

    AttentionInterface.register(DOCUMENTS, _attention)
    AttentionMaskInterface.register(DOCUMENTS, mask)
    called = model if called is None else called
    was_training = model.training
    model.eval()
    own, _ = _probe(called, causal.config, device, dtype, has_bounds=False)
    causal.set_attn_implementation(DOCUMENTS)
    try:
        if device.type == "cuda":
            _check_kernel(causal.config, device, dtype)
        found, spread = _probe(called, causal.config, device, dtype, has_bounds=True)
        difference = float((found - own).abs().max())
        if difference <= ROUNDING[dtype] * spread:
            return True
        reason = f"its logits differ by {difference:.2g}"
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
    finally:
        model.train(was_training)
    causal.set_attn_implementation(DEFAULT)
    log.warning("packed rows are computed with masks, because attention within documents does not fit: %s", reason)
    return False


def _check_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Compare PyTorch's variable-length attention of several documents with the attention of each document alone.

    Outputs and gradients are compared. `config`, the model's configuration, has the number and the size of attention
    heads. Raises RuntimeError if the results differ by more than rounding.
    """
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    bounds = document_bounds(torch.cat([torch.arange(PROBE), torch.arange(2 * PROBE)])[None])
    given: dict[str, Any] = {
        "bounds": bounds["cu_seq_lens_q"].to(device),
        "longest": bounds["max_length_q"],
        "dropout": 0.0,
        "scaling": None,
    }
    results = []
    for compute in (_in_one_launch, _one_by_one):
        draw = torch.Generator().manual_seed(0)
        tensors = [
            torch.randn(3 * PROBE, count, size, generator=draw).to(device, dtype).requires_grad_()
            for count in (heads, groups or heads, groups or heads)
        ]
        output = compute(*tensors, **given)
        gradients = torch.autograd.grad(output, tensors, torch.ones_like(output))
        results.append([output.detach(), *gradients])
    for what, ours, theirs in zip(("output", "query", "key", "value"), *results, strict=True):
        difference = float((ours - theirs).float().abs().max())
        if not difference <= KERNEL_ROUNDING * float(theirs.float().abs().max()):
            name = "outputs" if what == "output" else f"gradients of the {what}"
            raise RuntimeError(f"{name} of variable-length attention differ by {difference:.2g}")


@torch.no_grad()
def _probe(
    called: Any, config: Any, device: torch.device, dtype: torch.dtype, *, has_bounds: bool
) -> tuple[torch.Tensor, float]:
    """Compute the logits of a row of two documents of different lengths, and the standard deviation of the logits.

    `called` is the model, whose configuration is `config`. `has_bounds` says whether the model gets the bounds of the
    documents, and so computes attention within documents.
    """
    tokens = torch.arange(3 * PROBE, device=device)[None] % config.get_text_config().vocab_size
    positions = torch.cat([torch.arange(PROBE), torch.arange(2 * PROBE)]).to(device)[None]
    bounds = document_bounds(positions) if has_bounds else {}
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=dtype is torch.bfloat16),
        within_documents() if has_bounds else nullcontext(),
    ):
        logits = called(input_ids=tokens, position_ids=positions, use_cache=False, **bounds).logits.float()
    return logits, float(logits.std())


def _lack(config: Any, *, max_length: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a model with the configuration `config` cannot use attention within documents; None if it can."""
    if config._attn_implementation != DEFAULT:
        return f"its attention is {config._attn_implementation}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of the kind {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_length and getattr(config, "use_sliding_window", True):
        return f"it attends to {window} tokens, fewer than a row has"
    if used := [key for key in UNSUPPORTED if getattr(config, key, None)]:
        return f"its configuration has {used[0]}"
    if device.type == "cuda":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if dtype not in (torch.bfloat16, torch.float16):
            return "variable-length attention on GPUs needs activations in 16 bits"
        if size > MOST_HEAD_SIZE or size % 8:
            return f"variable-length attention has no kernel for heads of {size}"
    return None


def document_bounds(positions: torch.Tensor) -> dict[str, Any]:
    """Find the bounds of the documents in packed rows, as inputs for a transformers model.

    `positions` [rows, length] has the positions of the tokens, which restart at 0 with each document. The rows are
    joined to one sequence of tokens. The padding at the end of a row counts as a document. The keys of the result are
    transformers' names for variable-length attention. `cu_seq_lens_q` and `cu_seq_lens_k` are the starts of the
    documents, followed by the number of all tokens (int32). `max_length_q` and `max_length_k` are the number of tokens
    of the longest document.
    """
    starts = (positions.flatten() == 0).nonzero()[:, 0]
    bounds = torch.cat([starts, starts.new_tensor([positions.numel()])]).to(torch.int32)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


@contextmanager
def within_documents() -> Iterator[None]:
    """Context manager in which models with attention within documents make no attention masks.

    Calls of the model in this context must have the bounds of documents (function `document_bounds`) among their
    inputs.
    """
    token = _makes_no_mask.set(True)
    try:
        yield
    finally:
        _makes_no_mask.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in transformers' form, which computes attention within documents if `kwargs` has bounds.

    Without bounds, transformers' own function is called. `query`, `key` and `value` are [rows, heads, length, size];
    the output is [rows, length, heads, size].
    """
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    rows, _, length, _ = query.shape
    # All rows one after the other: [tokens, heads, size].
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    compute = _in_one_launch if query.device.type == "cuda" and not dropout else _one_by_one
    output = compute(*flat, bounds=bounds, longest=kwargs["max_length_q"], dropout=dropout, scaling=scaling)
    return output.reshape(rows, length, *output.shape[1:]), None


def _in_one_launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bounds: torch.Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention within each document, for all documents in one launch of PyTorch's variable-length attention.

    The tensors are [tokens, heads, size]. `bounds` are the starts of the documents, followed by the number of tokens;
    `longest` is the number of tokens of the longest document. `scaling` is the factor of attention scores; None means
    the default.
    """
    from torch.nn.attention.varlen import varlen_attn

    is_grouped = query.shape[1] != key.shape[1]
    found = varlen_attn(
        query.to(value.dtype),  # rotary embeddings may have made it finer
        key.to(value.dtype),
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=is_grouped,
    )
    assert isinstance(found, torch.Tensor)  # more is returned only where it is asked for
    return found


def _one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bounds: torch.Tensor,
    longest: int,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Causal attention within each document, computed one document after the other.

    The tensors are [tokens, heads, size]. `bounds` are the starts of the documents, followed by the number of tokens;
    `longest` is the number of tokens of the longest document. `scaling` is the factor of attention scores; None means
    the default.
    """
    sizes = bounds.diff().tolist()
    parts = zip(*(torch.split(tensor.transpose(0, 1), sizes, dim=1) for tensor in (query, key, value)), strict=True)
    is_grouped = query.shape[1] != key.shape[1]
    outputs = [
        scaled_dot_product_attention(
            q[None], k[None], v[None], dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=is_grouped
        )[0]
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)
