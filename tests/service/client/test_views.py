"""The client's documents as displays in notebooks and as data frames, on the real application over HTTP."""

from __future__ import annotations

import ast
import asyncio
import builtins
import html.parser
import itertools
import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
import pytest

from service.client import AsyncClient, Client
from service.client.blocking import Client as BlockingClient
from service.client.views import COLOURS, MAX_ROWS, Front, Job, JobList, Summary, Trial, TrialList, TrialSamples
from service.errors import Conflict
from tests.docs.pages import ROOT, Page
from tests.service.api.harness import ApiServer, finished_finetune, finished_study
from tests.service.client.asker import Asker
from tests.service.results.report.test_page import contrast

if TYPE_CHECKING:
    from service.schemas.api import JobDocument

pytestmark = pytest.mark.slow  # starts an HTTP server

BAD = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with a finished study and a fine-tuning."""
    directory = tmp_path_factory.mktemp("views")
    with ApiServer(directory) as server:
        finished_study(server.store)
        finished_finetune(server.store, directory)
        yield server


@pytest.fixture
def client(server: ApiServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


@pytest.fixture(params=["blocking", "awaited"])
def ask(request: pytest.FixtureRequest, server: ApiServer) -> Asker:
    return Asker(request.param, server.url)


class Shown(html.parser.HTMLParser):
    """A parser of an HTML display: collects tags and text, and checks that every tag is closed."""

    def __init__(self, view: Any) -> None:
        super().__init__()
        self.source = view._repr_html_()
        self.tags: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(self.source)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def study_of(ask: Asker) -> str:
    found: str = ask("find", "math-text-lookup")["id"]
    return found


def test_documents_show_their_content(ask: Asker) -> None:
    """Each view shows its numbers in HTML and in one line, and remains a dict or a list."""
    study = ask("find", "math-text-lookup")
    trials, front, summary = (ask(name, study["id"]) for name in ("trials", "pareto", "summary"))
    best = ask("trial", study["id"], summary["best"]["trial"])
    samples = ask("samples", study["id"], 0)
    kinds = {Job: study, JobList: ask("studies"), TrialList: trials, Front: front, Summary: summary, Trial: best}
    for kind, view in {**kinds, TrialSamples: samples}.items():
        assert type(view) is kind
        assert isinstance(view, dict | list)
        assert json.loads(json.dumps(view)) == view
        assert len(repr(view).splitlines()) == 1
        assert Shown(view).text.strip()
    assert repr(study).startswith(f"<study math-text-lookup ({study['id']}): COMPLETE, trials: ")
    assert "math-text-lookup" in Shown(ask("studies")).text
    assert repr(trials) == "<21 trials: 10 COMPLETE, 9 PRUNED, 2 FAIL>"
    assert all(trial["label"] in Shown(trials).text for trial in trials)
    assert f"hypervolume {front['hypervolume']:.4g}" in repr(front)
    assert all(f"{row['values']['math']:.4g} ± " in Shown(front).text for row in front["front"])
    assert summary["finding"]["text"] in Shown(summary).text
    assert "95 % intervals" in Shown(summary).text
    assert all(name in Shown(best).text for name in best["configuration"] or {})
    finetune = ask("finetunes")[0]
    assert repr(finetune) == f"<fine-tuning family ({finetune['id']}): COMPLETE, math 4/4, text 4/4>"
    assert "4/4" in Shown(finetune).text


def test_a_fine_tuning_shows_where_losses_are_measured(client: Client) -> None:
    finetune = cast("dict[str, Any]", client.find("family"))
    moved = {**finetune["experts"]["math"]["progress"], "loss": 2.0, "loss_at": "offset", "weights_loss": 1.5}
    experts = {**finetune["experts"], "math": {**finetune["experts"]["math"], "progress": moved}}
    shown = Shown(Job({**finetune, "experts": experts})).text
    assert "2 at the offset, 1.5 at the weights" in shown
    assert shown.count("at the offset") == 1
    tangent = {**finetune["experts"]["math"]["progress"], "linearized_values": {"accuracy": 0.75}}
    experts["math"] = {**experts["math"], "progress": tangent}
    shown = Shown(Job({**finetune, "experts": experts})).text
    assert "; linearized: accuracy 0.75" in shown


def test_a_job_shows_the_steps_of_its_searcher(client: Client) -> None:
    """Steps are shown where there are some, and not for other studies or those of earlier versions."""
    study = cast("dict[str, Any]", client.find("math-text-lookup"))
    progress = {**study["progress"], "steps": 1200, "steps_planned": 6000}
    assert "1,200 of 6,000" in Shown(Job({**study, "progress": progress})).text
    for other in (study["progress"], {k: v for k, v in progress.items() if not k.startswith("steps")}):
        assert "steps" not in Shown(Job({**study, "progress": other})).text


def test_texts_of_users_are_escaped(client: Client) -> None:
    """A script in any text of a document is text in the display."""

    def planted(value: Any) -> Any:
        if isinstance(value, dict):
            return {(BAD if key == "math" else key): planted(each) for key, each in value.items()}
        if isinstance(value, list):
            return [planted(each) for each in value]
        return BAD if isinstance(value, str) and value != "search" else value

    study = client.find("math-text-lookup")
    samples = {
        "trial": 1,
        "against": 2,
        "objective": "math",
        "split": "search",
        "counts": None,
        "difference": None,
        "total": 1,
        "missing": ["why"],
        "next": None,
        "samples": [
            {
                "position": 0,
                "document": "0",
                "prompt": "p",
                "reference": "r",
                "a": {"value": 1.0, "response": "one", "is_truncated": False},
                "b": {"value": 0.0, "response": "two", "is_truncated": False},
            }
        ],
    }
    views: list[Any] = [study, client.studies(), client.trials(study["id"]), client.pareto(study["id"])]
    views += [client.summary(study["id"]), client.trial(study["id"], 12), client.finetunes()[0], TrialSamples(samples)]
    failed = next(trial for trial in views[2] if trial["state"] == "FAIL")
    for view in (*views, failed):
        bad = planted(view)
        made = (
            JobList([cast("JobDocument", Job(each)) for each in bad]) if isinstance(view, JobList) else type(view)(bad)
        )
        shown = Shown(made)
        assert BAD in shown.text
        assert set(shown.tags) <= {"div", "b", "span", "table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_colours_are_visible_on_light_and_dark_pages() -> None:
    """The dots of states have a contrast of at least 3 with white and with JupyterLab's dark background (WCAG 2.2)."""
    for colour in COLOURS.values():
        assert min(contrast(colour, "#ffffff"), contrast(colour, "#111111")) >= 3, colour


def test_displays_cost_no_request(server: ApiServer, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document shows what it has; a blocking client sends two requests, an awaited one none."""
    views = [client.find("math-text-lookup"), client.studies()]
    sent: list[str] = []
    send = BlockingClient._send

    def counted(self: BlockingClient, call: Any) -> Any:
        sent.append(call.path)
        return send(self, call)

    monkeypatch.setattr(BlockingClient, "_send", counted)
    for view in views:
        Shown(view)
    assert sent == []
    shown = Shown(client)
    assert sent == ["/v1/studies", "/v1/finetunes"]
    assert "math-text-lookup" in shown.text
    assert "family" in shown.text
    assert repr(client) == f"Client({server.url!r})"

    async def awaited() -> tuple[str, str]:
        async with AsyncClient(server.url) as client:
            return repr(client), Shown(client).text

    assert asyncio.run(awaited())[0] == f"AsyncClient({server.url!r})"
    assert server.url in asyncio.run(awaited())[1]


def test_client_without_a_server_shows_why() -> None:
    """The display of a client whose server is away has the reason, and raises nothing."""
    with Client("http://127.0.0.1:1") as client:
        assert "no answer" in Shown(client).text


def test_long_lists_are_cut(client: Client) -> None:
    """A display has at most so many rows, and says how many there are."""
    (trial, *_) = client.trials(client.find("math-text-lookup")["id"])
    many = TrialList({**trial, "number": number} for number in range(10_000))
    shown = Shown(many)
    assert shown.tags.count("tr") == MAX_ROWS + 1
    assert f"the first {MAX_ROWS} of 10000 trials" in shown.text
    jobs = JobList([client.studies()[0]] * 100)
    assert f"the last {MAX_ROWS} of 100 jobs" in Shown(jobs).text


def test_trials_are_a_data_frame(ask: Asker) -> None:
    """The frame has the columns of `trial_columns`, in the same order, and its values."""
    study = study_of(ask)
    frame = ask("trials", study).to_dataframe()
    expected = pd.DataFrame(ask("trial_columns", study))
    assert list(frame.columns) == list(expected.columns)
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-5, check_dtype=False)
    assert TrialList().to_dataframe().empty


def test_front_and_samples_are_data_frames(ask: Asker, client: Client) -> None:
    """A front has a row for each trial, and samples one for each sample, with columns for both trials."""
    study = study_of(ask)
    front = ask("pareto", study)
    frame = front.to_dataframe()
    assert frame["trial"].tolist() == [row["trial"] for row in front["front"]]
    assert frame["value.math"].tolist() == [row["values"]["math"] for row in front["front"]]
    assert "standard_error.lookup" in frame
    samples = ask("samples", study, 0, split="holdout")
    frame = samples.to_dataframe()
    assert len(frame) == len(samples["samples"]) > 0
    assert frame["a.value"].tolist() == [sample["a"]["value"] for sample in samples["samples"]]
    assert not [name for name in frame if name.startswith("b.")]
    both = ask("samples", study, 0, split="holdout", against=1).to_dataframe()
    assert both["b.response"].notna().all()


def test_pandas_is_needed_only_for_frames(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pandas everything is shown, and `to_dataframe` says what to install."""
    trials = client.trials(client.find("math-text-lookup")["id"])
    load = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError(name=name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    Shown(trials)
    with pytest.raises(Conflict, match=r"the Python package pandas is not installed here; .*pip install pandas"):
        trials.to_dataframe()


# The page about notebooks.

PAGE = Page.read(ROOT / "docs" / "how-to" / "notebook.md")


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """The value of a cell's last expression, as a notebook computes it."""
    *before, last = ast.parse(source).body
    exec(compile(ast.Module(before, []), "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_page_has_real_outputs(server: ApiServer) -> None:
    """Each cell of the page runs, and the text under it is what it shows."""
    names: dict[str, Any] = {}
    blocks = [*PAGE.blocks, ("python", "")]
    num_outputs = 0
    for (language, source), (following, expected) in itertools.pairwise(blocks):
        if language != "python" or "await " in source:
            continue
        value = run_cell(source.replace("http://127.0.0.1:8080", server.url), names)
        if following == "":
            num_outputs += 1
            said = re.sub("[0-9a-f]{32}", "5f0c6e9c9c3f4b7d8a1e2f3a4b5c6d7e", repr(value))
            assert said.replace(server.url, "http://127.0.0.1:8080") == expected.rstrip("\n")
        if hasattr(value, "_repr_html_"):
            Shown(value) if not isinstance(value, pd.DataFrame) else value._repr_html_()
    assert num_outputs >= 4
    names["client"].close()
