"""The recipe "Add a route" of CONTRIBUTING.md, with a call of the clients and a command: the failures of a study."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extensions.tree import Tree

ROUTE = '''

@router.get(
    "/studies/{study_id:segment}/failures",
    response_model=None,
    responses={200: {"model": FailuresDocument}, **refusals(404)},
)
async def get_failures(study: Study, services: Context) -> Response:
    """The trials that failed, with their reasons."""
    found = await services.records.result(study.id, summary)
    return Json(FailuresDocument(failures=found["failures"]))
'''

DOCUMENT = '''

class FailuresDocument(TypedDict):
    """The trials of a study that failed."""

    failures: Annotated[list[FailureDocument], Field(description="Failed trials, by number.")]
'''

FLOW = '''

def failures(study: str) -> Flow[list[FailureDocument]]:
    """Return the failed trials of a study.

    Args:
        study: Id of the study.

    Examples:
        >>> client.failures("5f0c...")[0]["reason"]
    """
    document = yield from document_of(Call("GET", path_of(study, "failures")))
    return cast("FailuresDocument", document)["failures"]
'''

METHOD = """\
    def failures(self, reference: str) -> int:
        found = self._client.failures(self._client.find(reference)["id"])
        if self._as_json:
            print_json(found)
        else:
            print("".join(f"trial {failure['trial']}: {failure['reason']}\\n" for failure in found), end="")
        return 0

"""

VERB = """\
def failures(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.failures(options.study)


"""

COMMAND = """\
    command = server_verb("failures", verbs.failures, "List the failed trials of a study on a server.")
    command.add_argument("study", metavar="STUDY", help="id of the study, a prefix, or its name")
"""

TEST = """

def test_failures_are_those_of_the_summary(get: Any) -> None:
    assert get("/failures") == {"failures": get("/summary")["failures"]}
    assert get("/failures")["failures"]
"""

TEST_OF_THE_COMMAND = """

def test_failures_are_listed(finished: str, terminal: ServerTerminal) -> None:
    assert terminal.document("failures", finished) == [{"trial": 8, "reason": "NaN logits"}]
    assert terminal.shown("failures", finished) == "trial 8: NaN logits\\n"
"""

USED = """
import asyncio, json, tempfile
from pathlib import Path
from service.client import AsyncClient, Client
from tests.service.api.harness import ApiServer, finished_study

async def awaited(url, study):
    async with AsyncClient(url) as client:
        return await client.failures(study)

with tempfile.TemporaryDirectory() as directory, ApiServer(Path(directory)) as server:
    study = finished_study(server.store, num_trials=30).id
    with Client(server.url) as client:
        found = client.failures(study)
        described = client._http.get(f"{server.url}/openapi.json").json()
    assert asyncio.run(awaited(server.url, study)) == found
    operation = described["paths"]["/v1/studies/{study_id}/failures"]["get"]
    print(json.dumps({"found": found, "description": operation["description"]}))
"""

# What the recipe asks for: the route, the clients, the command.
OF_THE_ROUTE = [
    "service/api/routes/results.py",
    "service/schemas/api.py",
    "docs/reference/http.md",
    "tests/service/api/test_results.py",
]
OF_THE_CLIENTS = ["service/client/flows.py", "service/client/awaited.py", "service/client/blocking.py"]
OF_THE_COMMAND = [
    "service/cli/remote.py",
    "service/cli/verbs.py",
    "service/cli/main.py",
    "docs/reference/cli.md",
    "tests/service/cli/test_remote.py",
]


def add_route(tree: Tree) -> None:
    module, schemas = "service/api/routes/results.py", "service/schemas/api.py"
    tree.insert(
        module, "from service.schemas.api import FailuresDocument\n", before="from service.schemas.api import .*"
    )
    tree.append(module, ROUTE)
    tree.insert(
        schemas, "from service.schemas.files import FailureDocument\n", before="from service.schemas.files import .*"
    )
    tree.insert(schemas, '    "FailuresDocument",\n', before='    "FieldProblem",')
    tree.append(schemas, DOCUMENT)
    row = "| `GET /v1/studies/{study_id}/failures` | the trials that failed, with reasons |\n"
    tree.insert("docs/reference/http.md", row, before=r"\| `GET /v1/studies/\{study_id\}/report` .*")
    tree.append("tests/service/api/test_results.py", TEST)


def add_call(tree: Tree) -> None:
    flows = "service/client/flows.py"
    tree.insert(flows, '    "failures",\n', before='    "finished_export",')
    tree.insert(
        flows,
        "        FailuresDocument,\n",
        before=r"        StudyDocument,",
    )
    tree.insert(
        flows,
        "    from service.schemas.files import FailureDocument\n",
        before=r"    from service.schemas.files import .*",
    )
    tree.append(flows, FLOW)
    for name in ("awaited", "blocking"):
        tree.insert(
            f"service/client/{name}.py",
            f"    failures = {name}(flows.failures)\n",
            after=rf"    summary = {name}\(flows.summary\)",
        )


def add_command(tree: Tree) -> None:
    tree.insert("service/cli/remote.py", METHOD, before=r"    def trials\(self, .*")
    tree.insert("service/cli/verbs.py", VERB, before=r"def export\(options: .*")
    tree.insert("service/cli/main.py", COMMAND, before=r'    command = server_verb\("export", .*')
    row = "| `failures STUDY` | `--server` | lists the trials that failed |\n"
    tree.insert("docs/reference/cli.md", row, before=r"\| `log JOB` .*")
    tree.append("tests/service/cli/test_remote.py", TEST_OF_THE_COMMAND)


@pytest.mark.slow
def test_add_a_route(tmp_path: Path) -> None:
    """A route is two modules, a call of the clients three, a command three; each has its rows and tests."""
    tree = Tree(tmp_path / "repository")
    add_route(tree)
    add_call(tree)
    add_command(tree)
    assert tree.changed == OF_THE_ROUTE + OF_THE_CLIENTS + OF_THE_COMMAND
    found = json.loads(tree.run(USED))
    assert found["description"] == "The trials that failed, with their reasons."
    assert found["found"]
    tree.test(
        "tests/service/api/test_results.py",
        "tests/service/client/test_clients.py",
        "tests/service/cli/test_remote.py",
        "tests/docs/test_pages.py",
        "-k",
        "failures_are or both_clients or every_route or commands",
    )
