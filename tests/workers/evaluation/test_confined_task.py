"""Attacks by a task's code, or by model-written code that a metric executes, all fail in the task's process.

Each attack works if the process is not confined, which shows that it is one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.conftest import write_choices
from tests.workers.evaluation.sandbox_attacks import NoConfinement, Unavailable
from tests.workers.judged_tasks import write_task
from workers.errors import InvalidTask, MetricFailed
from workers.evaluation import confined_task
from workers.evaluation.available_confinement import lack_of
from workers.evaluation.bubblewrap import Bubblewrap
from workers.evaluation.built_tasks import Answers, BuiltTask, PromptSettings, documents_of
from workers.evaluation.confined_task import ConfinedTask
from workers.evaluation.landlock import Landlock
from workers.evaluation.lm_eval_tasks import build, prepare, yaml_content
from workers.evaluation.metrics import LocalMetrics
from workers.evaluation.system_calls import AUDIT_ARCHITECTURES, CLONE, FORBIDDEN
from workers.evaluation.task_loading import OwnCode
from workers.evaluation.tasks import check_task
from workers.file_access import FileAccess
from workers.types import TaskSpec

pytestmark = pytest.mark.slow  # a process that imports lm-eval takes 2 s

SETTINGS = PromptSettings(None, None, "tokenizer")

# The metric executes the answer, which sets `x`, as benchmarks of code do.
EXECUTES = """
def process_docs(dataset):
    return dataset

def process_results(doc, results):
    found = {}
    exec(results[0], found)
    return {"exact_match": float(found["x"])}
"""


def executing(directory: Path, name: str = "py_problems") -> TaskSpec:
    return write_task(directory, name, EXECUTES, [{"problem": "one", "solution": "two"}])


def opened(spec: TaskSpec, **options: object) -> BuiltTask:
    task = ConfinedTask(spec, **options).built  # type: ignore[arg-type]
    documents_of(task, SETTINGS)
    return task


def value(task: BuiltTask, code: str) -> float:
    assert task.code is not None
    return task.code.values([Answers(0, 0, ((code,),))])[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module", params=[Bubblewrap, Landlock, NoConfinement])
def task(request: pytest.FixtureRequest, directory: Path) -> Iterator[BuiltTask]:
    if request.param is not NoConfinement and (lack := lack_of(request.param())):
        assert not (os.environ.get("CI") and request.param is Bubblewrap), lack
        pytest.skip(lack)
    os.environ["SECRET_TOKEN"] = "hidden"
    with opened(executing(directory), confinement=request.param) as task:
        yield task
    del os.environ["SECRET_TOKEN"]


@dataclass
class Target:
    """The targets of attacks: a directory outside with a secret, servers, and a process."""

    outside: Path
    port: int
    abstract: str
    process: subprocess.Popen[bytes]


@pytest.fixture
def target() -> Iterator[Target]:
    """The targets, in a directory where programs have theirs: only the confinement then prevents a move of files."""
    with (
        tempfile.TemporaryDirectory() as outside,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        subprocess.Popen(["sleep", "100"]) as process,
    ):
        name = f"mergesearch-{os.getpid()}"
        local.bind(f"\0{name}")
        local.listen()
        secret = Path(outside, "secret")
        secret.write_text("secret")
        secret.chmod(0o600)
        yield Target(Path(outside), server.getsockname()[1], name, process)
        process.kill()


MACHINE = list(AUDIT_ARCHITECTURES).index(platform.machine())
LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS = {
    "read a file": "x = open('{outside}/secret').read() == 'secret'",
    "write a file": "open('{outside}/written', 'w').close(); x = 1",
    "append to a file": "open('{outside}/secret', 'a').write('!'); x = 1",
    "truncate a file": "import os; os.truncate('{outside}/secret', 0); x = 1",
    "delete a file": "import os; os.remove('{outside}/secret'); x = 1",
    "move a file": "import os; os.rename('{outside}/secret', os.environ['TMPDIR'] + '/m'); x = 1",
    "list a directory": "import os; x = 'secret' in os.listdir('{outside}')",
    "symbolic link": "import os; p = os.environ['TMPDIR'] + '/s'\nos.symlink('{outside}/secret', p); open(p); x = 1",
    "hard link": "import os; p = os.environ['TMPDIR'] + '/h'; os.link('{outside}/secret', p); x = 1",
    "change a mode": "import os; p = '{outside}/secret'; os.chmod(p, 0o777); x = os.stat(p).st_mode & 0o777 == 0o777",
    "change an owner": "import os; os.chown('{outside}/secret', os.getuid(), os.getgid()); x = 1",
    "change times": "import os; p = '{outside}/secret'; os.utime(p, (1, 1)); x = os.stat(p).st_mtime == 1",
    "the parent's environment": "import os; open(f'/proc/{{os.getppid()}}/environ', 'rb').close(); x = 1",
    "the memory of the parent": "import os; open(f'/proc/{{os.getppid()}}/mem', 'rb').close(); x = 1",
    "shared memory": "open('/dev/shm/mergesearch-test-{port}', 'w').close(); x = 1",
    "loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 5); x = 1",
    "datagrams": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'', ('127.0.0.1', 9)); x = 1",
    "abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{abstract}'); x = 1",
    "signal a process": "import os; os.kill({pid}, 15); x = 1",
    "signal the parent": "import os; os.kill(os.getppid(), 0); x = 1",
    "signal all": "import os; os.kill(-os.getpgid({pid}), 0); x = 1",
    "trace": LIBC + "libc.ptrace(0x4206, 0, 0, 0); x = ctypes.get_errno() == 3",
    "read another's memory": LIBC + "x = libc.syscall(*map(ctypes.c_long, ({readv}, {pid}, 0, 0, 0, 0, 0))) == 0",
    "fork": LIBC + "x = libc.syscall({clone}, 17, 0, 0, 0, 0); x or libc._exit(0); x = x > 0",
    "spawn": "import os; x = os.posix_spawn('/bin/true', ['true'], {{}}) > 0",
    "program": "import subprocess; x = subprocess.run(['/bin/true']).returncode == 0",
    "replace the program": "import os\ntry: os.execv('/missing', ['x'])\nexcept FileNotFoundError: x = 1",
    "namespace": LIBC + "x = libc.unshare(0x400) == 0",
    "memory": "import mmap; mmap.mmap(-1, 9 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000); x = 1",
    "memory without limits": "import os; os.memfd_create('x'); x = 1",
    "System V memory": LIBC + "s = libc.shmget(0, 4096, 0o1600); x = s >= 0; libc.shmctl(s, 0, 0)",
    "large file": "import os; open(os.environ['TMPDIR'] + '/large', 'wb').truncate(2 << 30); x = 1",
    "raise a limit": "import resource as r; n = r.RLIMIT_CORE; r.setrlimit(n, r.getrlimit(n)); x = 1",
    "outlive the parent": LIBC + "x = libc.prctl(1, 0, 0, 0, 0) == 0",
    "priority": "import os; os.setpriority(os.PRIO_PROCESS, 0, 5); x = 1",
    "affinity": "import os; os.sched_setaffinity({pid}, os.sched_getaffinity(0)); x = 1",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_works_only_without_confinement(task: BuiltTask, target: Target, attack: str) -> None:
    code = ATTACKS[attack].format(
        outside=target.outside,
        port=target.port,
        abstract=target.abstract,
        pid=target.process.pid,
        clone=CLONE[MACHINE],
        readv=FORBIDDEN["process_vm_readv"][MACHINE],
    )
    assert task.code is not None
    if task.code.enforced == "nothing":
        assert value(task, code) == 1, attack
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"/dev/shm/mergesearch-test-{target.port}")
        return
    with contextlib.suppress(MetricFailed):
        assert value(task, code) == 0, attack
    assert (target.outside / "secret").read_text() == "secret"
    assert [file.name for file in target.outside.iterdir()] == ["secret"]
    assert target.process.poll() is None


def test_environment_has_no_secrets(task: BuiltTask) -> None:
    """Not even without confinement: the process is started with an environment of its own."""
    assert value(task, "import os; x = 'SECRET_TOKEN' not in os.environ and 'HF_TOKEN' not in os.environ") == 1


def test_own_directory_can_be_written(task: BuiltTask) -> None:
    code = """
import os, pathlib, shutil, tempfile
with tempfile.TemporaryDirectory() as directory:
    file = pathlib.Path(directory, "file")
    file.write_text("text")
    shutil.copy(file, f"{directory}/copy")
    x = pathlib.Path(f"{directory}/copy").read_text() == "text"
"""
    assert value(task, code) == 1


def test_code_reads_the_files_of_its_task_and_no_others_beside(tmp_path: Path) -> None:
    """A task may be in a home directory, beside keys and other people's links."""
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / ".token").write_text("secret")
    (tmp_path / "database.url").write_text("secret")
    for name in ("data", ".keys", "package"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("secret")
    (tmp_path / "package" / "module.py").write_text("")
    (tmp_path / "link").symlink_to("/etc/passwd")
    spec = replace(executing(tmp_path), access=FileAccess((), (str(tmp_path),)))
    code = """
import pathlib
found = []
for file in sorted(pathlib.Path({place!r}).rglob("*")):
    try:
        file.is_file() and file.read_bytes() is not None and found.append(file.name)
    except PermissionError:
        pass
x = found == {expected}
"""
    expected = ["module.py", "py_problems.jsonl", "py_problems.yaml", "py_problems_code.py", "words.txt"]
    with opened(spec) as task:
        assert value(task, code.format(place=str(tmp_path), expected=expected)) == 1


def test_threads_and_subprocess_free_libraries_work(task: BuiltTask) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
import numpy, signal, sympy
x = sum(ThreadPoolExecutor(4).map(int, numpy.ones(4))) == 4 and sympy.simplify("x + x - 2*x") == 0
"""
    assert value(task, code) == 1


# What reaches this process


OUTPUT = "import os, sys\nprint('x' * (1 << 24)); os.write(2, b'x' * (1 << 24)); x = 1"


def test_flood_of_output_reaches_nobody(task: BuiltTask, capfd: pytest.CaptureFixture[str]) -> None:
    assert value(task, OUTPUT) == 1
    assert len("".join(capfd.readouterr())) < 1000


FORGED = """
import os, pickle, struct, sys, time

class Harm:
    def __reduce__(self):
        return os.mkdir, ({harmed!r},)

def forge(message, length=None):
    os.write(int(sys.argv[1]), struct.pack("!Q", len(message) if length is None else length) + message)

{what}
time.sleep(30)
"""


@pytest.fixture(scope="module")
def hasty(directory: Path) -> Iterator[BuiltTask]:
    """A task with a limit of one second per sample."""
    with opened(executing(directory), sample_limit_s=1.0) as task:
        yield task


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("forge(pickle.dumps(Harm()))", "the process of the task sent"),
        ("forge(b'{\"other\": 1}')", "sent what is no reply: other"),
        ("forge(b'{\"values\": [NaN]}')", "gave nan"),
        ('forge(b\'{"values": ["text"]}\')', "sent what are no values"),
        ("pass", "did not end within 1 s, twice"),
        ("os._exit(3)", r"ended its process \(exit code 3\), twice"),
        ("open(os.environ['TMPDIR'] + '/large', 'wb').write(b'x' * (4 << 20))", "has written more"),
    ],
)
def test_process_cannot_harm_its_parent(
    hasty: BuiltTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    monkeypatch.setattr(confined_task, "MAX_WRITTEN", 1 << 20)
    code = FORGED.format(harmed=str(tmp_path / "harmed"), what=what)
    with pytest.raises((InvalidTask, MetricFailed), match=message):
        value(hasty, code)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_over(directory: Path) -> None:
    with opened(executing(directory)) as task:
        assert isinstance(task.code, ConfinedTask)
        own, pid = task.code._directory, task.code.pid
        inner = psutil.Process(pid).children(recursive=True)
        value(task, "import os; open(os.environ['TMPDIR'] + '/left', 'w').close(); x = 1")
        assert own.exists()
    assert not own.exists()
    assert not psutil.pid_exists(pid)
    wait_until(lambda: not any(each.is_running() for each in inner), 10)


PARENT = """
import sys, time
from tests.workers.evaluation.test_confined_task import *

task = opened(TaskSpec(sys.argv[1], "exact_match"))
print(task.code.pid, flush=True)
value(task, "import ctypes, re; ctypes.CDLL(None).prctl(1, 0); x = re.match('(a*)*b', 'a' * 60) is None")
"""


def test_process_ends_with_its_parent_whatever_its_code_does(directory: Path) -> None:
    spec = executing(directory)
    assert isinstance(spec.task, str)
    with subprocess.Popen([sys.executable, "-c", PARENT, spec.task], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(1)
        parent.kill()
    try:
        wait_until(lambda: not psutil.pid_exists(pid), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(is_true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# Every function of a task


KEYS = ["doc_to_text", "doc_to_target", "doc_to_choice", "process_docs", "process_results", "custom_dataset", "class"]


def with_function(directory: Path, key: str) -> TaskSpec:
    """A task with a Python function. Its module writes the file `ran` when it is imported."""
    (directory / "code.py").write_text(
        f"open({str(directory / 'ran')!r}, 'w').close()\ndef function(*_): return 'text'\n"
    )
    task = write_choices(directory)
    lines = [line for line in task.read_text().splitlines() if not line.startswith(f"{key}:")]
    task.write_text("\n".join([*lines, f"{key}: !function code.function", ""]))
    return TaskSpec(str(task), "acc")


@pytest.mark.parametrize("key", KEYS)
def test_no_function_of_a_task_is_imported_by_this_process(tmp_path: Path, key: str) -> None:
    spec = with_function(tmp_path, key)
    for access in (None, FileAccess((), (str(tmp_path),))):
        with pytest.raises(OwnCode):
            build(replace(spec, access=access))
        prepare(replace(spec, access=access))
    with pytest.raises(InvalidTask, match="run only from directories that the server's operator trusts"):
        build(replace(spec, access=FileAccess((str(tmp_path),))))
    assert not (tmp_path / "ran").exists()


def test_functions_of_a_task_run_confined(tmp_path: Path) -> None:
    with pytest.raises(InvalidTask, match=r"(PermissionError|Read-only file system).*ran"):
        check_task(with_function(tmp_path, "doc_to_text"))
    assert not (tmp_path / "ran").exists()


def test_facts_about_a_task_say_what_confines_it(task: BuiltTask) -> None:
    assert task.info.confined_by.startswith(("bubblewrap", "Landlock", "nothing"))


def test_in_process_scoring_takes_no_task_with_code(task: BuiltTask) -> None:
    with pytest.raises(RuntimeError, match="runs code of its own"):
        LocalMetrics().open(task, ({},))


def test_task_is_refused_where_it_cannot_be_confined(directory: Path) -> None:
    spec = executing(directory)
    with pytest.raises(
        InvalidTask, match=r"names Python functions .* this machine cannot confine one: Landlock is not available"
    ):
        ConfinedTask(spec, confinement=Unavailable)


def test_code_loads_no_other_data(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"problem": "secret"}\n')
    code = f"""
import datasets

def process_docs(dataset):
    return datasets.load_dataset("json", data_files={str(tmp_path / "secret.jsonl")!r})["train"]

def process_results(doc, results):
    return {{"exact_match": 1.0}}
"""
    with pytest.raises(InvalidTask, match="its code loads the data set 'json', which its YAML file does not name"):
        check_task(write_task(directory, "other", code, [{"problem": "one", "solution": "two"}]))


ENDS = """
import os

def process_docs(dataset):
    {when_built}
    return dataset

def process_results(doc, results):
    return {{"exact_match": 1.0}}

def text(doc):
    return os._exit(3) if doc["problem"] == "two" else "text"
"""


def test_task_whose_code_ends_its_process_is_refused(tmp_path: Path) -> None:
    documents = [{"problem": each, "solution": ""} for each in ("one", "two")]
    with pytest.raises(InvalidTask, match=r"building it ended its process$"):
        check_task(write_task(tmp_path, "built", ENDS.format(when_built="os._exit(3)"), documents))
    spec = write_task(tmp_path, "prompts", ENDS.format(when_built="pass"), documents)
    file = tmp_path / "prompts.yaml"
    file.write_text(file.read_text().replace('"{{problem}}"', "!function prompts_code.text"))
    with ConfinedTask(spec).built as task, pytest.raises(InvalidTask, match=r"building its prompts ended its process$"):
        documents_of(task, SETTINGS)


# Confinement changes no value


CODE = """
def process_docs(dataset):
    return dataset.map(lambda row: {"problem": row["problem"] + "?"}).filter(lambda row: "c" not in row["problem"])

def process_results(doc, results):
    return {"exact_match": len(doc["problem"]) / (3 + len(results[0]))}
"""


def render(messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
    """Render messages as a chat template does."""
    return f"{[sorted(message.items()) for message in messages]} {add_generation_prompt}"


@pytest.mark.parametrize("kind", ["options", "few-shot", "code"])
def test_prompts_and_values_are_those_without_confinement(tmp_path: Path, kind: str) -> None:
    if kind == "code":
        spec = write_task(tmp_path, "code", CODE, [{"problem": each, "solution": each} for each in "abcd"])
        here = build(spec, prepared=prepare(spec))
        responses: list[tuple[tuple[object, ...], ...]] = [((each,),) for each in ("", "text", "\u00e9\n\0")]
    else:
        spec = TaskSpec(str(write_choices(tmp_path)), "acc", num_fewshot=3 if kind == "few-shot" else None)
        here = build(spec)
        responses = [tuple(((-float(index * k % 5) / 3, False),) for k in (1, 2, 3)) for index in range(12)]
    settings = PromptSettings("Answer.", render, "tokenizer") if kind == "few-shot" else SETTINGS
    local = LocalMetrics()
    expected = documents_of(here, settings)
    local.open(here, tuple({d.instances[0].doc_id: d.instances[0].doc for d in each} for each in expected))
    with ConfinedTask(spec).built as task:
        assert task.code is not None
        found = documents_of(task, settings)
        for ours, theirs in zip(found[0], expected[0], strict=True):
            assert [(i.request_type, i.args, i.doc_id, i.repeats) for i in ours.instances] == [
                (i.request_type, i.args, i.doc_id, i.repeats) for i in theirs.instances
            ]
            assert ours.right() == theirs.right()
        answers = [Answers(0, index, each) for index, each in enumerate(responses)]
        values = task.code.values(answers)
        assert values == local.values(spec.digest, answers)
        assert len(set(values)) > 1
        assert task.order == here.order
        assert (task.subtasks[0].filter, task.info.num_samples) == (here.subtasks[0].filter, here.info.num_samples)


def test_changed_code_is_not_run_after_a_restart(tmp_path: Path) -> None:
    spec = executing(tmp_path)
    with opened(replace(spec, content=yaml_content(str(spec.task), None))) as task:
        assert isinstance(task.code, ConfinedTask)
        assert value(task, "x = 1") == 1
        inner = psutil.Process(task.code.pid).children(recursive=True)
        os.kill(task.code.pid, signal.SIGKILL)
        wait_until(lambda: not any(each.is_running() for each in inner), 10)
        (tmp_path / "py_problems_code.py").write_text(EXECUTES.replace('found["x"]', "2"))
        with pytest.raises(InvalidTask, match="one of the files that it reads has changed since the study was planned"):
            value(task, "x = 1")


def test_process_that_was_killed_is_replaced(directory: Path) -> None:
    with opened(executing(directory)) as task:
        assert isinstance(task.code, ConfinedTask)
        before = task.code.pid
        inner = psutil.Process(before).children(recursive=True)  # of bwrap, which end with it
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: not any(each.is_running() for each in inner), 10)
        assert value(task, "x = 0.5") == 0.5
        assert task.code.pid != before


# The metric executes the answer in the sandbox for programs, with a limit that the answer names.
EXECUTES_IN_TIME = """
def process_docs(dataset):
    return dataset

def process_results(doc, results):
    import evaluate

    limit, _, program = results[0].partition(":")
    metric = evaluate.load("code_eval")
    found, _ = metric.compute(predictions=[[program]], references=[""], timeout=float(limit))
    return {"exact_match": found["pass@1"]}
"""


def test_task_may_ask_for_processor_time_of_programs(directory: Path) -> None:
    """The kernel's limit of a program is the one that the task asked for, in whole seconds."""
    spec = write_task(directory, "py_limits", EXECUTES_IN_TIME, [{"problem": "one", "solution": "two"}])
    limited = "import resource\nassert resource.getrlimit(resource.RLIMIT_CPU)[0] == {}"
    with opened(spec) as task:
        for limit, seconds in ((0.5, 1), (4, 4), (60, 60)):
            assert value(task, f"{limit}:{limited.format(seconds)}") == 1
        assert value(task, f"4:{limited.format(3)}") == 0
        for wrong in ("61", "0", "nan"):
            with pytest.raises(InvalidTask, match=r"a limit of .* s for a program; at most 60 s are accepted"):
                value(task, f"{wrong}:pass")
