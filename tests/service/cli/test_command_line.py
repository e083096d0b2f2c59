"""The command line itself: wrong commands, help, schemas, and errors as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jsonschema import Draft202012Validator

from service.cli.main import SCHEMAS
from tests.service.cli.terminals import Workplace
from tests.test_imports import HEAVY


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_prints_a_valid_json_schema(place: Workplace, name: str) -> None:
    code, out, err = place.run("schema", name)
    assert (code, err) == (0, "")
    schema = json.loads(out)
    Draft202012Validator.check_schema(schema)
    assert not Draft202012Validator(schema).is_valid([])


def test_the_schema_of_the_study_file_accepts_the_study(place: Workplace) -> None:
    validator = Draft202012Validator(json.loads(place.run("schema", "study")[1]))
    assert validator.is_valid(place.study)
    assert not validator.is_valid({**place.study, "serch": {}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schema", "studdy"], "invalid choice: 'studdy'"),
        (["rnu"], "invalid choice: 'rnu'"),
        (["run"], "the following arguments are required: STUDY, --out"),
        ([], "the following arguments are required: COMMAND"),
        (["run", "x", "--out", "y", "--export", "worst"], "invalid choice: 'worst'"),
        (["export", "x", "best", "--out", "y", "--prefer", "math"], "'math' is not OBJECTIVE=WEIGHT"),
        (["export", "x", "best", "--out", "y", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_the_usage(place: Workplace, arguments: list[str], message: str) -> None:
    code, out, err = place.run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("usage: mergesearch")


def test_errors_as_json_hold_every_problem_with_its_field(place: Workplace) -> None:
    code, out, err = place.run(
        "run", place.write(serch={}, fidelity__eta=1), "--out", place.run_dir, "--check", "--json"
    )
    assert (code, out) == (2, "")
    told = json.loads(err)
    assert told["error"] == "InvalidStudy"
    assert {problem["field"] for problem in told["problems"]} == {"serch", "fidelity.eta"}
    assert all(problem["message"] for problem in told["problems"])
    code, _, err = place.run("trials", place.run_dir, "--json")
    assert code == 2
    assert json.loads(err)["error"] == "NotFound"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://u:s3cr3t@host/db", "database: 'mysql' is not supported; give sqlite:///FILE or postgresql://"),
        (
            "postgresql://u:s3cr3t@127.0.0.1:1/db",
            "database postgresql://u:***@127.0.0.1:1/db: does not answer: ",
        ),
    ],
)
def test_a_database_that_cannot_be_used_ends_the_server(place: Workplace, url: str, message: str) -> None:
    """The server ends with what is wrong with its database, and shows no password."""
    code, out, err = place.run("serve", "--data", place.run_dir, "--database", url, "--port", 0)
    assert code == (2 if "mysql" in url else 1)
    assert f"mergesearch: {message}" in err
    assert "s3cr3t" not in err + out


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    """These packages take from a tenth of a second to several seconds to import."""
    program = (
        "import sys, service.cli.main\n"
        f"try: service.cli.main.main({arguments})\n"
        "except SystemExit as end: assert not end.code\n"
        f"heavy = {HEAVY} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
