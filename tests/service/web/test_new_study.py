"""Submission of a study on the page: text and form of its file, the server's messages, and files to begin with."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import Browser, Locator, Page, Route

from service.store.steering import SteeringStore
from service.types import JobRecord, Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.harness import ApiServer, finished_finetune, finished_study
from tests.service.web.driving import Visit, axe_violations, expect, visit

FINE = "✓ The file has no problem that is seen without models and tasks."


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory, own_port: int) -> Iterator[Company]:
    """A server with accounts."""
    with ApiServer(Path(tmp_path_factory.mktemp("company")), port=own_port) as server:
        yield Company.on(server)


def text_of(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Study file")


def field(page: Page, name: str) -> Locator:
    """The input of a field of the study file, such as search.seed."""
    return page.locator(f'[id="field-{name}"]')


def written(page: Page) -> dict[str, Any]:
    """The study file in the text field."""
    content: dict[str, Any] = yaml.safe_load(text_of(page).input_value())
    return content


def studies_named(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = http.get("/v1/studies", params={"name": name}).json()["studies"]
    return found


def test_a_study_is_submitted_by_keyboard(visitor: Visit, http: httpx.Client) -> None:
    """From the list, Tab, Enter and letters alone submit a study under another name, and lead to it."""
    page = visitor.goto("/studies")
    expect(page.get_by_role("link", name="New study")).to_be_visible()

    def tab_to(wanted: Locator) -> None:
        element = wanted.element_handle()
        for _ in range(200):
            page.keyboard.press("Tab")
            if element.evaluate("element => element === document.activeElement"):
                return
        raise AssertionError(f"Tab does not reach {wanted}")

    tab_to(page.get_by_role("link", name="New study"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    expect(page.get_by_test_id("check")).to_have_text(FINE)
    tab_to(field(page, "name"))
    page.keyboard.press("Control+A")
    page.keyboard.type("by-keyboard")
    tab_to(page.get_by_role("button", name="Submit"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("by-keyboard")
    (study,) = studies_named(http, "by-keyboard")
    assert page.url == f"{visitor.url}/studies/{study['id']}"


def test_text_and_form_are_one_file(visitor: Visit, http: httpx.Client) -> None:
    """An edit in the form changes its value in the text, where comments stay; an edit of the text changes the form."""
    example = http.get("/v1/studies:example").text
    page = visitor.goto("/studies/new")
    expect(text_of(page)).to_have_value(example)
    schema = http.get("/openapi.json").json()["components"]["schemas"]["Search"]["properties"]["max_trials"]
    trials = page.get_by_role("textbox", name="max_trials")
    expect(trials).to_have_value("4")
    expect(trials).to_have_accessible_description(schema["description"])
    trials.fill("60")
    expect(text_of(page)).to_have_value(example.replace("max_trials: 4", "max_trials: 60"))
    field(page, "search_space.kind").select_option("dis")
    field(page, "objectives.1.metric").fill("acc")
    page.get_by_role("button", name="Remove expert lookup").click()
    page.get_by_role("textbox", name="alias").first.fill("logic")
    page.get_by_role("textbox", name="alias").nth(1).focus()
    now = written(page)
    assert now["search_space"] == {"kind": "dis"}
    assert [each["metric"] for each in now["objectives"]] == ["exact_match", "acc", "exact_match"]
    assert list(now["models"]["experts"]) == ["logic", "text"]
    assert text_of(page).input_value().startswith(example.splitlines()[0])
    text_of(page).fill("name: other # mine\nsearch: {seed: 7}\n")
    expect(field(page, "name")).to_have_value("other")
    expect(field(page, "search.seed")).to_have_value("7")
    expect(field(page, "search_space.kind")).to_have_value("")
    page.get_by_role("button", name="Add an objective").click()
    field(page, "objectives.0.name").fill("math")
    assert written(page)["objectives"] == [{"name": "math", "task": "", "metric": ""}]
    assert "name: other # mine" in text_of(page).input_value()


def test_tasks_of_images_are_entered_in_the_form(visitor: Visit, http: httpx.Client) -> None:
    """Folders, data sets with their split, and tasks of the papers by name; heads are those of the study's models."""
    page = visitor.goto("/studies/new")
    expect(text_of(page)).not_to_have_value("")
    first, second = (page.get_by_role("group", name=f"objective {name}", exact=True) for name in ("math", "text"))
    first.get_by_role("combobox", name="source of the task").select_option("images")
    field(page, "objectives.0.task.images").fill("/data/pets")
    head = field(page, "objectives.0.task.head")
    models = list(written(page)["models"]["experts"])
    expect(head.get_by_role("option")).to_have_text(["choose a model", "base", *models])
    head.select_option("math")
    expect(field(page, "objectives.0.task.split")).to_have_count(0)
    assert written(page)["objectives"][0]["task"] == {"images": "/data/pets", "head": "math"}
    field(page, "objectives.0.task.images").fill("hub:owner/pets")
    expect(first.get_by_text("hub:owner/pets has no split; name the split to score")).to_be_visible()
    field(page, "objectives.0.task.split").fill("test")
    first.get_by_text("Classes, templates and keys").click()
    field(page, "objectives.0.task.classes").fill("cat, dog")
    task = {"images": "hub:owner/pets", "head": "math", "split": "test", "classes": ["cat", "dog"]}
    assert written(page)["objectives"][0]["task"] == task
    second.get_by_role("combobox", name="source of the task").select_option("suite")
    schema = http.get("/openapi.json").json()["components"]["schemas"]["ObjectiveSpec"]["properties"]["task"]
    expect(field(page, "objectives.1.task").get_by_role("option")).to_have_text(schema["examples"])
    field(page, "objectives.1.task").select_option("clip_eurosat")
    assert written(page)["objectives"][1]["task"] == "clip_eurosat"
    text_of(page).fill(text_of(page).input_value().replace("clip_eurosat", "gsm8k"))
    expect(second.get_by_role("combobox", name="source of the task")).to_have_value("name")
    expect(field(page, "objectives.1.task")).to_have_value("gsm8k")
    assert axe_violations(page) == []


def test_texts_with_commas_stay_whole(visitor: Visit) -> None:
    """Templates are entered one in a line; classes with commas are left to the text, and an edit keeps both."""
    page = visitor.goto("/studies/new")
    expect(text_of(page)).not_to_have_value("")
    templates, classes = ["a photo of a {}, a type of pet.", "a {}."], ["cat, tabby", "dog"]
    task = {"images": "/data/pets", "head": "math", "templates": templates, "classes": classes}
    objectives = [{"name": "math", "task": task, "metric": "acc"}]
    text_of(page).fill(yaml.safe_dump({**written(page), "objectives": objectives}))
    first = page.get_by_role("group", name="objective math", exact=True)
    first.get_by_text("Classes, templates and keys").click()
    expect(field(page, "objectives.0.task.classes")).to_have_text("classes: edited in the text")
    lines = field(page, "objectives.0.task.templates")
    expect(lines).to_have_value("\n".join(templates))
    lines.press("Control+End")
    page.keyboard.type("\none {}, drawn\n")
    assert written(page)["objectives"][0]["task"] == {**task, "templates": [*templates, "one {}, drawn"]}
    assert axe_violations(page) == []


def test_a_task_may_be_typed_whose_name_is_also_that_of_images(visitor: Visit) -> None:
    """The field of a task stays while its name is typed, and becomes a choice where the name is one of those."""
    page = visitor.goto("/studies/new")
    first = page.get_by_role("group", name="objective math", exact=True)
    first.get_by_role("combobox", name="source of the task").select_option("name")
    task = field(page, "objectives.0.task")
    task.press_sequentially("clip_eurosat_mine")
    task.press("Tab")
    assert written(page)["objectives"][0]["task"] == "clip_eurosat_mine"
    expect(task).to_have_value("clip_eurosat_mine")
    task.fill("clip_eurosat")
    task.press("Tab")
    expect(first.get_by_role("combobox", name="source of the task")).to_have_value("suite")
    assert written(page)["objectives"][0]["task"] == "clip_eurosat"


def test_problems_are_at_their_fields(visitor: Visit) -> None:
    """The server's messages are at the fields, and in a list that leads to the field or to the place in the text."""
    page = visitor.goto("/studies/new")
    field(page, "search.max_trials").fill("0")
    expect(page.get_by_test_id("check")).to_have_text("✕ 1 problem")
    described = re.compile("^0 is not accepted; give at least 1")
    expect(field(page, "search.max_trials")).to_have_accessible_description(described)
    page.get_by_role("button", name="search.max_trials").click()
    expect(field(page, "search.max_trials")).to_be_focused()
    field(page, "search.max_trials").fill("5")
    text = text_of(page).input_value().replace("engine: {max_model_len", "engine: {max_len")
    text_of(page).fill(text)
    page.get_by_role("button", name="engine.max_len").click()
    expect(text_of(page)).to_be_focused()
    selected = "[...document.querySelectorAll('textarea')].map(t => t.value.slice(t.selectionStart, t.selectionEnd))[0]"
    assert page.evaluate(selected) == "64"


def test_text_that_is_no_yaml_is_explained(visitor: Visit) -> None:
    """A torn text has the server's message with its line; the form waits."""
    visitor.expected = ("422",)
    page = visitor.goto("/studies/new")
    text_of(page).fill("name: a\nmodels: [\n")
    expect(page.locator("#problems")).to_contain_text("line 3")
    expect(page.get_by_text("The form follows when the text is YAML again")).to_be_visible()
    text_of(page).fill("name: a\n")
    expect(field(page, "name")).to_have_value("a")


def test_a_repeated_submission_makes_one_study(visitor: Visit, http: httpx.Client) -> None:
    """After an answer that was lost, or at a double click, Submit sends the same key; another content has another."""
    visitor.expected = ("ERR_FAILED", "Failed to load")
    page = visitor.goto("/studies/new")
    field(page, "name").fill("only-once")
    keys = []
    losses = itertools.count()

    def lose_the_first(route: Route) -> None:
        if route.request.method != "POST":
            return route.fallback()
        keys.append(route.request.headers["idempotency-key"])
        answer = route.fetch()
        return route.abort() if next(losses) == 0 else route.fulfill(response=answer)

    page.route("**/v1/studies", lose_the_first)
    submit = page.get_by_role("button", name="Submit")
    submit.click()
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    submit.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("only-once")
    assert len(studies_named(http, "only-once")) == 1
    assert len(set(keys)) == 1
    page.go_back()
    field(page, "name").fill("another")
    page.get_by_role("button", name="Submit").dblclick()
    expect(page.get_by_role("heading", level=1)).to_have_text("another")
    assert len(studies_named(http, "another")) == 1
    assert len(set(keys)) == 2


def test_a_refused_study_stays_in_the_editor(visitor: Visit, http: httpx.Client) -> None:
    """Problems of a refused submission are listed, and nothing is stored."""
    visitor.expected = ("422",)
    page = visitor.goto("/studies/new")
    field(page, "name").fill("with a space")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("name")
    expect(page.get_by_role("button", name="name", exact=True)).to_be_visible()
    assert studies_named(http, "with a space") == []


def test_a_study_is_cloned(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """A former study's file is the beginning of another one, under the next name."""
    page = visitor.goto(f"/studies/new?from={study.id}")
    expect(field(page, "name")).to_have_value(f"{study.name}-2")
    assert written(page) == {**http.get(f"/v1/studies/{study.id}/study").json(), "name": f"{study.name}-2"}
    expect(page.get_by_test_id("check")).to_have_text(FINE)
    page.get_by_role("combobox", name="Start from").select_option("")
    expect(text_of(page)).to_have_value(http.get("/v1/studies:example").text)


def test_experts_of_a_fine_tuning_are_filled_in(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """The base and the experts are those of the fine-tuning; with an objective, the server finds them."""
    fleet = finished_finetune(server.store, server.data_dir, name="for-a-study")
    page = visitor.goto(f"/studies/new?finetune={fleet.id}")
    expect(field(page, "models.base")).to_have_value(fleet.document["base"])
    experts = {alias: {"from_finetune": {"id": fleet.id}} for alias in ("math", "text")}
    assert written(page)["models"]["experts"] == experts
    expect(page.get_by_text("expert of a fine-tuning: edited in the text")).to_have_count(2)
    for part, text in (("name", "sums"), ("task", "gsm8k"), ("metric", "exact_match")):
        field(page, f"objectives.0.{part}").fill(text)
    expect(page.get_by_test_id("check")).to_have_text(FINE)
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("for-a-study-merge")
    (study,) = studies_named(http, "for-a-study-merge")
    file = http.get(f"/v1/studies/{study['id']}/study").json()
    assert {name: each["from_finetune"]["id"] for name, each in file["models"]["experts"].items()} == dict.fromkeys(
        experts, fleet.id
    )


def test_models_of_the_server_are_offered(visitor: Visit, http: httpx.Client) -> None:
    """While a model is written, the server's directories with that text are offered; one is chosen by keys."""
    models = http.get("/v1/models").json()["models"]
    page = visitor.goto("/studies/new")
    expect(text_of(page)).not_to_have_value("")
    base = field(page, "models.base")
    base.fill("/experts/")
    wanted = [model["path"] for model in models if "/experts/" in model["path"] and not model["is_adapter"]]
    assert wanted
    options = page.get_by_role("listbox").get_by_role("option")
    expect(options).to_have_count(min(50, len(wanted)))
    for option, path in zip(options.all(), wanted, strict=False):
        expect(option).to_contain_text(path)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(base).to_have_value(wanted[0])
    assert written(page)["models"]["base"] == wanted[0]


def test_examples_are_offered(visitor: Visit, http: httpx.Client) -> None:
    """Each shipped example is a choice and an address."""
    page = visitor.goto("/studies/new")
    picker = page.get_by_role("combobox", name="Start from")
    for name in ("front", "lfs"):
        picker.select_option(f"example {name}")
        expect(text_of(page)).to_have_value(http.get("/v1/studies:example", params={"name": name}).text)
        assert page.url.endswith(f"?example={name}")
    expect(page.get_by_test_id("check")).to_have_text(FINE)


def test_a_study_begins_with_a_mergekit_file(visitor: Visit, http: httpx.Client, tmp_path: Path) -> None:
    """The models and the merge are those of the file; what the server refuses is said in its words."""
    visitor.expected = ("422",)
    configuration = {
        "merge_method": "ties",
        "base_model": "owner/base",
        "models": [{"model": f"owner/{name}", "parameters": {"weight": 0.5, "density": 0.4}} for name in "ab"],
    }
    file = tmp_path / "my merge.yml"
    file.write_text(yaml.safe_dump(configuration))
    begun = http.post("/v1/studies:from_mergekit", json=configuration, params={"name": "my-merge"}).json()
    page = visitor.goto("/studies/new")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="A mergekit file").click()
    chooser.value.set_files(file)
    expect(field(page, "name")).to_have_value("my-merge")
    assert written(page) == begun["study"]
    assert written(page)["search"]["recipes"][0]["recipe"]["merge_method"] == "ties"
    page.reload()
    expect(page.get_by_text("Models and a recipe are those of my merge.yml")).to_be_visible()
    assert written(page) == begun["study"]
    visitor.goto("/studies/new?example=front")
    expect(field(page, "name")).to_have_value("front")
    expect(page.get_by_text("Models and a recipe are those of my merge.yml")).to_have_count(0)
    visitor.goto("/studies/new")
    expect(field(page, "name")).to_have_value("my-merge")
    file.write_text("merge_method: tise\n")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="A mergekit file").click()
    chooser.value.set_files(file)
    expect(page.get_by_role("alert")).to_contain_text("tise")


def test_a_recipe_is_enqueued(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """The recipe of a trial becomes a trial of the chosen study, with label and reason."""
    study = finished_study(server.store, name="with-a-recipe")
    recipe = http.get(f"/v1/studies/{study.id}/trials/5/recipe").json()
    page = visitor.goto(f"/studies/new?recipe={study.id}/5")
    page.get_by_role("textbox", name="label").fill("by hand")
    page.get_by_role("textbox", name="reason").fill("worth a second look")
    page.get_by_role("button", name="Enqueue").click()
    page.wait_for_url(f"**/studies/{study.id}/trials?origin=user")
    (request,) = SteeringStore(server.store).evaluation_requests(study.id)
    assert request.label == "by hand"
    assert request.recipe == recipe
    events = server.store.events(study.id, kinds=["steered"])
    assert [event.payload["reason"] for event in events] == ["worth a second look"]


@pytest.mark.slow
def test_the_plan_is_shown(visitor: Visit, http: httpx.Client) -> None:
    """The full check reads models and tasks; its samples, hours and plan are those of the API."""
    content, headers = http.get("/v1/studies:example").content, {"Content-Type": "application/yaml"}
    plan = http.post("/v1/studies:check", content=content, headers=headers, timeout=300).json()["plan"]
    page = visitor.goto("/studies/new")
    page.get_by_role("button", name="Check models and tasks").click()
    shown = page.get_by_label("Plan")
    expect(shown).to_contain_text(f"{plan['samples']['search']:,}", timeout=120_000)
    expect(shown).to_contain_text("The study can run.")
    shown.get_by_text("The plan in words").click()
    expect(shown.locator("pre")).to_have_text(plan["text"])
    field(page, "search.seed").fill("3")
    expect(shown).to_contain_text("The text was changed since this check.")


def test_a_study_is_submitted_for_a_team(browser: Browser, company: Company) -> None:
    """At a server with accounts, the study gets the team and the sharing that were chosen."""
    token = company.tokens["owner", Scope.SUBMIT]
    with visit(browser, company.server.url, headers=bearer(token)) as opened:
        page = opened.goto("/studies/new")
        field(page, "name").fill("for-red")
        page.get_by_role("combobox", name="Sharing").select_option("private")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("for-red")
    (study,) = (job for job in company.server.store.jobs("search") if job.name == "for-red")
    assert (study.owner, study.team, study.sharing.value) == ("owner", "red", "private")


def test_who_may_only_read_submits_nothing(browser: Browser, company: Company) -> None:
    """For a token with the scope read, the page has neither the link nor the editor."""
    token = company.tokens["owner", Scope.READ]
    with visit(browser, company.server.url, headers=bearer(token)) as opened:
        page = opened.goto("/studies")
        expect(page.get_by_role("heading", level=1)).to_have_text("Studies")
        expect(page.get_by_text("Loading", exact=True)).to_have_count(0)
        expect(page.get_by_role("link", name="New study")).to_have_count(0)
        page = opened.goto("/studies/new")
        expect(page.get_by_text("This session may only read")).to_be_visible()
        expect(page.get_by_role("button", name="Submit")).to_have_count(0)


def test_a_text_that_was_left_is_there_again(visitor: Visit, http: httpx.Client) -> None:
    """Who leaves the editor and returns, or reloads the page, finds the text as it was, and can begin again."""
    page = visitor.goto("/studies/new")
    field(page, "name").fill("half-written")
    page.get_by_role("link", name="Studies", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Studies")
    page.go_back()
    expect(field(page, "name")).to_have_value("half-written")
    page.reload()
    expect(field(page, "name")).to_have_value("half-written")
    page.get_by_role("button", name="Begin again").click()
    expect(text_of(page)).to_have_value(http.get("/v1/studies:example").text)
