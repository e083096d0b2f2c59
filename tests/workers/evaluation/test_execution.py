"""Programs that a model wrote: what they can do, and that they disturb neither each other nor anything else."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.workers.evaluation.test_confined_task import NoConfinement, Unavailable, opened
from workers.errors import InvalidTask
from workers.evaluation import execution
from workers.evaluation.built_tasks import Answers
from workers.evaluation.execution import Executor, pass_at_k
from workers.types import TaskSpec


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def free() -> Iterator[Executor]:
    """An executor whose programs are not confined."""
    executor = Executor(confinement=NoConfinement)
    yield executor
    executor.close()


def test_programs_pass_or_say_why_not(executor: Executor) -> None:
    programs = [
        "def f(x):\n    return x + 1\nassert f(1) == 2",
        "assert 1 == 2, 'no'",
        "def f(:",
        "import numpy, math, collections\nassert numpy.ones(3).sum() == 3",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise KeyboardInterrupt",
        "import ctypes\nctypes.string_at(0)",
    ]
    assert executor.run(programs) == [
        None,
        "AssertionError: no",
        "SyntaxError: invalid syntax (program.py, line 1)",
        None,
        "SystemExit: 0",
        "exit code 0",
        "KeyboardInterrupt: ",
        "signal SIGSEGV",
    ]
    assert executor.run([]) == []
    assert executor.enforced.startswith("Landlock")


ATTACKS = {
    "read a file": "open('{file}').read()",
    "write a file": "open('{file}', 'w')",
    "temporary file": "import tempfile; tempfile.TemporaryFile()",
    "network": "import socket; socket.socket()",
    "fork": "import os; os.fork() or os._exit(0)",
    "fork bomb": "import os; [os.fork() or os._exit(0) for _ in range(50)]",
    "program": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "the process that starts programs": "import os; open(f'/proc/{{os.getppid()}}/mem').close()",
    "signal": "import os; os.kill(os.getppid(), 0)",
    "memory": "import mmap; mmap.mmap(-1, 3 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)",
    "channel": "import os; [os.fstat(handle) for handle in range(4, 20)]",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_works_only_without_confinement(executor: Executor, free: Executor, tmp_path: Path, attack: str) -> None:
    (tmp_path / "secret").write_text("secret")
    program = ATTACKS[attack].format(file=tmp_path / "secret")
    (reason,) = executor.run([program])
    assert reason is not None
    assert "Error" in reason
    assert (tmp_path / "secret").read_text() == "secret"
    if attack != "channel":  # closed in any case
        assert free.run([program]) == [None]


@pytest.mark.slow
def test_programs_that_do_not_end_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "CPU_S", 1)
    executor = Executor()
    sleeping = "import os, time\nos.close(3) if {closes} else None\ntime.sleep(100)"
    reasons = executor.run(
        ["while True: pass", sleeping.format(closes=False), sleeping.format(closes=True), "print('x' * 10**8)"]
    )
    assert reasons == ["used more than 1 s of processor time", "did not end within 10 s", "signal SIGKILL", None]
    executor.close()


def test_programs_do_not_see_each_other(executor: Executor) -> None:
    leave = "import builtins, sys\nbuiltins.left = 1\nsys.modules['left'] = 1\nimport os; os.environ['LEFT'] = '1'"
    look = "import builtins, os, sys\nassert not hasattr(builtins, 'left')\nassert 'left' not in sys.modules"
    assert executor.run([leave, look, "import os; assert 'LEFT' not in os.environ"]) == [None, None, None]


def test_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    with_secret = Executor(confinement=NoConfinement)
    assert with_secret.run(["import os; assert 'SECRET_TOKEN' not in os.environ"]) == [None]
    with_secret.close()


def test_nothing_is_left_over() -> None:
    executor = Executor()
    process = psutil.Process(executor.pid)
    executor.run(["import time; time.sleep(0.01)"] * 5)
    assert process.children() == []
    executor.close()
    assert not process.is_running()


def test_process_that_was_killed_is_replaced() -> None:
    executor = Executor()
    os.kill(executor.pid, signal.SIGKILL)
    assert executor.run(["pass"]) == [None]
    executor.close()


def test_machine_that_cannot_confine_says_so() -> None:
    with pytest.raises(InvalidTask, match=r"this machine cannot confine one: .*Landlock is not available: no reason"):
        Executor(confinement=Unavailable)


def test_pass_at_k_is_the_share_of_draws_with_a_pass() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert (pass_at_k(5, 0, 3), pass_at_k(200, 50, 1)) == (0.0, 0.25)


@pytest.mark.slow
def test_humaneval_of_lm_eval_runs_in_the_sandbox(tmp_path: Path) -> None:
    """lm-eval's own task, over one problem: its module executes a program when it is imported, and names its value."""
    import lm_eval.tasks

    problem = {
        "prompt": "def double(x):\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
        "entry_point": "double",
    }
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem) + "\n")
    text = (Path(lm_eval.tasks.__file__).parent / "humaneval" / "humaneval.yaml").read_text()
    for old, new in (
        ("task: humaneval", "task: problems"),
        (
            "dataset_path: openai/openai_humaneval",
            "dataset_path: json\ndataset_kwargs: {data_files: {test: problems.jsonl}}",
        ),
        ("!function utils.", "!function lm_eval.tasks.humaneval.utils."),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "problems.yaml").write_text(text)
    answers = ["    return 2 * x", "    return x", f"    open({str(tmp_path / 'written')!r}, 'w')\n    return 4"]
    with opened(TaskSpec(str(tmp_path / "problems.yaml"), "pass_at_k")) as task:
        assert task.code is not None
        assert task.code.values([Answers(0, 0, ((answer,),)) for answer in answers]) == [1.0, 0.0, 0.0]
    assert not (tmp_path / "written").exists()
