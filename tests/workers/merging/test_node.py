"""Memory and values that processes of one node share: created once, and freed when the last user ends or dies."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.merging import node
from workers.merging.node import (
    Node,
    NoRoom,
    SharedDirectory,
    free_shared_bytes,
    remove_leftovers,
    remove_unused,
    shared_bytes,
)

ENDS = """
import sys
from pathlib import Path
from workers.merging.node import SharedDirectory

shared = SharedDirectory("sources", root=Path(sys.argv[1]))
print(shared.fill(3, lambda memory: memory.fill_(7)).tolist(), (shared.path / "filled").exists())
"""
FORK = multiprocessing.get_context("fork")


def opens(root: Path, doing: str, said: Any) -> None:
    """Fill memory and compute a value, each in two parts; say whether this process has both."""

    def noted(file: str) -> None:
        with (root.parent / file).open("a") as notes:
            notes.write("one\n")

    def write(memory: torch.Tensor) -> None:
        noted("writes")
        memory[:5] = 7
        if doing == "killed":
            said.send("filling")
            time.sleep(600)
        time.sleep(0.3)
        memory[5:] = 7

    def made() -> dict[str, float]:
        noted("values")
        time.sleep(0.3)
        return {"sum": 7.5}

    shared = SharedDirectory("sources", root=root)
    memory = shared.fill(10, write)
    value = Node(shared).value(("norm", ("a", "weight")), made)
    said.send(memory.tolist() == [7] * 10 and value == {"sum": 7.5})
    if doing == "stays":
        time.sleep(600)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    found = tmp_path / "shm"
    found.mkdir()
    return found


def process(root: Path, doing: str = "ends") -> tuple[Any, Any]:
    """A new process that calls `opens`, and the connection on which it says what it has."""
    heard, said = FORK.Pipe(duplex=False)
    started = FORK.Process(target=opens, args=(root, doing, said), daemon=True)
    started.start()
    said.close()
    return started, heard


def end(started: Any) -> None:
    started.kill()
    started.join(10)


def names(root: Path) -> list[str]:
    return sorted(each.name for each in (root / f"mergesearch-{os.getuid()}").iterdir())


def test_one_of_several_processes_fills_and_computes(root: Path, tmp_path: Path) -> None:
    """One process fills the memory and one computes a value; after all have ended, nothing is left."""
    started = [process(root) for _ in range(3)]
    assert [heard.recv() for _, heard in started] == [True] * 3
    for each, _ in started:
        each.join(10)
        assert each.exitcode == 0
    written = (tmp_path / "writes").read_text().split()
    assert len(written) in (1, 2, 3)  # a process that begins when the others have ended fills it again
    assert len(written) == len((tmp_path / "values").read_text().split())
    assert names(root) == []


def test_a_program_that_ends_leaves_nothing(root: Path) -> None:
    """The directory goes with the interpreter, whose end closes what the program has open."""
    command = [sys.executable, "-c", ENDS, str(root)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("] ") == ["[7, 7, 7", "True\n"]
    assert names(root) == []


ROUNDS = 10


def fill_and_stay(root: Path, barrier: Any, filled: Any, release: Any) -> None:
    """Open and fill a directory per round when all processes have come to `barrier`; keep it open until all have it."""

    def write(memory: torch.Tensor) -> None:
        time.sleep(0.02)
        memory.fill_(7)

    for number in range(ROUNDS):
        barrier.wait()
        shared = SharedDirectory("sources", root=root / str(number))
        time.sleep(0.002)  # as a bank does, which reads the headers of its models between both
        if torch.equal(shared.fill(10, write), torch.full((10,), 7, dtype=torch.uint8)):
            filled.release()
        release.wait()


def test_processes_that_start_together_and_stay_all_get_it(root: Path) -> None:
    """Each of several processes gets the memory while all others keep it open, however close together they start."""
    barrier, filled, release = FORK.Barrier(4), FORK.Semaphore(0), FORK.Barrier(5)
    for number in range(ROUNDS):
        (root / str(number)).mkdir()
    # The same processes in all rounds: a fork of this process, with all that tests have imported, takes a while.
    arguments = (root, barrier, filled, release)
    started = [FORK.Process(target=fill_and_stay, args=arguments, daemon=True) for _ in range(4)]
    try:
        for each in started:
            each.start()
        for number in range(ROUNDS):
            num_filled = sum(filled.acquire(timeout=10) for _ in started)
            assert num_filled == 4, f"round {number}: {num_filled} of 4 processes have the memory"
            release.wait(10)
        for each in started:
            each.join(10)
    finally:
        for each in started:
            each.kill()


def test_a_killed_process_leaves_memory_to_others(root: Path, tmp_path: Path) -> None:
    """Memory of a killed process is filled again if it was filled in part, and removed once nobody has it open."""
    killed, heard = process(root, "killed")
    assert heard.recv() == "filling"
    waiting, heard = process(root, "stays")
    end(killed)
    assert heard.recv() is True
    second, heard = process(root, "stays")
    assert heard.recv() is True
    assert (tmp_path / "writes").read_text().split() == ["one", "one"]
    assert (tmp_path / "values").read_text().split() == ["one"]
    own = root / f"mergesearch-{os.getuid()}"
    assert remove_unused(own) == []
    end(waiting)
    assert remove_unused(own) == [], "another process has it open"
    assert names(root) == ["sources"]
    end(second)
    other = SharedDirectory("others", root=root)
    assert names(root) == ["others"]
    other.close()
    other.close()
    assert names(root) == []


def test_leftovers_are_removed_before_memory_is_planned(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a process that was killed is removed on demand, but not memory in use, nor that with the given name."""
    monkeypatch.setattr(node, "SHARED_MEMORY", root)
    stays, heard = process(root, "stays")
    assert heard.recv() is True
    remove_leftovers(except_for="others")
    assert names(root) == ["sources"], "a process has it open"
    end(stays)
    remove_leftovers(except_for="sources")
    assert names(root) == ["sources"]
    remove_leftovers(except_for="others")
    assert names(root) == []
    monkeypatch.setattr(node, "SHARED_MEMORY", root / "missing")
    remove_leftovers(except_for="others")


def test_memory_with_another_layout_is_not_read(root: Path) -> None:
    """A process that expects the tensors at other places, such as one of another version, gets an error."""
    first, second = (SharedDirectory("sources", root=root) for _ in range(2))
    assert first.fill(3, twos, layout="a, b").tolist() == [2, 2, 2]
    assert second.fill(3, twos, layout="a, b").tolist() == [2, 2, 2]
    with pytest.raises(NoRoom, match="was filled with another order of the tensors"):
        second.fill(3, twos, layout="b, a")
    first.close()
    second.close()


def test_the_oldest_values_make_room(root: Path) -> None:
    """Values of a kind with a limit take at most its bytes, and the newest value always stays."""
    shared = SharedDirectory("sources", root=root)
    of = Node(shared)
    for number in range(6):
        of.value(("variances", number), lambda: bytes(1000), most_bytes=2500)
        files = [*(shared.path / "variances").iterdir()]
        assert len(files) == min(number + 1, 2)
    of.value(("variances", "large"), lambda: bytes(9000), most_bytes=2500)
    assert [file.stat().st_size > 9000 for file in (shared.path / "variances").iterdir()] == [True]
    shared.close()


def test_values_are_still_computed_after_a_close(root: Path) -> None:
    """A process that has left the shared directory computes values itself, and the memory that it has stays valid."""
    shared = SharedDirectory("sources", root=root)
    of = Node(shared)
    memory = shared.fill(3, twos)
    assert of.value(("norm", 1), lambda: 1) == of.value(("norm", 1), lambda: 2) == 1
    of.close()
    of.close()
    assert names(root) == []
    assert (of.value(("norm", 1), lambda: 2), memory.tolist()) == (2, [2, 2, 2])


def twos(memory: torch.Tensor) -> None:
    memory.fill_(2)


def test_memory_without_room_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedDirectory("sources", root=root)
    with pytest.raises(NoRoom, match=r"has room for .* GB, the sources need 1000000000.00 GB"):
        shared.fill(10**18, lambda memory: None)
    assert torch.equal(shared.fill(3, twos), torch.full((3,), 2, dtype=torch.uint8))
    shared.close()
    monkeypatch.setattr(os, "getuid", lambda: 1234567)
    (root / "mergesearch-1234567").symlink_to(root)
    with pytest.raises(NoRoom, match="is not a directory of user 1234567; remove it"):
        SharedDirectory("sources", root=root)
    with pytest.raises(NoRoom, match="cannot be made: No such file or directory"):
        SharedDirectory("sources", root=root / "missing")


def test_values_are_kept_by_name_and_old_rules_are_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "MOST_RULES", 4)
    monkeypatch.setattr(node, "RULES_BETWEEN_COUNTS", 2)
    shared = SharedDirectory("sources", root=root)
    one, other = Node(shared), Node(shared)

    def rule(of: Node, number: int) -> int:
        return of.value(("rule", number), lambda: -number)

    found = [rule(of, number) for number in range(20) for of in (one, other)]
    assert found == [-number for number in range(20) for _ in range(2)]
    assert (one.num_made, other.num_made) == (20, 0)
    kept = list((shared.path / "rule").iterdir())
    assert 4 <= len(kept) <= 9
    kept[0].write_bytes(b"cut")  # is computed again, whichever it is
    assert [rule(other, number) for number in range(20)] == found[::2]

    calls: list[int] = []
    threads = [
        threading.Thread(target=lambda of=of: of.value(("norm", 1), lambda: calls.append(1))) for of in (one, other) * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    with pytest.raises(ZeroDivisionError):
        one.value(("norm", 2), lambda: 1 / 0)
    assert other.value(("norm", 2), lambda: 3) == 3
    assert Node().value(("norm", 1), lambda: 5) == 5
    shared.close()


def test_rules_are_counted_rarely(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of rules is not listed for each new rule; a process that makes few rules lists it once."""
    counted: list[Path] = []
    monkeypatch.setattr(node, "_prune", counted.append)
    shared = SharedDirectory("sources", root=root)
    one, other = Node(shared), Node(shared)
    for number in range(node.RULES_BETWEEN_COUNTS + 1):
        one.value(("rule", number), lambda: 1)
    assert counted == [shared.path / "rule"] * 2
    other.value(("rule", "another"), lambda: 1)
    other.value(("norm", 1), lambda: 1)
    assert counted == [shared.path / "rule"] * 3
    shared.close()


def test_bytes_of_shared_sources_are_known(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process can ask how much memory sources have, without opening them."""
    monkeypatch.setattr(node, "SHARED_MEMORY", root)
    assert free_shared_bytes() > 0
    shared = SharedDirectory("sources")
    assert shared_bytes("sources") == 0
    shared.fill(1 << 20, lambda memory: None)
    assert 1 << 20 <= shared_bytes("sources") <= 2 << 20
    assert shared_bytes("others") == 0
    shared.close()
    assert shared_bytes("sources") == 0
    monkeypatch.setattr(node, "SHARED_MEMORY", root / "missing")
    assert free_shared_bytes() == shared_bytes("sources") == 0
