"""Machine profiles by name: a kind of machine with a number, a YAML file, or this machine."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from service.studies.planning.profiles import KINDS, MachineProfile

__all__ = ["profile_named", "read_profile"]

NAMED = re.compile(r"(?P<kind>[a-z0-9-]+)x(?P<count>[1-9][0-9]*)")
ACCEPTED = f"give one of {', '.join(KINDS)} with a number of GPUs or cores, such as h100x8, a YAML file, or here"


def profile_named(name: str, *, nodes: int | None = None, price: float | None = None) -> MachineProfile:
    """Find the machine profile that `name` stands for: "here", a YAML file, or a kind with a number such as "h100x8".

    `nodes` is the number of such machines; None means the number in a file, else one. `price`, if given, replaces the
    profile's price. Raises InvalidStudy for an unknown name, and for a file that cannot be read.
    """
    if name == "here":
        from service.studies.planning.here import this_machine

        found = this_machine()
    elif name.endswith((".yaml", ".yml", ".json")):
        found = read_profile(Path(name))
    else:
        parts = NAMED.fullmatch(name)
        kind, count = (name, 1) if name in KINDS else (parts["kind"], int(parts["count"])) if parts else ("", 1)
        if kind not in KINDS:
            raise InvalidStudy((Problem("--profile", f"{name!r} is no profile; {ACCEPTED}"),))
        found = _times(KINDS[kind], count, name)
    found = found if nodes is None else replace(found, nodes=nodes)
    return found if price is None else replace(found, price=price)


def _times(kind: MachineProfile, count: int, name: str) -> MachineProfile:
    return replace(
        kind, name=name, gpus=kind.gpus * count, cores=kind.cores * count, host_bytes=kind.host_bytes * count
    )


def read_profile(file: Path) -> MachineProfile:
    """Read a machine profile from a YAML file with the fields of `MachineProfile`.

    The file may name another profile in the field `like`; the file's other fields then replace the figures of that
    profile. Raises InvalidStudy with every problem.
    """
    import yaml

    try:
        document = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidStudy((Problem("--profile", f"{file}: cannot be read: {error}"),)) from error
    if not isinstance(document, dict):
        raise InvalidStudy((Problem("--profile", f"{file}: is not a mapping of fields to figures"),))
    kinds = {field.name: str(field.type) for field in fields(MachineProfile)}
    like = document.pop("like", None)
    if like is not None and (not isinstance(like, str) or like.endswith((".yaml", ".yml", ".json"))):
        raise InvalidStudy((Problem("--profile", f"{file}: like: {like!r} is no name of a profile, such as h100x8"),))
    problems = []
    for key, value in document.items():
        if key not in kinds:
            problems.append(f"{key!r} is not a field; give like, {', '.join(kinds)}")
        elif kinds[key] == "str":
            if not isinstance(value, str):
                problems.append(f"{key}: {value!r} is not a text")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            problems.append(f"{key}: {value!r} is not a number of at least 0; numbers as 3.35e+12 or 3350000000000")
        elif kinds[key] == "int" and value != int(value):
            problems.append(f"{key}: {value!r} is not a whole number")
        elif value == 0 and key not in ("gpus", "price"):
            problems.append(f"{key}: must be above 0")
    if like is None:
        problems += [
            f"{key} is missing; give it, or like: h100x8" for key in ("cores", "host_bytes") if key not in document
        ]
    if problems:
        raise InvalidStudy(tuple(Problem("--profile", f"{file}: {text}") for text in problems))
    changes: dict[str, Any] = {key: int(value) if kinds[key] == "int" else value for key, value in document.items()}
    changes = {"name": file.stem, "source": file.name} | changes
    try:
        found = replace(profile_named(like), **changes) if like is not None else MachineProfile(**changes)
    except InvalidStudy as error:
        raise InvalidStudy(
            tuple(Problem(each.field, f"{file}: like: {each.message}") for each in error.problems)
        ) from error
    needed = ("gpu_bytes", "gpu_flops", "gpu_flops_float32", "gpu_bandwidth", "link_bandwidth", "mapped_bandwidth")
    lacking = [name for name in needed if found.gpus and not getattr(found, name)]
    if lacking:
        raise InvalidStudy((Problem("--profile", f"{file}: gpus={found.gpus} needs {', '.join(lacking)}, or like"),))
    return found
