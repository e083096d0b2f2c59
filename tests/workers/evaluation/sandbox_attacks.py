"""Attacks by programs that a model might write, and their outcomes under each means of confinement.

`main` carries all of them out and prints the outcomes as JSON: for each means and attack the reason why it failed, null
if it succeeded. For means that this machine does not have, it prints what is missing, as text.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from workers.evaluation.available_confinement import lack_of
from workers.evaluation.bubblewrap import Bubblewrap
from workers.evaluation.confinement import Confinement
from workers.evaluation.execution import Executor
from workers.evaluation.landlock import Landlock
from workers.evaluation.system_calls import ConfinementUnavailable, limit_resources

__all__ = [
    "ATTACKS",
    "LIBC",
    "MEANS",
    "BubblewrapAlone",
    "BubblewrapVariant",
    "LimitsAlone",
    "NoConfinement",
    "Unavailable",
    "allowed",
    "as_ordinary_user",
    "main",
]


class NoConfinement(Landlock):
    def apply(self) -> str:
        return "nothing"


class LimitsAlone(Landlock):
    """A process with resource limits only: it may use all files and system calls."""

    def apply(self) -> str:
        limit_resources(self.limits())
        return "limits"


class Unavailable(Landlock):
    def apply(self) -> str:
        raise ConfinementUnavailable("Landlock is not available: no reason")


class BubblewrapAlone(Bubblewrap):
    """Namespaces and limits, without the filter of system calls."""

    filters_system_calls = False


@dataclass(frozen=True)
class BubblewrapVariant(BubblewrapAlone):
    """Namespaces and limits of the user that starts programs, with changed arguments of bwrap.

    `without` lists arguments to remove, `extra` lists arguments to add. If `passes_environment`, bwrap gets the
    environment.
    """

    without: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    passes_environment: bool = False

    def of_program(self, number: int) -> Self:
        return self

    def command(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        found, empty = super().command(command, environment)
        return found, dict(environment) if self.passes_environment else empty

    def arguments(self, environment: Mapping[str, str]) -> list[str]:
        given, size = super().arguments(environment), len(self.without)
        at = next(i for i in range(len(given)) if tuple(given[i : i + size]) == self.without)
        kept = [*given[:at], *given[at + size :]]
        first = kept.index("--perms")  # the first file
        return [*kept[:first], *self.extra, *kept[first:]]


MEANS: tuple[type[Confinement], ...] = (Bubblewrap, BubblewrapAlone, Landlock, NoConfinement)

LIBC = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
ATTACKS = {
    "read a file": "open('{outside}/secret').read()",
    "write a file": "open('{outside}/written', 'w')",
    "temporary file": "import tempfile; tempfile.TemporaryFile()",
    "symbolic link": "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n"
    "    os.symlink('{outside}/secret', d + '/s'); open(d + '/s').read()",
    "disk": "import os\nfor place in ('/', '/tmp', '/dev', '/dev/shm', '/run', '/var/tmp', '/home', '/root'):\n"
    "    try:\n        open(place + '/mergesearch-{port}', 'wb').write(bytes(1 << 20)); break\n"
    "    except OSError: pass\nelse: raise OSError('no place')\nos.remove(place + '/mergesearch-{port}')",
    "environment of the parent": "import os; assert open(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
    "memory of the parent": "import os; open(f'/proc/{{os.getppid()}}/mem').close()",
    "loopback": "import socket; socket.create_connection(('127.0.0.1', {port}), 5)",
    "abstract socket": "import socket; socket.socket(socket.AF_UNIX).connect('\\0{abstract}')",
    "signal": "import os; os.kill({pid}, 0)",
    "signal by a file": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {pid})",
    "signal all": "import os; os.kill(-1, 0)",
    "nested namespaces": LIBC + "assert libc.unshare(0x10000000) == 0, os.strerror(ctypes.get_errno())",
    "mount": LIBC + "assert libc.unshare(0x10020000) == 0 and libc.mount(b'none', b'/usr', b'tmpfs', 0, None) == 0",
    "fork": "import os; os.fork() or os._exit(0)",
    "program": "import subprocess; subprocess.run(['/usr/bin/true'], check=True)",
    "fork bomb": "import os\nfor _ in range(300):\n    os.fork() or os._exit(0)",
    "threads": "import threading\nthreading.stack_size(1 << 16)\nstop = threading.Event()\n"
    "threads = [threading.Thread(target=stop.wait, daemon=True) for _ in range(300)]\n"
    "try:\n    for each in threads: each.start()\nfinally: stop.set()",
    "memory": "import mmap; mmap.mmap(-1, 3 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)",
    "channel": "import os; [os.fstat(handle) for handle in range(4, 20)]",
}


def allowed(means: type[Confinement], *, is_root: bool) -> frozenset[str]:
    """The attacks that are expected to succeed under `means`.

    Landlock has no namespace in which threads could be counted. Bubblewrap alone lets programs start others, in its
    namespaces. Root's programs are in no namespace of users, in which further ones can be forbidden: the filter does.
    """
    if means is NoConfinement:
        return frozenset(ATTACKS) - {"channel"}  # closed in any case
    if means is BubblewrapAlone:
        return frozenset({"fork", "program", *(("nested namespaces", "mount") if is_root else ())})
    return frozenset({"threads"} if means is Landlock else ())


def main() -> None:
    outside = Path(tempfile.mkdtemp(prefix="mergesearch-outside-"))
    outside.chmod(0o755)
    (outside / "secret").write_text("secret")
    name = f"mergesearch-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        subprocess.Popen(["sleep", "100"]) as process,
    ):
        local.bind(f"\0{name}")
        local.listen()
        fields = {"outside": outside, "port": server.getsockname()[1], "abstract": name, "pid": process.pid}
        programs = [attack.format(**fields) for attack in ATTACKS.values()]
        found: dict[str, object] = {}
        for means in MEANS:
            own = Bubblewrap if issubclass(means, Bubblewrap) else Landlock
            if lack := lack_of(own().of_program(0)):
                found[means.__name__] = lack
                continue
            executor = Executor(confinement=means)
            # One at a time: some use all that a user may have.
            found[means.__name__] = {
                attack: executor.run([program])[0] for attack, program in zip(ATTACKS, programs, strict=True)
            }
            executor.close()
            assert (outside / "secret").read_text() == "secret"
            assert process.poll() is None
            with contextlib.suppress(FileNotFoundError):
                (outside / "written").unlink()
        process.kill()
    shutil.rmtree(outside)
    print(json.dumps(found))


def as_ordinary_user(command: Sequence[str], *, stage: Path) -> list[str]:
    """The command that lets root run `command` as the user nobody, who finds Python and this project.

    Both may be below directories that only root can enter, as /root. Other directories take their place, in a namespace
    of mounts of the command alone; `stage` is an empty directory.
    """
    places = [sys.base_prefix, sys.prefix, str(Path(__file__).parents[3])]
    private = [
        str(next(above for above in reversed(Path(place).parents) if not above.stat().st_mode & 1))
        for place in places
        if any(not above.stat().st_mode & 1 for above in Path(place).parents)
    ]
    lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs tmpfs {stage}"]
    for index, place in enumerate(places):
        lines += [f"mkdir {stage}/{index}", f"mount --bind {place} {stage}/{index}"]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {place}" for place in dict.fromkeys(private)]
    for index, place in enumerate(places):
        lines += [f"mkdir -p {place}", f"mount --bind {stage}/{index} {place}"] if private else []
    lines.append('exec setpriv --reuid 65534 --regid 65534 --clear-groups -- "$@"')
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines), "sh", *command]
