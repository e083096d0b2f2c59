import torch

from workers.engines.vllm.checksum import WEIGHT, checksum
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
