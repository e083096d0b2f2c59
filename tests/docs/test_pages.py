"""The pages name only existing things: links, paths, commands, study files, options, routes and folders."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from search_spaces.errors import InvalidStudy
from search_spaces.fidelity import Scheduler
from search_spaces.methods import METHODS
from search_spaces.spaces import SPACES
from search_spaces.study.file import load_study, parse_study, study_json_schema
from search_spaces.study.yaml import parse_document
from service.api.metrics import JOB, METRICS, SETBACKS
from service.api.openapi import install_openapi
from service.api.routes import (
    accounts,
    checks,
    cluster,
    events,
    exports,
    finetunes,
    jobs,
    login,
    models,
    notifications,
    operations,
    plots,
    queue,
    ray_dashboard,
    results,
    samples,
    served,
    trials,
)
from service.cli.main import main
from tests.docs.pages import PAGES, ROOT, Page
from tests.test_maps import PACKAGES
from workers.serving.replica import ReplicaMetrics
from workers.training.finetuning.fleet import ANALYSIS, SIDE_BY_SIDE, Analysis, parse_pipeline
from workers.training.finetuning.spec import finetune_json_schema

MAX_README_LINES = 200
MAX_CELL = 120  # characters of a cell in its tables, without the addresses of links
EXAMPLES = ROOT / "docs" / "examples"

every_page = pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])


def page_of(name: str) -> Page:
    return next(page for page in PAGES if page.name == name)


def made_up(text: str) -> Page:
    return Page(ROOT / "README.md", text)


def test_the_readme_is_short() -> None:
    """The README is short, and leads to the other pages."""
    readme = page_of("README.md")
    assert len(readme.text.splitlines()) <= MAX_README_LINES
    assert {"docs/index.md", "docs/tutorial.md"} <= set(readme.links())


def test_the_index_links_every_page() -> None:
    index = page_of("docs/index.md")
    linked = {(index.file.parent / link.partition("#")[0]).resolve() for link in index.links() if "://" not in link}
    assert [page.name for page in PAGES if page is not index and page.file not in linked] == []


def test_cells_of_the_readme_are_short() -> None:
    cells = [cell for line in page_of("README.md").prose.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert len(cells) > 20
    assert [cell for cell in cells if len(re.sub(r"\]\(\S+\)", "]", cell)) > MAX_CELL] == []


# Links and paths.


@every_page
def test_links_lead_somewhere(page: Page) -> None:
    assert page.broken_links() == []


@every_page
def test_paths_exist(page: Page) -> None:
    assert page.missing_paths() == []


@every_page
def test_contents_name_a_section_once(page: Page) -> None:
    """A list of a page's sections begins no two entries with the same section."""
    entries = re.findall(r"^- \[[^\]]*\]\((#[^)]*)\)", page.prose, re.MULTILINE)
    assert len(set(entries)) == len(entries)


def test_a_link_or_a_path_that_leads_nowhere_is_noticed() -> None:
    page = made_up("[a](docs/none.md) [b](docs/hm3.md#none) [c](#none) [d](docs/hm3.md#the-method) `service/none.py`")
    assert page.broken_links() == ["docs/none.md", "docs/hm3.md#none", "#none"]
    assert page.missing_paths() == ["service/none.py"]


# Commands.

# Commands that have commands of their own.
GROUPS = ("database", "users", "teams", "tokens", "webhooks", "mail")


def wrong_commands(page: Page, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines with a command or option that `mergesearch COMMAND --help` does not list."""
    inline = [code for code in page.code() if code.startswith("mergesearch ")]
    return [line for line in (*page.commands("mergesearch"), *inline) if not _is_known(shlex.split(line)[1:], capsys)]


def _is_known(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    if words[0].startswith("--") or words[0].isupper():
        words = ["", *words]
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *filter(None, words[: 2 if words[0] in (*GROUPS, "tasks") else 1]),
                "--help",
            ]
        )
    said = capsys.readouterr().out
    return ended.value.code == 0 and all(word in said for word in words[1:] if word.startswith("--"))


@every_page
def test_commands_are_those_of_the_command_line(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    assert wrong_commands(page, capsys) == []


def test_a_command_that_is_not_there_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    page = made_up(
        "```\nmergesearch walk study.yaml\nmergesearch run study.yaml --fast  # soon\nmergesearch studies\n```\n"
    )
    assert wrong_commands(page, capsys) == ["mergesearch walk study.yaml", "mergesearch run study.yaml --fast"]


def wrong_calls(page: Page) -> list[str]:
    """Calls of `make` and `python -m` whose target or module does not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    benchmarks = {file.stem.removeprefix("bench_") for file in (ROOT / "tests" / "benchmarks").glob("bench_*.py")}
    lines = [*page.commands("make"), *page.commands("python"), *page.code()]
    wrong = []
    for line in lines:
        words = shlex.split(line) if line.startswith(("make ", "python -m ")) else [""]
        named = [name for word in words if word.startswith("ONLY=") for name in word[5:].rstrip("]").split()]
        if words[0] == "make" and (words[1] not in targets or set(named) - benchmarks - {"NAME", "name"}):
            wrong.append(line)
        if words[0] == "python" and importlib.util.find_spec(words[2]) is None:
            wrong.append(line)
    return wrong


@every_page
def test_calls_of_make_and_of_modules_are_of_what_is_there(page: Page) -> None:
    assert wrong_calls(page) == []


def test_a_call_of_what_is_not_there_is_noticed() -> None:
    page = made_up(
        "```\nmake all\nmake test\n```\n`make bench ONLY=luck` `python -m service.none` `python -m service.server`"
    )
    assert wrong_calls(page) == ["make all", "make bench ONLY=luck", "python -m service.none"]


# Study files.


def studies_in(page: Page) -> Iterator[dict[str, Any]]:
    """YAML blocks that are studies; a block with some of the sections is laid over the quickstart's study."""
    whole = parse_document((EXAMPLES / "quickstart.yaml").read_bytes(), "quickstart", is_json=False)
    for block in page.blocks_in("yaml"):
        document = parse_document(block.encode(), page.name, is_json=False)
        if "merge_method" not in document and "training" not in document:
            yield document if "objectives" in document and "models" in document else whole | document


@every_page
def test_study_files_in_pages_are_valid(page: Page) -> None:
    for document in studies_in(page):
        parse_study(document)


def test_a_study_that_is_not_valid_is_noticed() -> None:
    page = made_up("```yaml\nfidelity: {scheduler: soon}\n```\n")
    with pytest.raises(InvalidStudy, match="soon"):
        parse_study(next(studies_in(page)))


def test_pages_show_both_kinds_of_yaml() -> None:
    shown = {page.name: len(list(studies_in(page))) for page in PAGES}
    assert {name: number for name, number in shown.items() if number} == {
        "README.md": 1,
        "docs/explanation/budgets.md": 2,
        "docs/hm3.md": 1,
        "docs/how-to/benchmarks.md": 4,
        "docs/how-to/chains.md": 1,
        "docs/how-to/constraints.md": 1,
        "docs/how-to/images.md": 2,
        "docs/how-to/layer-paths.md": 5,
        "docs/how-to/preferences.md": 1,
        "docs/how-to/warm-start.md": 1,
        "docs/reference/study-file.md": 5,
        "docs/tutorial.md": 1,
    }
    blocks = page_of("docs/how-to/merge.md").blocks_in("yaml")
    assert blocks == [(EXAMPLES / "mergekit.yml").read_text()]


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_the_reference_names_every_example(file: Path) -> None:
    """Every example is a study, and the reference of the study file links it."""
    load_study(file)
    assert f"../examples/{file.name}" in page_of("docs/reference/study-file.md").links()


# Options, routes, folders.


def rows(text: str) -> list[str]:
    """The first cells of the rows of the tables in `text`, without the heads of the tables."""
    return [cell for cell in re.findall(r"^\| (.+?) \|", text, re.MULTILINE) if cell.startswith("`")]


def options_in(text: str) -> set[str]:
    """Options that tables in `text` describe. In a row of several options, the first may name the others' section."""
    found = set()
    for cell in rows(text):
        first, *others = re.findall(r"`([a-z0-9_.]+)`", cell)
        section = first.rpartition(".")[0]
        found |= {first, *(f"{section}.{other}" if section and "." not in other else other for other in others)}
    return found


def options_of(section: str, value: Mapping[str, Any], definitions: Mapping[str, Any]) -> set[str]:
    """Options of a section of the study's schema, or the section itself if it is a single value.

    A section of several kinds has the option `kind` alone, as each kind has a table of its own.
    """
    if "oneOf" in value:
        return {f"{section}.kind"}
    properties = definitions.get(str(value.get("$ref", "")).rpartition("/")[2], {}).get("properties", ())
    return {f"{section}.{option}" for option in properties} or {section}


def defaults_in(text: str) -> dict[str, Any]:
    """Defaults that tables in `text` state as values, keyed by the last part of the option's name.

    Of `48; with ...`, the value is 48. Rows whose default is described in words are left out.
    """
    found: dict[str, Any] = {}
    for cell, stated in re.findall(r"^\| (`.+?) \| (.+?) \|", text, re.MULTILINE):
        options = [name.rpartition(".")[2] for name in re.findall(r"`([a-z0-9_.]+)`", cell)]
        value = stated.partition(";")[0]
        if "{" in value or re.search("[a-z]", re.sub("`[^`]*`|none|true|false", "", value)):
            continue
        values = yaml.safe_load(f"[{value.replace('`', '')}]")
        if len(values) == len(options):
            found |= {name: None if each == "none" else each for name, each in zip(options, values, strict=True)}
    return found


def of_schema(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Defaults of all options in the sections of `schema`, keyed by the option's name; sections may share a name."""
    found: dict[str, list[Any]] = {}
    for name, value in schema["properties"].items():
        for kind in (value, *value.get("anyOf", ())):
            section = definitions.get(str(kind.get("$ref", "")).rpartition("/")[2], {})
            if "properties" in section:
                for option, default in of_schema(section, {}).items():
                    found.setdefault(option, []).extend(default)
        if "default" in value:
            found.setdefault(name, []).append(value["default"])
    return found


# Defaults that a table states as "none".
NONE = {"[]", "none"}


def wrong_defaults(text: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """Options of `schema` for which a table in `text` states another default; None may stand for one that depends."""
    known = of_schema(schema, definitions)
    stated = {name: value for name, value in defaults_in(text).items() if name in known}
    assert stated
    return [
        f"{name}: {value}, not {known[name]}"
        for name, value in stated.items()
        if value not in known[name]
        and None not in known[name]
        and not (value is None and NONE & set(map(str, known[name])))
    ]


def test_defaults_of_options() -> None:
    """Tables state the defaults of the code."""
    schema, specification = study_json_schema(), finetune_json_schema()
    definitions = schema["$defs"]
    study, searchers, spaces, finetune = (
        page_of(f"docs/reference/{name}.md") for name in ("study-file", "searchers", "spaces", "finetune-file")
    )
    assert wrong_defaults(study.section("## Sections and options"), schema, definitions) == []
    assert wrong_defaults(study.section("## Attacks"), definitions["BertAttack"], {}) == []
    assert wrong_defaults(study.section("## Judges"), definitions["JudgeSpec"], {}) == []
    for searcher, options in definitions["Search"]["properties"].items():
        reference = options.get("anyOf", [options])[0].get("$ref", "").rpartition("/")[2]
        if searcher in ("gradient", "smac", "hm3", "refinement"):
            assert wrong_defaults(searchers.section(f"## `{searcher}`"), definitions[reference], {}) == [], searcher
    for kind, space in SPACES.items():
        if kind != "sfs":  # its only option has no default
            assert wrong_defaults(spaces.section(f"## `{kind}`"), space.model_json_schema(), {}) == [], kind
    assert wrong_defaults(finetune.section("## Options"), specification, specification["$defs"]) == []


def test_another_default_is_noticed() -> None:
    schema = {"properties": {"steps": {"default": 48}, "start": {"default": None}, "seeds": {"default": 3}}}
    table = "| `a.steps`, `seeds` | 48, 4; with others 5 | b |\n| `start` | none | c |\n| `rate` | that of `x` | d |\n"
    assert wrong_defaults(table, schema, {}) == ["seeds: 4, not [3]"]


def test_study_options_are_in_tables() -> None:
    """The tables list every option of the study file and no other."""
    schema = study_json_schema()
    _, text = page_of("docs/reference/study-file.md").prose.split("\n## Sections and options\n")
    sections, lists = text.split("\n## Tasks\n")[0].split("\n## Objectives and holdout\n")
    objectives, benchmarks = lists.split("\n## Benchmarks\n")
    benchmarks, attacks = benchmarks.split("\n## Attacks\n")
    attacks, judges = attacks.split("\n## Judges\n")
    expected = [options_of(name, value, schema["$defs"]) for name, value in schema["properties"].items()]
    assert options_in(sections) == set().union(*expected)
    specs = (schema["$defs"][kind]["properties"] for kind in ("ObjectiveSpec", "CostSpec"))
    assert options_in(objectives) == set().union(*specs)
    own = schema["$defs"]["BenchmarkSpec"]["properties"].keys() - schema["$defs"]["ObjectiveSpec"]["properties"].keys()
    assert options_in(benchmarks) == own
    kinds = (schema["$defs"][kind]["properties"] for kind in ("StressAttack", "DeepWordBugAttack", "BertAttack"))
    assert options_in(attacks) == set().union(*kinds)
    assert options_in(judges) == set(schema["$defs"]["JudgeSpec"]["properties"])


@pytest.mark.parametrize("searcher", ["gradient", "smac", "hm3", "refinement"])
def test_options_of_a_searcher(searcher: str) -> None:
    """Every option of a searcher, and of the refinement after it, is in its table, and no other."""
    definitions = study_json_schema()["$defs"]
    schema = definitions["Search"]["properties"][searcher]
    options = schema.get("anyOf", [schema])[0]["$ref"].rpartition("/")[2]
    text = page_of("docs/reference/searchers.md").section(f"## `{searcher}`")
    assert options_in(text) == set(definitions[options]["properties"])


def test_names_of_spaces_and_schedulers() -> None:
    """Every page that lists the spaces or the schedulers lists all."""
    page = page_of("docs/reference/study-file.md")
    (kinds,) = re.findall(r"^\| `search_space.kind` \| `layerwise` \| (.+?);", page.prose, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", kinds)) == sorted(SPACES)
    (schedulers,) = re.findall(r"^\| `fidelity.scheduler` \| `racing` \| (.+?);", page.prose, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", schedulers)) == sorted(get_args(Scheduler))
    table = page_of("docs/reference/spaces.md").prose.split("\n## ")[0]
    assert sorted(re.findall(r"^\| \[`(\w+)`\]", table, re.MULTILINE)) == sorted(SPACES)
    rungs = page_of("docs/explanation/budgets.md").section("## Rungs")
    assert sorted(re.findall(r"^\| \[?`(\w+)`", rungs, re.MULTILINE)) == sorted(get_args(Scheduler))


def test_commands_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command and option is in the table of the command line, and no other."""

    def said(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        return capsys.readouterr().out

    page = page_of("docs/reference/cli.md")
    lines = re.findall(r"^\| `([a-z]+(?: [a-z]+)?)[^|]*\|([^|]*)\|", page.prose, re.MULTILINE)
    shown = {name: set(re.findall(r"`(--[a-z-]+)`", options)) for name, options in lines}
    commands = re.findall(r"^    ([a-z]+)\b", said(), re.MULTILINE)
    assert len(commands) > 15
    for group in GROUPS:
        commands.remove(group)
        commands += [f"{group} {name}" for name in re.findall(r"^    ([a-z]+)\b", said(group), re.MULTILINE)]
    commands += [f"tasks {name}" for name in re.findall(r"^    ([a-z]+)\b", said("tasks"), re.MULTILINE)]
    everywhere = {"--help", "--json"}
    listed = {name: set(re.findall(r"--[a-z-]+", said(*name.split()).split("options:")[1])) for name in commands}
    assert shown == {name: options - everywhere for name, options in listed.items()}


@pytest.mark.parametrize(
    ("heading", "schema"), [("summary.json", "summary"), ("pareto.json", "pareto"), ("trials.jsonl", "trial")]
)
def test_keys_of_result_files(heading: str, schema: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of a result file is in its table, and no other."""
    main(["schema", schema])
    text = page_of("docs/reference/result-files.md").section(f"## {heading}")
    shown = [key for cell in rows(text) for key in re.findall(r"`(\w+)`", cell)]
    assert sorted(shown) == sorted(json.loads(capsys.readouterr().out)["properties"])


def test_finetuning_options_are_in_a_table() -> None:
    """The table lists every option of a fine-tuning and no other."""
    schema = finetune_json_schema()
    _, text = page_of("docs/reference/finetune-file.md").prose.split("## Options")
    expected = {SIDE_BY_SIDE, *(f"{ANALYSIS}.{name}" for name in Analysis.model_fields)}
    for name, value in schema["properties"].items():
        kinds = [*value.get("anyOf", ()), value]  # of an optional section
        expected |= max((options_of(name, kind, schema["$defs"]) for kind in kinds), key=len)
    assert options_in(text.split("## Guarantees")[0]) == expected


def test_specifications_in_pages_are_valid() -> None:
    one, fleet, images, clip = (
        parse_pipeline(parse_document(block.encode(), "finetuning", is_json=False))
        for block in page_of("docs/how-to/finetune.md").blocks_in("yaml")
    )
    assert (one.is_fleet, fleet.is_fleet, images.is_fleet, clip.is_fleet) == (False, True, False, False)
    assert images.experts["mnist"].data.images is not None
    assert clip.experts["pets"].data.templates is not None


@pytest.mark.parametrize("kind", SPACES)
def test_every_option_of_a_space_is_in_its_table_and_no_other(kind: str) -> None:
    text = page_of("docs/reference/spaces.md").section(f"## `{kind}`")
    assert options_in(text) == set(SPACES[kind].model_fields) - {"kind"}


def test_defaults_of_m3_are_in_its_table() -> None:
    text = page_of("docs/reference/spaces.md").section("## `m3`")
    section = SPACES["m3"](kind="m3").model_dump(mode="json")
    shown = dict(re.findall(r"^\| `(\w+)` \| (\S.*?) \|", text, re.MULTILINE))
    for option in ("methods", "alphas", "exponents", "scale", "k", "density", "trim"):
        assert yaml.safe_load(shown[option].strip("`")) == section[option], option


def test_options_are_read_from_rows_of_one_and_of_several() -> None:
    text = "| option | default |\n|---|---|\n| `name` | `a` |\n| `fidelity.low`, `high` | `b` |\n"
    assert options_in(text) == {"name", "fidelity.low", "fidelity.high"}


def test_every_route_is_in_the_table_and_no_other() -> None:
    from fastapi import FastAPI

    app = FastAPI()
    others = (
        checks,
        cluster,
        events,
        models,
        finetunes,
        trials,
        samples,
        results,
        plots,
        exports,
        accounts,
        login,
        queue,
        notifications,
        served,
    )
    for router in (*jobs.routers(), *(module.router for module in others)):
        app.include_router(router, prefix="/v1")
    app.include_router(operations.router)
    app.include_router(ray_dashboard.router)
    install_openapi(app)
    expected = {f"{verb.upper()} {path}" for path, verbs in app.openapi()["paths"].items() for verb in verbs}
    table = {row.strip("`") for row in rows(page_of("docs/reference/http.md").prose)}
    assert table == expected


def test_metrics_are_in_the_tables_with_their_labels() -> None:
    """The tables list every metric of the server and of replicas, with type and labels, and no other."""
    page = page_of("docs/how-to/monitoring.md")
    of_server, of_replicas = page.section("## Metrics of the server"), page.section("## Metrics of replicas and nodes")
    found = {}
    for name, kind, labels in re.findall(r"^\| `(mergesearch_\w+)` \| (\w+) \|([^|]*)\|", of_server, re.MULTILINE):
        of_jobs = JOB if name.startswith(("mergesearch_job_", "mergesearch_study_")) else ()
        found[name] = (kind, (*of_jobs, *re.findall(r"`(\w+)`", labels)))
    assert found == {metric.name: (metric.type, metric.labels) for metric in METRICS}
    events = next(line for line in of_server.splitlines() if "`mergesearch_job_setbacks_total`" in line)
    assert re.findall(r"`(\w+)`", events)[2:] == [kind.value for kind in SETBACKS]
    shown = re.findall(r"^\| `ray_(mergesearch_\w+?)(?:_total)?` \|", of_replicas, re.MULTILINE)
    assert shown == re.findall(r'"(mergesearch_\w+)"', inspect.getsource(ReplicaMetrics))


def test_the_tree_of_folders_is_that_of_the_packages() -> None:
    tree = next(block for block in page_of("docs/architecture.md").blocks_in("") if block.startswith("search_spaces/"))
    found: set[str] = set()
    above: list[str] = []
    for line in tree.splitlines():
        indented, name = re.findall(r"^( *)(\w+)/ ", line)[0]
        above = [*above[: len(indented) // 4], name]
        found.add(".".join(above))
    assert found - {"deploy", "docs", "tests"} == set(PACKAGES)


def test_counts_of_equal_methods_are_the_measured_ones() -> None:
    """Two pages say how many methods a GPU computed to the bits of a CPU; the others are those that the code names."""
    found = [
        re.search(r"\b(\d+) of (\d+) methods had the bits\b", page_of(name).text)
        for name in ("docs/explanation/determinism.md", "docs/measurements.md")
    ]
    counts = [tuple(map(int, each.groups())) for each in found if each is not None]
    assert counts == [(48, 51), (48, 51)]
    assert sum(method.depends_on_device for method in METHODS.values()) == 51 - 48
