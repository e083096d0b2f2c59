"""Restrictions that a process applies to itself: resource limits, and a seccomp filter of its system calls.

Every program that is executed in a new process imports this module first. Therefore this module imports only modules
that load quickly.

Sources: the kernel's `userspace-api/seccomp_filter.rst`, and `seccomp.h`, `filter.h` and `unistd.h` below
`include/uapi`.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import resource
import struct
import sys
from collections.abc import Iterator, Mapping

__all__ = [
    "AUDIT_ARCHITECTURES",
    "CLONE",
    "FORBIDDEN",
    "PR_SET_PDEATHSIG",
    "ConfinementUnavailable",
    "call",
    "filter_system_calls",
    "forbid_new_privileges",
    "limit_resources",
    "refuse_threads",
]

# prctl(2)
PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

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
    "open_tree_attr": (467, 467),
    "file_setattr": (469, 469),
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
# Commands, which are second arguments, that fail with EPERM. Of fcntl: F_SETOWN, F_SETSIG and F_SETOWN_EX, by which the
# kernel sends signals to other processes. Of ioctl: FIOSETOWN and SIOCSPGRP, which do the same, and FS_IOC_SETFLAGS,
# FS_IOC32_SETFLAGS and FS_IOC_FSSETXATTR, which change attributes of files that are open for reading.
COMMANDS: Mapping[tuple[int, int], tuple[int, ...]] = {
    (72, 25): (8, 10, 15),
    (16, 29): (0x8901, 0x8902, 0x40086602, 0x40046602, 0x401C5820),
}


class ConfinementUnavailable(RuntimeError):
    """Raised if this machine has no sandbox for a process; the message says what the machine's operator must allow."""


def refuse_threads() -> None:
    """Raise RuntimeError if the calling process has several threads.

    Such a process cannot be confined, because most restrictions apply to one thread only. A system without `/proc` is
    not checked.
    """
    try:
        count = len(os.listdir("/proc/self/task"))
    except OSError:
        return
    if count > 1:
        raise RuntimeError(f"a process with {count} threads cannot be confined: confine it before it starts threads")


def limit_resources(limits: Mapping[int, int]) -> None:
    """Lower the resource limits of the calling process to the values in `limits`.

    `limits` maps kinds of resources, which are constants `resource.RLIMIT_*`, to their limits. A limit of the process
    that is already lower stays unchanged. When the process reaches its limit of processor time (`RLIMIT_CPU`), the
    kernel sends it the signal SIGXCPU. After one more second of processor time the kernel sends the signal SIGKILL.
    """
    for kind, most in limits.items():
        last = most + 1 if kind == resource.RLIMIT_CPU else most
        soft, hard = (math.inf if each == resource.RLIM_INFINITY else each for each in resource.getrlimit(kind))
        resource.setrlimit(kind, (int(min(most, soft)), int(min(last, hard))))


def forbid_new_privileges() -> None:
    """Prevent the calling process from gaining privileges by starting programs (`PR_SET_NO_NEW_PRIVS`)."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def filter_system_calls() -> None:
    """Make the kernel refuse forbidden system calls of the calling process for the rest of its life.

    The calls in FORBIDDEN are always refused. Some other calls are refused depending on their arguments, such as
    signals to other processes. Raises ConfinementUnavailable if the kernel accepts no filter, if the operating system
    is not Linux, or if the machine is not one of AUDIT_ARCHITECTURES.
    """
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in AUDIT_ARCHITECTURES:
        raise ConfinementUnavailable(
            f"processes can be confined on Linux on {' and '.join(AUDIT_ARCHITECTURES)} only, not on "
            f"{sys.platform} on {machine}"
        )
    program = list(_program(machine))
    code = ctypes.create_string_buffer(b"".join(program))
    # struct sock_fprog: the number of instructions, and their address after the compiler's padding
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    try:
        call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0)
    except OSError as error:
        raise ConfinementUnavailable(f"the kernel accepts no seccomp filter: {error.strerror}") from error


def call(name: str, *arguments: object) -> int:
    """Call the function `name` of the C library. Raises OSError if the function returns -1."""
    library = ctypes.CDLL(None, use_errno=True)
    result = getattr(library, name)(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def _program(machine: str) -> Iterator[bytes]:
    """Yield the instructions of the seccomp filter (struct sock_filter) for the calling process.

    `machine` is the name of the machine's architecture.
    """
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
    for numbers, commands in COMMANDS.items():
        for command in commands:
            yield from _on_argument(numbers[column], low + 8, JUMP_EQUAL, command, denied, None)
    # prlimit reads limits if its third argument, the address of new ones, is null.
    for half in (0, 4):
        yield from _on_argument(PRLIMIT[column], low + 16 + half, JUMP_EQUAL, 0, None, denied)
    yield _instruction(RETURN, ALLOW)


def _on_argument(
    number: int, offset: int, test: int, value: int, if_true: int | None, otherwise: int | None
) -> Iterator[bytes]:
    """Yield filter instructions that allow or refuse the system call `number` according to one of its arguments.

    - `offset`: the position, in the kernel's description of the call, of the 32 bits of the argument that are compared
    - `test`, `value`: the kind of comparison, and the number that the bits are compared with
    - `if_true`, `otherwise`: the filter's result if the comparison is true or false; with None, the instructions
      that follow decide
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
