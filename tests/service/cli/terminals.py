"""Terminals for tests of commands: alone, beside a valid study, or with a server."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.study.file import load_study
from service.cli.main import main
from service.jobs.search.local_run import DATABASE
from service.store import Store
from service.studies.preflight.examine import examine
from tests.service.site import Site
from tests.service.sums import score_baselines, sums_study, write_sums
from workers.types import Family

# Values that replace others in a document to make it invalid.
MUTANTS: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1e400,
    "",
    "x",
    "\0",
    "../..",
    [],
    {},
    [[]],
    {"a": {"b": []}},
    "/proc/self/mem",
)


@dataclass
class Terminal:
    """A terminal: a place in which commands are called."""

    capsys: pytest.CaptureFixture[str]

    def run(self, *arguments: Any) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of one command."""
        self.capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err


@dataclass
class Workplace(Terminal):
    """A terminal beside a directory with a valid study of a tiny family."""

    directory: Path
    models: Path

    def __post_init__(self) -> None:
        write_sums(self.directory)

    @property
    def study(self) -> dict[str, Any]:
        return {**sums_study(self.models), "name": "small", "limits": {"max_layers": 50}}

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def write(self, **changes: Any) -> Path:
        """Write the study to a file, with the values at dotted places (double underscores stand for dots) changed."""
        document = self.study
        for place, value in changes.items():
            put(document, place.replace("__", "."), value)
        file = self.directory / "study.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        return file

    def refused(self, *arguments: Any) -> str:
        """Call a command that is refused, and return its messages; each line begins with the command's name."""
        code, out, err = self.run(*arguments)
        assert (code, out) == (2, ""), err
        assert "Traceback" not in err
        lines = err.splitlines()
        assert lines
        assert all(line.startswith("mergesearch: ") for line in lines), err
        return "\n".join(line.removeprefix("mergesearch: ") for line in lines)

    def refused_study(self, **changes: Any) -> str:
        """Messages of `run` about the changed study. Checks that no database with a study is left."""
        message = self.refused("run", self.write(**changes), "--out", self.run_dir)
        assert not (self.run_dir / DATABASE).exists() or not studies_in(self.run_dir)
        return message

    def recipe_file(self, document: Any) -> Path:
        file = self.directory / "recipe.json"
        file.write_text(json.dumps(document))
        return file

    def copied(self, alias: str) -> Path:
        """A copy of one of the family's models, which a test may damage."""
        return Path(shutil.copytree(self.models / alias, self.directory / f"{alias}-copy"))

    def begin(self, *, scored: bool = False) -> None:
        """Store a run as it is just after its start.

        `scored` adds the baselines at full budget, and one searched trial that failed.
        """
        self.run_dir.mkdir(exist_ok=True)
        study = load_study(self.write())
        preflight = examine(study)
        store = Store(f"sqlite:///{self.run_dir / DATABASE}")
        record = store.create_job(
            kind="search",
            name=study.name,
            document=study.canonical(),
            accepted=replace(preflight.resolved(), version="0").to_json(),
        )
        if scored:
            score_baselines(store.open_attempt(record.id), preflight.baselines())
        store.close()


@dataclass
class ServerTerminal(Terminal):
    """A terminal in which every command uses the server of `site`."""

    site: Site

    def shown(self, *arguments: Any) -> str:
        """Output of a command that succeeds without messages."""
        code, out, err = self.run(*arguments, "--server", self.site.url)
        assert (code, err) == (0, "")
        return out

    def document(self, *arguments: Any) -> Any:
        return json.loads(self.shown(*arguments, "--json"))

    def refused(self, *arguments: Any, code: int = 2) -> str:
        """Messages of a refused command. Checks that its JSON output has the same messages."""
        found, out, err = self.run(*arguments, "--server", self.site.url)
        assert (found, out) == (code, ""), err
        told = "\n".join(line.removeprefix("mergesearch: ") for line in err.splitlines())
        assert err.count("mergesearch: ") == len(err.splitlines())
        found, out, err = self.run(*arguments, "--server", self.site.url, "--json")
        assert (found, out) == (code, "")
        problems = json.loads(err)["problems"]
        assert "\n".join(f"{p['field']}: {p['message']}" if p["field"] else p["message"] for p in problems) == told
        return told


def put(document: dict[str, Any], place: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    node: Any = document
    for part in parents:
        node = node[part]
    node[last] = value


def studies_in(directory: Path) -> tuple[Any, ...]:
    store = Store(f"sqlite:///{directory / DATABASE}")
    try:
        return store.jobs()
    finally:
        store.close()


def model_options(family: Family, *aliases: str) -> list[str]:
    """Options of `merge` with the places of models."""
    return [part for m in family.models if m.alias in aliases for part in ("--model", f"{m.alias}={m.directory}")]


def spoilt(document: Any, draw: random.Random) -> Any:
    """A copy of `document` in which one or two values, at any place, are left out or replaced by one of MUTANTS."""
    document = copy.deepcopy(document)
    for _ in range(draw.randint(1, 2)):
        *parents, last = draw.choice(list(_places(document)))
        node = document
        for part in parents:
            node = node[part]
        if draw.random() < 0.2:
            del node[last]
        else:
            node[last] = draw.choice(MUTANTS)
    return document


def _places(node: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*prefix, key)
        yield from _places(value, (*prefix, key))
