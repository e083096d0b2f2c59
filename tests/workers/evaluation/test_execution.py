"""Model-written programs: their possible actions, and their isolation from each other and everything else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.workers.evaluation.sandbox_attacks import (
    ATTACKS,
    MEANS,
    BubblewrapAlone,
    BubblewrapVariant,
    NoConfinement,
    Unavailable,
    allowed,
    as_ordinary_user,
    main,
)
from tests.workers.evaluation.test_confined_task import opened, wait_until
from workers.errors import EngineUnavailable, InvalidTask
from workers.evaluation import bubblewrap, execution
from workers.evaluation.available_confinement import available_confinement, lack_of
from workers.evaluation.bubblewrap import READ_ONLY, Bubblewrap
from workers.evaluation.built_tasks import Answers
from workers.evaluation.confinement import Confinement
from workers.evaluation.execution import Executor, pass_at_k
from workers.evaluation.landlock import Landlock
from workers.evaluation.system_calls import ConfinementUnavailable
from workers.types import TaskSpec


def own(means: type[Confinement]) -> type[Confinement]:
    """`means` if this machine has it; otherwise skips the test, except for bubblewrap in CI, which installs it."""
    lack = lack_of(means().of_program(0))
    if lack and (means is not Bubblewrap or not os.environ.get("CI")):
        pytest.skip(lack)
    assert not lack
    return means


@pytest.fixture(scope="module", params=[Bubblewrap, Landlock])
def means(request: pytest.FixtureRequest) -> type[Confinement]:
    return own(request.param)


@pytest.fixture(scope="module")
def executor(means: type[Confinement]) -> Iterator[Executor]:
    executor = Executor(confinement=means)
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
        "import os\nos._exit(250)",
        "import signal\nsignal.raise_signal(40)",
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
        "exit code 250",
        "signal 40",
        "KeyboardInterrupt: ",
        "signal SIGSEGV",
    ]
    assert executor.run([]) == []
    assert re.fullmatch(r"(bubblewrap [\d.]+|Landlock \d+), seccomp", executor.enforced)


@pytest.fixture(scope="module", params=["this user", "an ordinary user"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, dict[str, Any]]:
    """Whether root attacked; and, by means and attack, the reason why it failed, or None if it succeeded."""
    command = [sys.executable, "-c", f"from {main.__module__} import main; main()"]
    is_root = os.geteuid() == 0
    if request.param == "an ordinary user":
        if not is_root:
            pytest.skip("this user is one")
        stage = tmp_path_factory.mktemp("stage")
        command, is_root = as_ordinary_user(command, stage=stage), False
    environment = {"PATH": os.defpath, "PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": "/tmp"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return is_root, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("means", MEANS)
def test_attacks_work_only_without_confinement(outcomes: tuple[bool, dict[str, Any]], means: type[Confinement]) -> None:
    is_root, found = outcomes
    if isinstance(lack := found[means.__name__], str):
        own(means)
        pytest.fail(lack)
    succeeded = {attack for attack, reason in lack.items() if reason is None}
    assert succeeded == allowed(means, is_root=is_root)
    assert {*lack} == {*ATTACKS}


# What each argument of bwrap prevents by itself: (arguments of BubblewrapVariant with it, those without it, program).
PROC = ("--proc", "/proc")
TRAPS = {
    "file system of the root": ({}, {"without": READ_ONLY}, "open('/written', 'w')"),
    "network": ({}, {"extra": ("--share-net",)}, "import socket; socket.create_connection(('127.0.0.1', {port}), 5)"),
    "nested namespaces": ({}, {"without": ("--disable-userns",)}, ATTACKS["nested namespaces"]),
    "environment of the launcher": (
        {"extra": PROC},
        {"extra": PROC, "passes_environment": True},
        "assert b'PATH' in open('/proc/1/environ', 'rb').read()",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_each_argument_of_bwrap_is_needed(trap: str) -> None:
    own(Bubblewrap)
    kept, changed, program = TRAPS[trap]
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = program.format(port=server.getsockname()[1])
        for options, is_contained in ((kept, True), (changed, False)):
            executor = Executor(confinement=partial(BubblewrapVariant, **options))  # type: ignore[arg-type]
            (reason,) = executor.run([code])
            executor.close()
            assert (reason is not None) is is_contained, reason


def test_fork_bomb_of_root_is_stopped_by_another_user() -> None:
    """No limit of processes applies to root, also in a namespace: programs of root become another user."""
    own(Bubblewrap)
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for means, is_contained in ((BubblewrapAlone, True), (BubblewrapVariant, False)):
        executor = Executor(confinement=means)
        (reason,) = executor.run([ATTACKS["fork bomb"]])
        executor.close()
        assert (reason is not None) is is_contained, reason


DAEMON = """
import ctypes, os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"{name}")
        os.close(3)
        time.sleep(60)
    os._exit(0)
time.sleep(0.5)
"""


def test_daemon_ends_with_its_program() -> None:
    """Namespaces end with their first process, which ends with the program. No filter is needed for that."""
    own(Bubblewrap)
    name = f"daemon-{os.getpid() % 10**6}"

    def found() -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["name"]) if each.info["name"] == name]

    for means in (BubblewrapAlone, NoConfinement):
        executor = Executor(confinement=means)
        assert executor.run([DAEMON.format(name=name)]) == [None]
        if means is BubblewrapAlone:
            wait_until(lambda: not found(), 10)
        for process in found():
            assert means is NoConfinement
            process.kill()
            name = ""  # seen
        executor.close()
    assert name == ""


@pytest.mark.slow
def test_programs_that_do_not_end_are_ended(means: type[Confinement], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "CPU_S", 1)
    monkeypatch.setattr(execution, "WALL_FACTOR", 60)  # the limit of processor time decides on a busy machine, too
    with contextlib.closing(Executor(confinement=means)) as executor:
        reasons = executor.run(["while True: pass", "print('x' * 10**8)"])
    assert reasons == ["used more than 1 s of processor time", None]
    # Programs that wait use no processor time, so that another limit ends them.
    monkeypatch.setattr(execution, "WALL_FACTOR", 3)
    sleeping = "import os, time\nos.close(3) if {closes} else None\ntime.sleep(100)"
    with contextlib.closing(Executor(confinement=means)) as executor:
        reasons = executor.run([sleeping.format(closes=False), sleeping.format(closes=True)])
    late = "did not end within 3 s"
    assert reasons == [late, late if means is Bubblewrap else "signal SIGKILL"]  # bwrap has the pipe, too


def test_flood_of_output_is_cut(executor: Executor) -> None:
    """A program that writes without end is ended, and what it wrote is not kept."""
    flood = "import os\nwhile True: os.write(3, b'x' * 65536)"
    before = psutil.Process(executor.pid).memory_info().rss
    assert executor.run([flood]) == ["x" * 500]
    assert psutil.Process(executor.pid).memory_info().rss - before < 32 << 20


def test_programs_run_while_others_are_submitted(executor: Executor) -> None:
    executor.submit(["pass", "import time; time.sleep(0.2)"])
    executor.submit([])
    executor.submit(["1 / 0"])
    assert executor.outcomes() == [None, None, "ZeroDivisionError: division by zero"]
    assert executor.outcomes() == []


@dataclass(frozen=True)
class FailsLater(Landlock):
    """Landlock that fails as soon as the file `spent` exists."""

    spent: str = ""

    def apply(self) -> str:
        if Path(self.spent).exists():
            raise OSError("no memory for a filter")
        return super().apply()


def test_program_that_could_not_be_confined_has_no_outcome(tmp_path: Path) -> None:
    """Where confinement begins to fail, no model is blamed for it, and a later request is answered again."""
    spent = tmp_path / "spent"
    with contextlib.closing(Executor(confinement=partial(FailsLater, spent=str(spent)))) as executor:
        assert executor.run(["pass"]) == [None]
        spent.touch()
        with pytest.raises(EngineUnavailable, match="no memory for a filter"):
            executor.run(["pass"])
        spent.unlink()
        assert executor.run(["assert False", "pass"]) == ["AssertionError: ", None]


@pytest.mark.parametrize("means", [Bubblewrap, Landlock])
def test_programs_may_exit(means: type[Confinement]) -> None:
    """`exit` and `quit` are there under both means."""
    with contextlib.closing(Executor(confinement=own(means))) as executor:
        program = "try: {}()\nexcept SystemExit: pass"
        assert executor.run([program.format("exit"), program.format("quit")]) == [None, None]


def test_programs_have_no_future_imports_of_others(executor: Executor) -> None:
    """A program's annotations are evaluated, as where it runs by itself."""
    (reason,) = executor.run(["def f(x: Missing): pass"])
    assert reason is not None
    assert reason.startswith("NameError: name 'Missing' is not defined")


def test_programs_that_were_dropped_are_ended(executor: Executor) -> None:
    """Programs whose outcomes are not wanted are not waited for, and the next ones have their own outcomes."""
    executor.submit(["import time; time.sleep(1000)", "pass"])
    executor.drop()
    assert executor.run(["assert False", "pass"]) == ["AssertionError: ", None]


def test_executor_that_does_not_start_says_so(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while it starts is an engine that is not available, and no error of a merge."""
    monkeypatch.setattr("workers.evaluation.execution.PROGRAM", "raise SystemExit")
    with pytest.raises(EngineUnavailable, match="did not start"):
        Executor()


def test_sets_have_the_same_order_in_each_program(executor: Executor) -> None:
    """So that a value does not change when a sample is scored again."""
    program = "raise ValueError(list({'a', 'b', 'c', 'd', 'e'}))"
    assert len({executor.run([program])[0], *executor.run([program] * 3)}) == 1


def test_programs_do_not_see_each_other(executor: Executor) -> None:
    leave = "import builtins, sys\nbuiltins.left = 1\nsys.modules['left'] = 1\nimport os; os.environ['LEFT'] = '1'"
    look = "import builtins, os, sys\nassert not hasattr(builtins, 'left')\nassert 'left' not in sys.modules"
    assert executor.run([leave, look, "import os; assert 'LEFT' not in os.environ"]) == [None, None, None]


def test_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    with_secret = Executor(confinement=NoConfinement)
    assert with_secret.run(["import os; assert 'SECRET_TOKEN' not in os.environ"]) == [None]
    with_secret.close()


def test_nothing_is_left_over(means: type[Confinement]) -> None:
    executor = Executor(confinement=means)
    process = psutil.Process(executor.pid)
    executor.run(["import time; time.sleep(0.01)"] * 5)
    assert process.children(recursive=True) == []
    executor.submit(["import time; time.sleep(60)"])
    wait_until(lambda: bool(process.children()), 10)
    running = process.children(recursive=True)
    executor.close()
    assert not process.is_running()
    wait_until(lambda: not any(each.is_running() for each in running), 10)


def test_process_that_was_killed_is_replaced(means: type[Confinement]) -> None:
    executor = Executor(confinement=means)
    os.kill(executor.pid, signal.SIGKILL)
    assert executor.run(["pass"]) == [None]
    executor.submit(["pass", "1 / 0"])
    os.kill(executor.pid, signal.SIGKILL)
    assert executor.outcomes() == [None, "ZeroDivisionError: division by zero"]
    executor.close()


@pytest.mark.parametrize("command", [0x40086602, 0x401C5820, 0x8901])
def test_filter_refuses_commands_of_ioctl(command: int) -> None:
    """Attributes of files and owners of signals cannot be changed: the filter refuses before the file is looked at."""
    program = (
        "from workers.evaluation.system_calls import filter_system_calls, forbid_new_privileges\n"
        "import errno, fcntl\n"
        "def told():\n"
        f"    try: fcntl.ioctl(999, {command}, bytes(64))\n"
        "    except OSError as error: return error.errno\n"
        "assert told() == errno.EBADF\n"
        "forbid_new_privileges(); filter_system_calls()\n"
        "assert told() == errno.EPERM\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("means", [Bubblewrap, Landlock])
def test_process_with_threads_is_not_confined(means: type[Confinement]) -> None:
    """Restrictions hold for one thread, so that a process with others is refused before it runs anything."""
    program = (
        "import threading, time\n"
        f"from {means.__module__} import {means.__name__}\n"
        "threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        f"try: {means.__name__}().apply()\n"
        "except RuntimeError as error: print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert found.stdout == "a process with 2 threads cannot be confined: confine it before it starts threads\n"


def test_machine_that_cannot_confine_says_so() -> None:
    with pytest.raises(InvalidTask, match=r"this machine cannot confine one: .*Landlock is not available: no reason"):
        Executor(confinement=Unavailable)


def test_bubblewrap_comes_first_and_landlock_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (available_confinement, bubblewrap._version):
        place.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    if lack_of(Landlock()):
        with pytest.raises(ConfinementUnavailable, match=r"Bubblewrap: there is no program bwrap.*; Landlock: "):
            available_confinement()
    else:
        assert available_confinement() is Landlock
    monkeypatch.undo()
    available_confinement.cache_clear()
    bubblewrap._version.cache_clear()
    own(Bubblewrap)
    assert available_confinement() is Bubblewrap


def test_machine_with_neither_is_refused_with_both_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "bwrap", lambda: "")
    monkeypatch.setattr(Bubblewrap, "command", no_namespaces)
    monkeypatch.setattr(Landlock, "command", no_namespaces)
    available_confinement.cache_clear()
    with pytest.raises(
        InvalidTask, match=r"this machine cannot confine one: Bubblewrap: no reason here; Landlock: no reason here$"
    ):
        Executor()
    available_confinement.cache_clear()


def no_namespaces(*_: object) -> tuple[list[str], dict[str, str]]:
    raise ConfinementUnavailable("no reason here")


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
