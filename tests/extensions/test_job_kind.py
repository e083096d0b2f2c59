"""The recipe "Add a kind of job" of CONTRIBUTING.md: jobs that count, whose drivers are killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extensions.tree import Tree

PACKAGE = '''"""Counts as jobs, an event for each number.

- `kind`: the declaration, and the work
"""
'''

KIND = '''"""Counts as a kind of job: events with the numbers from 1 to the submitted one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.yaml import read_document
from service.jobs.base import Accepted, Attempt, JobKind, RequestContext, View
from service.types import JobRecord, JobState

if TYPE_CHECKING:
    from service.store import Store
    from service.store.artifacts import ArtifactStore

__all__ = ["COUNT"]

NUMBER = "number"


def _schemas(template: str) -> Mapping[str, Any]:
    properties = {"name": {"type": "string"}, "to": {"type": "integer", "minimum": 1}}
    return {"Count": {"type": "object", "properties": properties, "required": ["name", "to"]}}


def _accept(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    if not isinstance(document.get("name"), str):
        raise InvalidStudy((Problem("name", "give a name"),))
    if type(document.get("to")) is not int:
        raise InvalidStudy((Problem("to", f"{document.get('to')!r:.40} is not accepted; give a whole number"),))
    return Accepted(document["name"], document, {})


def _work(attempt: Attempt) -> None:
    attempt.writer.set_state(JobState.RUNNING)
    job = attempt.job
    counted = sum(event.kind == NUMBER for event in attempt.store.events(job.id))
    for number in range(counted + 1, job.document["to"] + 1):
        attempt.writer.add_event(NUMBER, {"number": number})
        attempt.heartbeat.progress = {"number": number}
        attempt.progressed(f"counted {number}")
        time.sleep(0.05)
    attempt.heartbeat.send()
    attempt.writer.set_state(JobState.COMPLETE)


def _documents() -> tuple[type, type]:
    from typing_extensions import TypedDict

    from service.schemas.api import JobDocument

    class CountDocument(JobDocument):
        """A count on the server."""

        number: int

    class CountProgressDocument(TypedDict):
        """The progress of a count."""

        number: int

    return CountDocument, CountProgressDocument


def _view(jobs: Sequence[JobRecord], store: Store, artifacts: ArtifactStore) -> Sequence[View]:
    return [View({"number": (job.progress or {}).get("number", 0)}) for job in jobs]


COUNT = JobKind(
    name="count",
    noun="count",
    resource="count",
    collection="counts",
    document_noun="count file",
    document_link="count",
    schema_name="Count",
    schemas=_schemas,
    is_document=lambda document: "to" in document,
    load=read_document,
    accept=_accept,
    work=_work,
    documents=_documents,
    view=_view,
    links=("count", "events", "log"),
)
'''

ROWS = """\
| `POST /v1/counts` | create a count |
| `GET /v1/counts` | list counts |
| `GET /v1/counts/{count_id}` | state and progress of a count |
| `GET /v1/counts/{count_id}/count` | the count file |
| `GET /v1/counts/{count_id}/events` | events of a count |
| `PUT /v1/counts/{count_id}/sharing` | share a count |
| `GET /v1/counts/{count_id}/log` | log of a count |
| `PATCH /v1/counts/{count_id}` | edit a count |
| `POST /v1/counts/{count_id}:pause` | pause a count |
| `POST /v1/counts/{count_id}:cancel` | cancel a count |
| `POST /v1/counts/{count_id}:resume` | resume a count |
| `DELETE /v1/counts/{count_id}` | delete a count |
"""

TEST = '''"""Work on counts."""

import pytest

from search_spaces.errors import InvalidStudy
from service.jobs.base import RequestContext
from service.jobs.count.kind import COUNT


def test_a_number_is_needed() -> None:
    with pytest.raises(InvalidStudy, match="to: 'x' is not accepted; give a whole number"):
        COUNT.accept({"name": "a", "to": "x"}, RequestContext())
'''

USED = r"""
import contextlib, io, json, os, signal, subprocess, sys, tempfile, time
from pathlib import Path
from service.cli.main import main
from service.client import Client
from tests.service.api.harness import ApiServer
from tests.service.site import LocalPreflight

TO = 40


def command(*arguments):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main([*arguments, "--server", server.url])
    return code, printed.getvalue()


def driver(data, job):
    return subprocess.Popen([sys.executable, "-m", "service.jobs.driver", "--data", str(data), "--job", job])


def numbers(job):
    return [event.payload["number"] for event in server.store.events(job) if event.kind == "number"]


with tempfile.TemporaryDirectory() as directory, ApiServer(Path(directory), preflight=LocalPreflight()) as server:
    data, file = Path(directory), Path(directory) / "count.yaml"
    file.write_text(f"name: long\nto: {TO}\n")
    assert command("submit", str(file))[0] == 0
    with Client(server.url) as client:
        (listed,) = client.jobs("count")
        job = listed["id"]
        again = client.submit_job("count", {"name": "short", "to": 1})
        client.cancel(again)
        client.delete(again)
        process = driver(data, job)
        deadline = time.monotonic() + 120
        while len(numbers(job)) < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        before = len(numbers(job))
        assert driver(data, job).wait(timeout=120) == 0
        kinds = [event.kind for event in client.events(client.find("long"))]
        found = client.job(listed)
        assert client._http.get(f"{server.url}{found['links']['count']}").json() == {"name": "long", "to": TO}
    refused = Client(server.url)._http.post(f"{server.url}/v1/counts", json={"name": "a", "to": "x"})
    print(json.dumps({
        "before": before,
        "numbers": numbers(job),
        "state": found["state"],
        "number": found["number"],
        "attempts": found["attempt"],
        "end": kinds[-1],
        "list": command("counts")[1],
        "show": command("show", "long")[1],
        "watch": command("watch", "long")[0],
        "refused": [refused.status_code, refused.json()["problems"]],
    }))
"""


@pytest.mark.slow
def test_recipe_for_a_kind_of_job(tmp_path: Path) -> None:
    """The recipe takes eight files, and its kind works over HTTP, in the clients and commands, and after a kill."""
    tree = Tree(tmp_path / "tree")
    (tree.root / "service" / "jobs" / "count").mkdir()
    tree.write("service/jobs/count/__init__.py", PACKAGE)
    tree.write("service/jobs/count/kind.py", KIND)
    registry = "service/jobs/registry.py"
    tree.insert(
        registry, "from service.jobs.count.kind import COUNT\n", before="from service.jobs.finetune.kind import .*"
    )
    tree.replace(registry, "(SEARCH, FINETUNE, SERVING)", "(SEARCH, FINETUNE, SERVING, COUNT)")
    tree.insert("service/jobs/__init__.py", "- `count`: the kind of job that counts\n", after="- `finetune`: .*")
    tree.insert("docs/architecture.md", "        count/            counts\n", after="        finetune/ .*")
    tree.insert("docs/reference/http.md", ROWS, before=r"\| `POST /v1/finetunes` .*")
    tree.insert("docs/reference/cli.md", "| `counts` | `--server` | list the counts of a server |\n", after=CLI_ROW)
    (tree.root / "tests" / "service" / "jobs" / "count").mkdir()
    tree.write("tests/service/jobs/count/test_kind.py", TEST)
    assert len(tree.changed) == 8

    pages = "route or command or tree"
    tree.test(
        "tests/test_maps.py", "tests/service/jobs/count", "tests/docs/test_pages.py", "-k", f"map or count or {pages}"
    )
    said = json.loads(tree.run(USED).splitlines()[-1])
    assert 3 <= said["before"] < 40, "the driver was killed in the middle"
    assert said["numbers"] == list(range(1, 41)), "each number once, in order"
    assert (said["state"], said["number"], said["attempts"], said["end"]) == ("COMPLETE", 40, 2, "end")
    assert "long" in said["list"]
    assert "complete" in said["show"].lower()
    assert said["watch"] == 0
    assert said["refused"] == [422, [{"field": "to", "message": "'x' is not accepted; give a whole number"}]]


CLI_ROW = r"\| `finetunes` .*"
