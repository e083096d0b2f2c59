"""The process that scores a checkpoint, with a stand-in for its program."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from search_spaces.study.engine import EngineOptions
from workers.engines.vllm import checkpoint_engine
from workers.engines.vllm.checkpoint_engine import scores_of
from workers.errors import EngineUnavailable

# Starts a process of its own, as vLLM does, and hangs. Both keep the output open.
HANGS = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("loading\\nwaiting for", other.pid, flush=True)
time.sleep(60)
"""


def test_a_hanging_process_ends_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{HANGS}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(checkpoint_engine, "START_S", 2.0)
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"vLLM cannot score a model \(stopped after 2 s\)") as raised:
        scores_of("a model", EngineOptions(max_model_len=64), ())
    assert time.monotonic() - began < 30
    assert "loading" in str(raised.value)
    number = int(str(raised.value).split()[-1])
    while Path(f"/proc/{number}/stat").exists() and Path(f"/proc/{number}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() - began < 30
        time.sleep(0.05)


def test_a_failed_process_shows_the_end_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\nfor number in range(9):\n    print('line', number)\nraise SystemExit(3)\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(EngineUnavailable, match=r"\(exit status 3\):\nline 4\nline 5\nline 6\nline 7\nline 8$"):
        scores_of("a model", EngineOptions(max_model_len=64), ())
