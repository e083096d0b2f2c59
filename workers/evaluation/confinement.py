"""Confinement of a process of Linux: the files that it may use, the system calls that it may make, and its limits.

Landlock decides which files can be read and written, a seccomp filter which system calls the kernel accepts. Both need
neither privileges nor namespaces, so that they work alike on one's own machine, as root, and in a container without
capabilities. What is refused once cannot be allowed again.

Sources: the kernel's `userspace-api/landlock.rst`, `userspace-api/seccomp_filter.rst`, and `landlock.h`, `seccomp.h`,
`filter.h` and `unistd.h` below `include/uapi`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Confinement", "ConfinementUnavailable", "system_paths"]

MIB = 1 << 20

# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

# Landlock: its three system calls have the same numbers on all machines.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
READ_FILE, READ_DIR, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FS_BITS = {1: 13, 2: 14, 3: 15, 5: 16}  # the first version of the interface with this number of rights
READ = READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | MAKE_SYM | REFER | TRUNCATE

# What the interpreter and libraries open, of files that hold no secrets.
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random")
DEVICES = ("/dev/null",)  # may be written too

# Classic BPF (linux/bpf_common.h) and what a filter returns (linux/seccomp.h).
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
X32 = 0x40000000  # system calls of the x32 interface of x86_64
CLONE_THREAD = 0x00010000

AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# System calls that fail with EPERM: (number on x86_64, on aarch64), None where there is none.
FORBIDDEN: Mapping[str, tuple[int | None, int | None]] = {
    # network
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # processes and programs; `clone` is below
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    # other processes; `kill` and its relatives are below
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "setrlimit": (160, 164),
    # memory that limits do not count, and means to talk to other processes
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    # file systems, and what Landlock does not govern
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount_setattr": (442, 442),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "unshare": (272, 97),
    "setns": (308, 268),
    "truncate": (76, 45),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    # the kernel itself
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),  # its requests pass no filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
}
# System calls that do nothing and report success, because libraries make them on files that they have just written.
IGNORED: Mapping[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
}
CLONE3 = (435, 435)  # its flags cannot be read by a filter; without it, the C library calls clone
CLONE = (56, 220)
SIGNALS = {"kill": (62, 129), "tgkill": (234, 131)}
PRCTL = (157, 167)
PRLIMIT = (302, 261)


class ConfinementUnavailable(RuntimeError):
    """This machine cannot confine a process; the message says what its operator has to allow."""


def system_paths() -> tuple[str, ...]:
    """The directories and files that a Python process reads: interpreter, packages, and libraries of the system.

    The working directory and other places of `sys.path` that hold no installed packages are left out.
    """
    packages = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    return tuple(dict.fromkeys([sys.prefix, sys.base_prefix, *packages, *SYSTEM]))


@dataclass(frozen=True)
class Confinement:
    """What a confined process may use; `apply` confines the calling process.

    `readable` and `writable` are absolute paths of directories (with all that is below them) and files. Of directories
    that are only `listable`, the names of all that is below them can be read. `memory_bytes` limits the address space,
    `file_bytes` the size of a file, `cpu_s` the processor time (None is no limit).
    """

    readable: tuple[str, ...] = field(default_factory=system_paths)
    writable: tuple[str, ...] = ()
    listable: tuple[str, ...] = ()
    memory_bytes: int = 8192 * MIB
    file_bytes: int = 1024 * MIB
    cpu_s: int | None = None

    def apply(self) -> str:
        """Confine this process for the rest of its life, and return what enforces it, in words.

        From then on the process

        - reads the files in `readable`, `writable` and some devices only, and writes those in `writable` only
        - lists these directories and those in `listable` only
        - has no network, starts no process and no program, and sends signals to itself only
        - neither reads other processes nor changes their priority, affinity or limits
        - changes no owners, modes, times or attributes of files, mounts nothing, and enters no namespace.

        The process must have a single thread, because Landlock applies to the calling thread. Raises
        ConfinementUnavailable if the system does not offer what is needed; then the process must not go on.
        """
        machine = platform.machine()
        if sys.platform != "linux" or machine not in AUDIT_ARCHITECTURES:
            raise ConfinementUnavailable(
                f"processes can be confined on Linux on {' and '.join(AUDIT_ARCHITECTURES)} only, not on "
                f"{sys.platform} on {machine}"
            )
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("a process with several threads cannot be confined: only one of them would be")
        for kind, most in self._limits().items():
            soft, hard = resource.getrlimit(kind)
            least = [most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
            resource.setrlimit(kind, (min(least), min(least)))
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        version = _restrict_files(self.readable, self.writable, self.listable)
        _filter_system_calls(list(_program(machine)))
        return f"Landlock {version}, seccomp"

    def _limits(self) -> dict[int, int]:
        limits = {
            resource.RLIMIT_AS: self.memory_bytes,
            resource.RLIMIT_FSIZE: self.file_bytes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 256,
        }
        return limits if self.cpu_s is None else {**limits, resource.RLIMIT_CPU: self.cpu_s}


def _call(name: str, *arguments: object) -> int:
    """Call a function of the C library; raises OSError if it returns -1."""
    library = ctypes.CDLL(None, use_errno=True)
    result = getattr(library, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _restrict_files(readable: Iterable[str], writable: Iterable[str], listable: Iterable[str]) -> int:
    """Let this process use these files only; returns the version of Landlock's interface."""
    try:
        version = _call("syscall", LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
    except OSError as error:
        why = {
            errno.ENOSYS: "the kernel is older than 5.13 or was built without it, or the container's seccomp profile "
            "does not allow landlock_create_ruleset, landlock_add_rule and landlock_restrict_self",
            errno.EOPNOTSUPP: "it is not among the kernel's security modules; add landlock to its parameter lsm=",
            errno.EPERM: "the container's seccomp profile does not allow landlock_create_ruleset, landlock_add_rule "
            "and landlock_restrict_self",
        }.get(error.errno or 0, str(error))
        raise ConfinementUnavailable(f"Landlock is not available: {why}") from error
    handled = (1 << max(bits for first, bits in FS_BITS.items() if first <= version)) - 1
    # Fields that an older kernel does not know are left out: it refuses a larger struct with values in them.
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", handled, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _call("syscall", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for place, rights in [
            *((place, READ) for place in readable),
            *((place, READ_DIR) for place in listable),
            *((place, WRITE) for place in writable),
            *((place, READ | WRITE_FILE) for place in DEVICES),
        ]:
            _allow(rules, place, rights & handled)
        _call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    finally:
        os.close(rules)
    return version


def _allow(rules: int, place: str, rights: int) -> None:
    try:
        handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(place):
            rights &= READ_FILE | WRITE_FILE | TRUNCATE
        _call("syscall", LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def _filter_system_calls(program: list[bytes]) -> None:
    code = ctypes.create_string_buffer(b"".join(program))
    # struct sock_fprog: the number of instructions, and their address after the compiler's padding
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    try:
        _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0)
    except OSError as error:
        raise ConfinementUnavailable(f"the kernel accepts no seccomp filter: {error.strerror}") from error


def _program(machine: str) -> Iterator[bytes]:
    """Yield the instructions of the filter of system calls (struct sock_filter) for this process."""
    column = list(AUDIT_ARCHITECTURES).index(machine)
    denied, ignored = ERRNO | errno.EPERM, ERRNO
    yield _instruction(LOAD, ARCHITECTURE)
    yield _instruction(JUMP_EQUAL, AUDIT_ARCHITECTURES[machine], 1, 0)
    yield _instruction(RETURN, KILL)
    yield _instruction(LOAD, NUMBER)
    if machine == "x86_64":
        yield _instruction(JUMP_AT_LEAST, X32, 0, 1)
        yield _instruction(RETURN, KILL)
    actions = {
        **{numbers[column]: denied for numbers in FORBIDDEN.values()},
        **{numbers[column]: ignored for numbers in IGNORED.values()},
        CLONE3[column]: ERRNO | errno.ENOSYS,
    }
    for number, action in actions.items():
        if number is not None:
            yield _instruction(JUMP_EQUAL, number, 0, 1)
            yield _instruction(RETURN, action)
    low = FIRST_ARGUMENT  # of the first argument; both machines are little-endian
    yield from _on_argument(CLONE[column], low, JUMP_ANY_BIT, CLONE_THREAD, ALLOW, denied)
    for numbers in SIGNALS.values():
        yield from _on_argument(numbers[column], low, JUMP_EQUAL, os.getpid(), ALLOW, denied)
    yield from _on_argument(PRCTL[column], low, JUMP_EQUAL, PR_SET_PDEATHSIG, denied, ALLOW)
    # prlimit reads limits if its third argument, the address of new ones, is null.
    for half in (0, 4):
        yield from _on_argument(PRLIMIT[column], low + 16 + half, JUMP_EQUAL, 0, None, denied)
    yield _instruction(RETURN, ALLOW)


def _on_argument(
    number: int, offset: int, test: int, value: int, if_true: int | None, otherwise: int | None
) -> Iterator[bytes]:
    """Yield instructions that decide about the system call `number` by half of an argument, at `offset`.

    None as a decision leaves it to the instructions that follow.
    """
    decisions = [_instruction(RETURN, decision) for decision in (if_true, otherwise) if decision is not None]
    to_false = 0 if if_true is None else 1
    yield _instruction(JUMP_EQUAL, number, 0, 3 + len(decisions))
    yield _instruction(LOAD, offset)
    yield _instruction(test, value, 0 if if_true is not None else len(decisions), to_false)
    yield from decisions
    yield _instruction(LOAD, NUMBER)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value & 0xFFFFFFFF)
