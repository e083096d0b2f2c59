"""Ray drains a node: its replica finishes its chunk, and chunks that wait there are scored on another node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_drained_nodes_replica_moves_at_a_chunk_border(tmp_path: Path) -> None:
    """A drained node's replica ends after its chunk; kills of Serve's controller and proxy change no result."""
    command = [sys.executable, "-m", "tests.end_to_end.two_nodes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    first, *waiting = seen["replicas"]
    assert first == seen["drained"], "its chunk is finished"
    assert len(set(waiting)) == 1, seen
    assert waiting[0] != seen["drained"], "chunks that waited there are scored by its successor"
    assert seen["scored"] == 3, "each chunk once"
    assert seen["is_gone"]
    assert seen["killed"] == ["ProxyActor", "ServeController"]
    assert seen["after_kills"] == [waiting[0]] * 2
    assert seen["is_equal"]
