"""Noise by counter: its definition by independent arithmetic, the same result on every device, its distribution."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys

import pytest
import torch

from workers.training.mergopt import kernel
from workers.training.mergopt.elements import add
from workers.training.mergopt.noise import NUM_QUANTILES, Gaussian, Laplace, Noise, add_plainly, draw_key

M = 2**32


def hash_by_hand(key: int, i: int) -> int:
    """The hash of `workers.merging.masks`, in Python's integers."""
    k0, k1 = key % M, key >> 32
    x = (i * 0x9E3779B9 + k0) % M
    x ^= x >> 16
    x = x * 0x7FEB352D % M
    x ^= x >> 15
    x = (x + k1 + (i >> 32)) * 0x846CA68B % M
    return x ^ (x >> 16)


def laplace_by_hand(key: int, i: int, b: float) -> float:
    """The inverse of Laplace's distribution function in the middle of one of 2^16 intervals."""
    u = ((hash_by_hand(key, i) >> 16) + 0.5) / 2**16
    return b * math.log(2 * u) if u < 0.5 else -b * math.log(2 * (1 - u))


def test_a_key_is_the_digest_of_seed_and_step() -> None:
    digest = hashlib.blake2b(b"mergopt\x1f3\x1f7", digest_size=8).digest()
    assert draw_key(3, 7) == int.from_bytes(digest, "little")


@pytest.mark.parametrize("start", [0, 5, M - 2, 5 * M + 11])
def test_elements_are_those_of_the_definition(start: int) -> None:
    key = draw_key(0, 1)
    found = torch.zeros(4)
    add(found, Laplace(0.5).quantiles, key=key, start=start)
    expected = torch.tensor([laplace_by_hand(key, start + i, 0.5) for i in range(4)])
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [0, 3, M - 70_000])
def test_compiled_code_gives_the_bits_of_torch(dtype: torch.dtype, start: int) -> None:
    whole = torch.randn(200_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain, compiled = whole.clone(), whole.clone()
    table, key = Laplace(0.1).quantiles, draw_key(1, 2)
    add_plainly(plain, table, key=key, start=start)
    kernel.add_noise(compiled, table, key=key, start=start)
    assert torch.equal(plain, compiled)
    assert not torch.equal(plain, whole)


def check_cuda_kernel(device: str) -> int:
    """Compare the kernel with torch on one device, for parts across 32-bit limits; returns the number of parts."""
    from workers.training.mergopt import cuda_kernel

    compared = 0
    table = Laplace(0.1).quantiles.to(device)
    # The interpreter rounds to bfloat16 towards zero, a device to nearest.
    for dtype in (torch.float32,) if device == "cpu" else kernel.DTYPES:
        for start in (0, 3, M - 700, M // 2 - 1, 3 * M - 5):
            for size in (1, 1500):
                whole = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device, dtype)
                plain, found = whole.clone(), whole.clone()
                add_plainly(plain, table, key=draw_key(1, 2), start=start)
                cuda_kernel.add_noise(found, table, key=draw_key(1, 2), start=start)
                assert torch.equal(plain, found), (dtype, start, size)
                assert not torch.equal(plain, whole)
                compared += 1
    return compared


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu tests the device itself")
def test_cuda_kernel_in_the_interpreter() -> None:
    """The kernel for CUDA gives the bits of torch in Triton's interpreter."""
    code = "from tests.workers.training.mergopt.test_noise import check_cuda_kernel; print(check_cuda_kernel('cpu'))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert int(finished.stdout) == 10


@pytest.mark.parametrize("noise", [Laplace, Gaussian])
def test_a_mean_moves_the_distribution(noise: type[Laplace] | type[Gaussian]) -> None:
    moved = noise(0.1, mean=-0.3).quantiles
    assert torch.allclose(moved, noise(0.1).quantiles - 0.3, atol=1e-6)
    with pytest.raises(ValueError, match="mean inf; expected a finite number"):
        noise(0.1, mean=math.inf)


def test_a_part_has_the_noise_of_the_whole() -> None:
    table, key = Laplace().quantiles, draw_key(0, 0)
    whole, part = torch.zeros(3000), torch.zeros(1234)
    add(whole, table, key=key, start=100)
    add(part, table, key=key, start=100 + 777)
    assert torch.equal(part, whole[777 : 777 + 1234])


def test_a_transposed_tensor_is_counted_in_c_order() -> None:
    table, key = Laplace().quantiles, draw_key(0, 0)
    straight, transposed = torch.zeros(5, 7), torch.zeros(7, 5).t()
    add(straight, table, key=key, start=0)
    add(transposed, table, key=key, start=0)
    assert torch.equal(straight, transposed)


@pytest.mark.parametrize("steps", [((0, 0), (0, 1)), ((0, 0), (1, 0))])
def test_other_steps_and_seeds_draw_independent_noise(steps: tuple[tuple[int, int], tuple[int, int]]) -> None:
    draws = []
    for seed, step in steps:
        draws.append(torch.zeros(100_000))
        add(draws[-1], Laplace(1.0).quantiles, key=draw_key(seed, step), start=0)
    correlation = torch.corrcoef(torch.stack(draws))[0, 1]
    assert abs(correlation) < 4 / math.sqrt(100_000)


@pytest.mark.parametrize(
    ("noise", "size", "variance"), [(Laplace(0.01), 0.01, 2e-4), (Gaussian(0.01), 0.01 * math.sqrt(2 / math.pi), 1e-4)]
)
def test_moments_are_those_of_the_distribution(noise: Noise, size: float, variance: float) -> None:
    found = torch.zeros(1_000_000)
    add(found, noise.quantiles, key=draw_key(0, 0), start=0)
    assert abs(float(found.mean())) < 4 * math.sqrt(variance / 1e6)
    assert float(found.abs().mean()) == pytest.approx(size, rel=5e-3)
    assert float(found.var()) == pytest.approx(variance, rel=1e-2)


def test_quantiles_are_ascending_and_symmetric() -> None:
    for noise in (Laplace(), Gaussian(0.1)):
        table = noise.quantiles
        assert len(table) == NUM_QUANTILES
        assert bool((table.diff() >= 0).all())
        assert torch.allclose(table, -table.flip(0), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        Laplace(scale)
    with pytest.raises(ValueError, match="expected a finite number above 0"):
        Gaussian(scale)
