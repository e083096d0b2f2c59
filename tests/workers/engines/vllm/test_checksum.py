from typing import Any

import pytest
import torch

from workers.engines.vllm.checksum import CHUNK, SMALLEST_CHUNK, WEIGHT, checksum, sum_in_pieces
from workers.merging.kernels.reductions import weighted_words


def test_checksum_tells_any_changed_or_moved_value_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1, 7, 64, 1001):
            tensor = torch.randn(size, generator=generator).to(dtype)
            known = checksum({"w": tensor})
            assert checksum({"w": tensor.clone()}) == known
            for index in {0, size // 2, size - 1}:
                changed = tensor.clone()
                bits = changed.view(torch.int32 if dtype == torch.float32 else torch.int16)
                bits[index] ^= 1
                assert checksum({"w": changed}) != known
            if size > 1:
                assert checksum({"w": tensor.roll(1)}) != known
    assert checksum({"a": torch.ones(2)}) != checksum({"b": torch.ones(2)}) != checksum({"b": torch.ones(2, 1)})


def test_fused_checksums_are_those_of_the_definition() -> None:
    for size in (0, 1, 1000, 200_003):
        words = torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(size))
        expected = sum(word * (i * WEIGHT | 1) for i, word in enumerate(words.tolist())) % 2**64
        assert weighted_words(words, WEIGHT) == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_sums_in_pieces_are_fused_ones(dtype: torch.dtype) -> None:
    """Sums as on a GPU are those of the CPU's kernel, over several pieces and words of every width."""
    draw = torch.Generator().manual_seed(0)
    least = 0 if dtype == torch.uint8 else -100
    words = torch.randint(least, 100, (CHUNK + 1001,), generator=draw).to(dtype)
    assert sum_in_pieces(words) == weighted_words(words.to(torch.int64), WEIGHT)


def test_pieces_become_smaller_on_a_full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without memory for a piece gets smaller pieces; one without memory for the smallest fails."""
    arange, asked = torch.arange, []
    room = 0

    def in_room(start: int, end: int, **options: Any) -> torch.Tensor:
        asked.append(end - start)
        if end - start > room:
            raise torch.OutOfMemoryError("no memory")
        return arange(start, end, **options)

    monkeypatch.setattr(torch, "arange", in_room)
    words = torch.randint(-(2**63), 2**63 - 1, (200_003,), generator=torch.Generator().manual_seed(1))
    room = 70_000
    assert sum_in_pieces(words) == weighted_words(words, WEIGHT)
    assert max(asked) > room >= min(asked)
    room = SMALLEST_CHUNK - 1
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        sum_in_pieces(words)
