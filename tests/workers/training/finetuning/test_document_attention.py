"""Attention within the documents of packed rows gives the same losses and gradients as one document per row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM

from tests.builders import tiny_llama
from tests.layouts import layout_family
from workers.training.finetuning import document_attention
from workers.training.finetuning.data import Document, tensors_of
from workers.training.finetuning.document_attention import (
    DOCUMENTS,
    document_bounds,
    use_document_attention,
    within_documents,
)
from workers.training.finetuning.target_loss import TargetLoss

CPU, SIZES = torch.device("cpu"), (5, 17, 2, 9)


def documents() -> list[Document]:
    draw = torch.Generator().manual_seed(0)
    texts = [tuple(torch.randint(3, 120, (size,), generator=draw).tolist()) for size in SIZES]
    return [Document(text, tuple(i % 3 > 0 for i in range(len(text))), "made up") for text in texts]


def model_of(directory: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama(directory, 1, hidden=64, **options), dtype=torch.float32)


def losses(model: Any, rows: Sequence[Sequence[Document]], *, has_bounds: bool) -> tuple[float, list[torch.Tensor]]:
    """The summed loss of `rows`, and the gradients of all weights."""
    batch = tensors_of(rows, pad=0)
    bounds = document_bounds(batch.positions) if has_bounds else {}
    model.zero_grad()
    loss = TargetLoss(model)
    if has_bounds:
        with within_documents():
            total = loss(labels=batch.labels, input_ids=batch.tokens, position_ids=batch.positions, **bounds)
    else:
        total = loss(labels=batch.labels, input_ids=batch.tokens, position_ids=batch.positions)
    total.backward()
    return float(total.detach()), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("heads", [2, 1])
def test_packed_gradients_are_those_of_single_documents(tmp_path: Path, recomputes: bool, heads: int) -> None:
    """Also with padded rows, grouped key heads, and where activations are computed again outside of the context."""
    model = model_of(tmp_path, num_key_value_heads=heads)
    first, second, third, last = documents()
    expected = [losses(model, [[each]], has_bounds=False) for each in (first, second, third, last)]
    assert use_document_attention(model, max_length=64, device=CPU, dtype=torch.float32)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    total, gradients = losses(model, [[first, second], [third, last]], has_bounds=True)
    assert total == pytest.approx(sum(loss for loss, _ in expected), rel=1e-5)
    for index, gradient in enumerate(gradients):
        wanted = torch.stack([each[index] for _, each in expected]).sum(0)
        assert torch.allclose(gradient, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_no_mask_is_made_and_each_document_is_computed_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(tmp_path)
    assert use_document_attention(model, max_length=64, device=CPU, dtype=torch.float32)
    lengths: list[int] = []
    compute = scaled_dot_product_attention

    def counted(query: torch.Tensor, *args: Any, attn_mask: None = None, **kwargs: Any) -> torch.Tensor:
        lengths.append(query.shape[-2])
        return compute(query, *args, **kwargs)

    monkeypatch.setattr(document_attention, "scaled_dot_product_attention", counted)
    losses(model, [documents()[:2], documents()[2:]], has_bounds=True)
    assert lengths == [5, 17, 2, 9, 11] * 2, "the padding of the second row is a document"


def test_calls_without_bounds_are_those_of_transformers(tmp_path: Path) -> None:
    """Evaluations of the model in training have padded prompts and a cache."""
    model = model_of(tmp_path)
    tokens = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = (tokens > 0).long()
    before = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert use_document_attention(model, max_length=64, device=CPU, dtype=torch.float32)
    assert model.config._attn_implementation == DOCUMENTS
    assert torch.equal(before, model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=8, do_sample=False))
    model.save_pretrained(tmp_path / "saved")
    assert DOCUMENTS not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.parametrize("layout", ["gemma2", "gpt2", "gpt_neox"])
def test_models_whose_attention_differs_keep_their_own_or_agree(layout: str, tmp_path: Path) -> None:
    """What this attention does not compute is refused by the configuration, or by comparing logits."""
    family = layout_family(tmp_path, layout)
    model = AutoModelForCausalLM.from_pretrained(family.base.directory, dtype=torch.float32)
    first, second, *_ = documents()
    expected = sum(losses(model, [[each]], has_bounds=False)[0] for each in (first, second))
    is_used = use_document_attention(model, max_length=64, device=CPU, dtype=torch.float32)
    assert not (layout == "gemma2" and is_used)
    total, _ = losses(model, [[first, second]], has_bounds=is_used)
    assert total == pytest.approx(expected, rel=1e-4)


def test_an_attention_that_ignores_the_bounds_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(tmp_path)
    compute = document_attention._one_by_one

    def whole(*args: Any, bounds: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return compute(*args, bounds=bounds[[0, -1]], **kwargs)

    monkeypatch.setattr(document_attention, "_one_by_one", whole)
    assert not use_document_attention(model, max_length=64, device=CPU, dtype=torch.float32)
    assert "attention within documents does not fit: its logits differ by" in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_windows_and_dtypes_without_a_kernel_are_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    model.config.sliding_window = 32
    assert not use_document_attention(model, max_length=64, device=CPU, dtype=torch.float32)
    model.config.sliding_window = 64
    assert use_document_attention(model, max_length=64, device=CPU, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    gpu = torch.device("cuda")
    lack = document_attention._lack(model.config, max_length=64, device=gpu, dtype=torch.float32)
    assert lack == "variable-length attention on GPUs needs activations in 16 bits"
    assert document_attention._lack(model.config, max_length=64, device=gpu, dtype=torch.bfloat16) is None
    model.config.head_dim = 36
    lack = document_attention._lack(model.config, max_length=64, device=gpu, dtype=torch.bfloat16)
    assert lack == "variable-length attention has no kernel for heads of 36"


def stand_in(*, is_causal: bool = True, scaled: float = 1.0) -> Any:
    """A function with the signature of PyTorch's variable-length attention."""

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        longest = int(cu_seq_q.diff().max())
        assert (cu_seq_q.dtype, max_q, max_k, window_size) == (torch.int32, longest, longest, (-1, 0))
        assert enable_gqa
        outputs = []
        for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_k[1:].tolist(), strict=True):
            q, k, v = (each[start:stop].transpose(0, 1).float() for each in (query, key, value))
            k, v = (each.repeat_interleave(2, 0) for each in (k, v))
            future = torch.ones(stop - start, stop - start).triu(1).bool() & is_causal
            scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(future, -torch.inf)
            outputs.append((scores.softmax(-1) @ (v * scaled + v.detach() * (1 - scaled))).transpose(0, 1))
        return torch.cat(outputs).to(value.dtype)

    return kernel


def test_the_launch_on_a_gpu_has_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the signature of PyTorch's kernel gives what one document after the other gives."""
    monkeypatch.setattr(varlen, "varlen_attn", stand_in())
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(22, 4, 16, generator=draw)
    key, value = (torch.randn(22, 2, 16, generator=draw) for _ in range(2))
    options = document_bounds(torch.cat([torch.arange(5), torch.arange(17)])[None])
    given: dict[str, Any] = {
        "bounds": options["cu_seq_lens_q"],
        "longest": options["max_length_q"],
        "dropout": 0.0,
        "scaling": 0.3,
    }
    one = document_attention._in_one_launch(query, key, value, **given)
    assert torch.allclose(one, document_attention._one_by_one(query, key, value, **given), atol=1e-5)


def test_a_kernel_with_other_outputs_or_gradients_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_of(tmp_path, num_key_value_heads=1).config
    monkeypatch.setattr(varlen, "varlen_attn", stand_in())
    document_attention._check_kernel(config, CPU, torch.bfloat16)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in(is_causal=False))
    with pytest.raises(RuntimeError, match="outputs of variable-length attention differ by"):
        document_attention._check_kernel(config, CPU, torch.bfloat16)
    monkeypatch.setattr(varlen, "varlen_attn", stand_in(scaled=0.5))
    with pytest.raises(RuntimeError, match="gradients of the value of variable-length attention differ by"):
        document_attention._check_kernel(config, CPU, torch.bfloat16)
