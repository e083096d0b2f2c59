"""The places that vLLM's loaders write to, found without copying, for each way in which ranks divide a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from workers.engines.vllm.loading import LoadObserver

pytestmark = pytest.mark.heavy  # imports vLLM

ROWS, COLUMNS = 48, 24
VOCABULARY = 125  # is padded


def layers() -> dict[str, tuple[Callable[[], Any], dict[Any, tuple[int, ...]]]]:
    """Layers of vLLM, each with the shapes of its source tensors by part; the part None is the whole parameter."""
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    plain = {"bias": False, "params_dtype": torch.float32}
    return {
        "qkv": (
            lambda: QKVParallelLinear(COLUMNS, 4, 8, 4, **plain),
            {"q": (32, COLUMNS), "k": (16, COLUMNS), "v": (16, COLUMNS)},
        ),
        "gate_up": (
            lambda: MergedColumnParallelLinear(COLUMNS, [ROWS, ROWS], **plain),
            {0: (ROWS, COLUMNS), 1: (ROWS, COLUMNS)},
        ),
        "column": (lambda: ColumnParallelLinear(COLUMNS, ROWS, **plain), {None: (ROWS, COLUMNS)}),
        "row": (lambda: RowParallelLinear(ROWS, COLUMNS, **plain), {None: (COLUMNS, ROWS)}),
        "vocabulary": (
            lambda: VocabParallelEmbedding(VOCABULARY, COLUMNS, params_dtype=torch.float32),
            {None: (VOCABULARY, COLUMNS)},
        ),
    }


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Function that sets the rank and the number of ranks for which vLLM's layers are built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    def become(rank: int, ranks: int) -> None:
        for module in (linear, vocab_parallel_embedding, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)

    from vllm.model_executor import parameter

    with set_current_vllm_config(VllmConfig()):
        yield become


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        *((kind, ranks) for kind in ("gate_up", "column", "row") for ranks in (1, 2, 3, 4, 8)),
        *((kind, ranks) for kind in ("qkv", "vocabulary") for ranks in (1, 2, 4, 8)),
    ],
)
def test_shards_are_the_elements_that_the_loader_copies(
    kind: str, ranks: int, as_rank: Callable[[int, int], None]
) -> None:
    """The shards that are seen on empty tensors are those that the loader copies; all ranks together have each one."""
    make, shapes = layers()[kind]
    tensors = {
        part: torch.arange(float(torch.Size(shape).numel())).view(shape) + 10_000 * (number + 1)
        for number, (part, shape) in enumerate(shapes.items())
    }
    seen = {part: torch.zeros(torch.Size(shape).numel(), dtype=torch.int64) for part, shape in shapes.items()}
    for rank in range(ranks):
        as_rank(rank, ranks)
        weight = make().weight
        weight.data.fill_(-1)

        def load(part: Any, tensor: torch.Tensor, weight: Any = weight) -> None:
            weight.weight_loader(weight, tensor, *([] if part is None else [part]))

        observer = LoadObserver(
            ((str(part), torch.empty(shape)) for part, shape in shapes.items()), {"w": weight}, copies=False
        )
        with observer:
            for (_, blank), part in zip(observer, shapes, strict=True):
                load(part, blank)
        places = observer.destinations
        for part, tensor in tensors.items():
            place = places[str(part)]
            assert place is not None, part
            if place.shard is None:
                place.memory.copy_(tensor)
                continue
            elements = place.shard.view(tensor)
            place.memory.view(elements.shape).copy_(elements)
            seen[part][place.shard.indices(torch.arange(place.shard.num_elements))] += 1
        written = weight.detach().clone()
        weight.data.fill_(-1)
        for part, tensor in tensors.items():
            load(part, tensor)
        assert torch.equal(weight[weight != 0], written[written != 0]), (kind, rank)
    if ranks > 1 and kind != "qkv":
        assert all(bool((count == 1).all()) for count in seen.values())
