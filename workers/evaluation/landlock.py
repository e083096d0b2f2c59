"""Sandbox by Landlock and seccomp, which need neither privileges nor namespaces.

The sandbox works in the same way for a normal user, for root, and in a container without capabilities. A process
confines itself while it runs, so a process that is forked for a program is confined within a millisecond.

Sources: the kernel's `userspace-api/landlock.rst`, and `include/uapi/linux/landlock.h`.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Mapping, Sequence

from workers.evaluation.confinement import DEVICES, Confinement
from workers.evaluation.system_calls import ConfinementUnavailable, call

__all__ = ["Landlock"]

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


class Landlock(Confinement):
    """Sandbox for one process: Landlock limits its files, and seccomp filters its system calls.

    The process can still find out whether a path exists, and the size of the file there.
    """

    def command(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        return list(command), dict(environment)

    def _restrict_files(self) -> str:
        if len(os.listdir("/proc/self/task")) > 1:  # Landlock applies to the calling thread alone
            raise RuntimeError("a process with several threads cannot be confined: only one of them would be")
        return f"Landlock {_restrict_files(self.readable, self.writable, self.listable)}"


def _restrict_files(readable: Iterable[str], writable: Iterable[str], listable: Iterable[str]) -> int:
    """Restrict the calling process to the given files by Landlock, and return the version of Landlock's interface.

    The process may read the paths `readable`, read and write the paths `writable`, and list the directories `listable`;
    each directory includes everything below it. Paths that do not exist are ignored. Raises ConfinementUnavailable if
    the system has no Landlock.
    """
    try:
        version = call("syscall", LANDLOCK_CREATE_RULESET, None, 0, LANDLOCK_CREATE_RULESET_VERSION)
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
    rules = call("syscall", LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for place, rights in [
            *((place, READ) for place in readable),
            *((place, READ_DIR) for place in listable),
            *((place, WRITE) for place in writable),
            *((place, READ | WRITE_FILE) for place in DEVICES),
        ]:
            _allow(rules, place, rights & handled)
        call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
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
        call("syscall", LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)
