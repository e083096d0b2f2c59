"""Host memory, free and in total, with and without the limit of a container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from workers.engines.host_memory import free_host_bytes, total_host_bytes


def test_the_limit_of_a_container_is_respected(tmp_path: Path) -> None:
    free = free_host_bytes(tmp_path / "none")
    (tmp_path / "memory.max").write_text("9000000\n")
    (tmp_path / "memory.current").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 3000000\nactive_file 500000\ninactive_file 1500000\n")
    assert free_host_bytes(tmp_path) == 6_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) == pytest.approx(free, rel=0.2)


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_total_memory_is_that_of_the_container(file: str, tmp_path: Path) -> None:
    """The limit of a control group counts, of version 2 or 1, unless it is none or more than the machine has."""
    total = psutil.virtual_memory().total
    assert total_host_bytes(tmp_path) == total
    (tmp_path / file).parent.mkdir(exist_ok=True)
    for text, expected in (("9000000\n", 9_000_000), ("max\n", total), (f"{2**63 - 4096}\n", total)):
        (tmp_path / file).write_text(text)
        assert total_host_bytes(tmp_path) == expected
