"""Free host memory, with and without the limit of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.engines.host_memory import free_host_bytes


def test_the_limit_of_a_container_is_respected(tmp_path: Path) -> None:
    free = free_host_bytes(tmp_path / "none")
    (tmp_path / "memory.max").write_text("9000000\n")
    (tmp_path / "memory.current").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 3000000\nactive_file 500000\ninactive_file 1500000\n")
    assert free_host_bytes(tmp_path) == 6_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) == pytest.approx(free, rel=0.2)
