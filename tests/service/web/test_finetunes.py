"""Fine-tunings on the page: list, new one and details, compared with the API's answers."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from playwright.sync_api import Browser

from service.types import EventKind, JobRecord, JobState, Role, Scope
from tests.service.api.accounts import OPERATOR, Company, bearer
from tests.service.api.harness import ApiServer, analysed_fleet, finished_finetune, stored_finetune
from tests.service.web.driving import Visit, axe_violations, check_view, expect, press, visit


def analysis(name: str, *losses: float, samples: int = 7) -> dict[str, Any]:
    return {"samples": samples, "fleets": [analysed_fleet(name, *losses)]}


def cancel(server: ApiServer, job: str) -> None:
    server.store.open_attempt(job).set_state(JobState.CANCELLED)


@pytest.fixture(scope="module")
def tuned(server: ApiServer) -> JobRecord:
    """A fine-tuning of two experts that has ended, with an analysis."""
    return finished_finetune(server.store, server.data_dir, analysis=analysis("mergopt", 1.25, 2.5, 3.75, 0.5))


@pytest.fixture(scope="module")
def other(server: ApiServer) -> JobRecord:
    """A fine-tuning of the same experts by another method."""
    return finished_finetune(
        server.store,
        server.data_dir,
        name="other",
        analysis=analysis("sgd", 5.25, 6.5, 7.75, 8.5),
        method={"kind": "sgd"},
    )


def test_the_list_leads_to_a_fine_tuning(visitor: Visit, tuned: JobRecord, other: JobRecord) -> None:
    """The list has the state, the methods and the number of trained experts; it is searched by the server."""
    page = visitor.goto("/finetunes")
    row = page.get_by_role("row").filter(has_text="mergopt")
    expect(row).to_contain_text("complete")
    expect(row).to_contain_text("2 of 2")
    expect(page.get_by_role("link", name=other.name)).to_be_visible()
    page.get_by_role("textbox", name="Search by name, description or owner").fill("famil")
    expect(page.get_by_role("link", name=other.name)).to_have_count(0)
    assert page.url.endswith("?q=famil")
    row.get_by_role("link", name=tuned.name).press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(tuned.name)


def test_numbers_are_those_of_the_api(visitor: Visit, tuned: JobRecord, http: httpx.Client) -> None:
    """Progress, losses, evaluations and sizes of the experts are those that the API answers."""
    told = http.get(f"/v1/finetunes/{tuned.id}").json()["experts"]
    curves = http.get(f"/v1/finetunes/{tuned.id}/curves").json()["experts"]
    page = visitor.goto(f"/finetunes/{tuned.id}")
    table = page.get_by_role("region", name="Table of experts")
    for alias, expert in told.items():
        row = table.get_by_role("row").filter(has_text=alias)
        for text in (f"{expert['progress']['loss']:.3f}", "4 of 4", f"{expert['bytes'] / 1000:.2f} kB"):
            expect(row).to_contain_text(text)
    chart = page.get_by_role("group", name=re.compile("^Mean loss on the training data"))
    chart.press("ArrowRight")
    last = curves[0]["loss"][-1]
    said = f"{curves[0]['expert']}: loss {last['loss']:.3f} at update {last['step']}"
    expect(page.get_by_role("status").filter(has_text=said)).to_be_visible()
    expect(page.get_by_role("img", name=re.compile(f"^accuracy of each expert.*{0.5:.3f} at update 4"))).to_be_visible()


def test_an_expert_is_downloaded(visitor: Visit, tuned: JobRecord) -> None:
    """The link of an expert downloads its files as an archive."""
    page = visitor.goto(f"/finetunes/{tuned.id}")
    with page.expect_download() as begun:
        page.get_by_role("link", name="Download math").click()
    content = Path(begun.value.path()).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == ["family-math/config.json", "family-math/model.safetensors"]


def test_the_analysis_is_shown(visitor: Visit, tuned: JobRecord, http: httpx.Client) -> None:
    """Merges by method, the least joint loss, and the fits of task vectors are those of the API."""
    (fleet,) = http.get(f"/v1/finetunes/{tuned.id}/analysis").json()["fleets"]
    page = visitor.goto(f"/finetunes/{tuned.id}")
    table = page.get_by_role("region", name="Merges by method")
    for merge in fleet["merges"]:
        row = table.get_by_role("row").filter(has_text=merge["method"])
        expect(row).to_contain_text(f"{merge['mean']:.3f}")
    least = page.get_by_role("img", name="math and text. Least: 0.500 at math 1, text 1.")
    expect(least).to_be_visible()
    fits = page.get_by_role("region", name="Fitted distributions")
    expect(fits.get_by_role("row")).to_have_count(1 + 2 * 2)
    expect(fits).to_contain_text(f"{fleet['task_vectors'][0]['fits'][0]['distance']:.3f}")


def test_two_are_compared(visitor: Visit, tuned: JobRecord, other: JobRecord) -> None:
    """Another fine-tuning is chosen by its name, is in the address, and has columns and charts of its own."""
    page = visitor.goto(f"/finetunes/{tuned.id}")
    page.get_by_role("combobox", name="Compare with another fine-tuning").select_option(other.id)
    table = page.get_by_role("region", name="Merges by method")
    expect(table.get_by_role("columnheader", name="sgd: loss")).to_be_visible()
    expect(table.get_by_role("row").nth(1)).to_contain_text("5.250")
    expect(page.get_by_role("img", name=re.compile("^math and text, sgd"))).to_be_visible()
    assert page.url.endswith(f"?against={other.id}")


def test_what_cannot_be_compared_is_said(visitor: Visit, tuned: JobRecord, server: ApiServer) -> None:
    """A comparison that the server refuses is explained in its words."""
    unlike = finished_finetune(
        server.store, server.data_dir, name="unlike", analysis=analysis("mergopt", 1, 1, 1, 1, samples=9)
    )
    visitor.expected = ("409",)
    page = visitor.goto(f"/finetunes/{tuned.id}?against={unlike.id}")
    expect(page.get_by_role("alert")).to_contain_text("its losses are not those of the samples")
    server.store.delete_job(unlike.id)


def test_training_is_followed(hurried: Visit, server: ApiServer) -> None:
    """Progress and points of curves appear while an expert is trained, without loading the page again."""
    record = stored_finetune(server.store, name="followed")
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    page = hurried.goto(f"/finetunes/{record.id}")
    expect(page.get_by_label("Connection")).to_have_text("live")
    expect(page.get_by_text("No update yet.")).to_be_visible()
    expect(page.get_by_text("The experts are not analysed")).to_be_visible()
    update = {"expert": "text", "step": 17, "steps": 40, "loss": 1.875, "seconds": 0.1}
    writer.add_event(EventKind.TRAINING, {**update, "losses": [[17, 1.875]]})
    writer.heartbeat(wall_clock_s=3.0, progress={"experts": {"text": {**update, "values": {}}}})
    row = page.get_by_role("region", name="Table of experts").get_by_role("row").filter(has_text="text")
    expect(row).to_contain_text("17 of 40")
    expect(page.get_by_role("img", name=re.compile("text: loss 1.875 at update 17"))).to_be_visible()
    cancel(server, record.id)


def test_losses_are_called_by_where_they_are_measured(visitor: Visit, server: ApiServer) -> None:
    """The loss of mergopt is at the offset; the losses at the weights are a second curve beside it."""
    record = stored_finetune(server.store, name="moved")
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    update = {"step": 12, "steps": 40, "loss": 2.25, "seconds": 0.1}
    losses = {"losses": [[12, 2.25]], "weights_losses": [[1, 3.5], [11, 1.75]]}
    writer.add_event(EventKind.TRAINING, {"expert": "text", **update, "alpha": 0.5, **losses})
    progress = {**update, "values": {}, "loss_at": "offset", "weights_loss": 1.75}
    writer.heartbeat(wall_clock_s=3.0, progress={"experts": {"text": progress}})
    page = visitor.goto(f"/finetunes/{record.id}")
    row = page.get_by_role("region", name="Table of experts").get_by_role("row").filter(has_text="text")
    expect(row).to_contain_text("2.250at the offset, 1.750 at the weights")
    told = "text, at the offset: loss 2.250 at update 12. text, at the weights: loss 1.750 at update 11."
    expect(page.get_by_role("img", name=re.compile(re.escape(told)))).to_be_visible()
    cancel(server, record.id)


def test_values_of_linearized_models_are_marked(visitor: Visit, server: ApiServer) -> None:
    """The linearized model of an expert has a curve beside that of the exported weights, and a value in the table."""
    record = stored_finetune(server.store, name="linear", method={"kind": "tangent"})
    writer = server.store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    values = {"values": {"accuracy": 0.25}, "linearized_values": {"accuracy": 0.75}}
    writer.add_event(EventKind.TRAINING, {"expert": "text", "step": 9, **values})
    progress = {"step": 9, "steps": 40, "loss": 2.25, "seconds": 0.1, **values}
    writer.heartbeat(wall_clock_s=3.0, progress={"experts": {"text": progress}})
    page = visitor.goto(f"/finetunes/{record.id}")
    row = page.get_by_role("region", name="Table of experts").get_by_role("row").filter(has_text="text")
    expect(row).to_contain_text("0.2500.750 linearized")
    told = "text: accuracy 0.250 at update 9. text, linearized: accuracy 0.750 at update 9."
    expect(page.get_by_role("img", name=re.compile(re.escape(told)))).to_be_visible()
    cancel(server, record.id)


def test_the_example_is_submitted_once(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """The example is a valid specification; repeating the request after a lost answer creates nothing twice."""
    page = visitor.goto("/finetunes/new")
    lost = []

    def lose(route: Any) -> None:
        route.fetch()
        lost.append(route.request.headers["idempotency-key"])
        route.abort()

    page.route("**/v1/finetunes", lose, times=1)
    visitor.expected = ("net::ERR_FAILED",)
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("alert")).to_contain_text("the server does not answer")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("family")
    (made,) = http.get("/v1/finetunes", params={"state": "CREATED", "name": "family"}).json()["finetunes"]
    assert len(lost) == 1
    assert page.url == f"{visitor.url}/finetunes/{made['id']}"
    cancel(server, made["id"])


def test_problems_have_their_fields(visitor: Visit) -> None:
    """What is wrong with a specification is listed with its field."""
    visitor.expected = ("422",)
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    editor.fill(editor.input_value().replace("steps: 500", "steps: 0"))
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("alert").get_by_text("experts.math.training.steps", exact=True)).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("0 is not accepted")
    assert axe_violations(page) == []


def test_text_and_form_are_one_specification(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """Images with a new or a frozen head are entered in the form; the specification is what the server gets."""
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")

    def written() -> dict[str, Any]:
        content: dict[str, Any] = yaml.safe_load(editor.input_value())
        return content

    math = page.get_by_role("group", name="expert math")
    expect(page.locator('[id="field-training.batch"]')).to_have_value("32")
    page.locator('[id="field-training.batch"]').fill("64")
    math.get_by_role("combobox", name="kind of data").select_option("images")
    page.locator('[id="field-experts.math.data.images"]').fill("/data/pets")
    heads = math.get_by_role("combobox", name="kind of head")
    expect(heads).to_have_value("base")
    heads.select_option("new")
    assert written()["experts"]["math"]["data"] == {"images": "/data/pets", "head": "new"}
    heads.select_option("other")
    page.locator('[id="field-experts.math.data.head"]').fill("/models/pets")
    assert written()["experts"]["math"]["data"]["head"] == "/models/pets"
    page.get_by_role("button", name="Add an expert").click()
    page.get_by_role("button", name="Remove expert text").click()
    now = written()
    assert (list(now["experts"]), now["training"]["batch"]) == (["math", "expert3"], 64)
    visitor.expected = ("422",)
    page.get_by_role("button", name="Remove expert expert3").click()
    page.locator('[id="field-training.batch"]').fill("0")
    page.get_by_role("button", name="Submit").click()
    expect(page.locator('[id="field-training.batch"]')).to_have_accessible_description(re.compile("0 is not accepted"))
    page.locator('[id="field-training.batch"]').fill("64")
    page.locator('[id="field-name"]').fill("pets")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("pets")
    made = page.url.rsplit("/", 1)[1]
    data = http.get(f"/v1/finetunes/{made}/specification").json()["experts"]["math"]["data"]
    assert (data["images"], data["head"], data["file"]) == ("/data/pets", "/models/pets", None)
    cancel(server, made)


def test_one_expert_is_trained_on_images(visitor: Visit) -> None:
    """A specification of one expert has its data at the top; several experts begin on request."""
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    editor.fill("name: pets # mine\nbase: /models/vit\ndata: {images: /data/pets.jsonl, head: new}\n")
    data = page.get_by_role("group", name="Data")
    expect(data.get_by_role("combobox", name="kind of data")).to_have_value("images")
    expect(data.get_by_role("combobox", name="kind of head")).to_have_value("new")
    data.get_by_role("combobox", name="kind of data").select_option("file")
    page.locator('[id="field-data.file"]').fill("/data/a.jsonl")
    assert yaml.safe_load(editor.input_value())["data"] == {"file": "/data/a.jsonl"}
    assert "# mine" in editor.input_value()
    page.get_by_role("button", name="Several experts").click()
    expect(page.get_by_role("group", name="expert expert1")).to_be_visible()
    assert axe_violations(page) == []


def test_one_is_cloned(visitor: Visit, tuned: JobRecord, server: ApiServer) -> None:
    """A clone begins with the specification of the other one, and is an equal fine-tuning."""
    page = visitor.goto(f"/finetunes/{tuned.id}")
    page.get_by_role("link", name="Clone").click()
    editor = page.get_by_role("textbox", name="Specification")
    expect(editor).to_have_value(re.compile(tuned.document["base"]))
    assert yaml.safe_load(editor.input_value()) == tuned.document
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(tuned.name)
    made = server.store.job(page.url.rsplit("/", 1)[1])
    assert (made.id != tuned.id, made.document) == (True, tuned.document)
    cancel(server, made.id)


def test_a_clone_is_edited_in_the_form(visitor: Visit, tuned: JobRecord, server: ApiServer) -> None:
    """A value that the form adds to a clone is submitted with it."""
    page = visitor.goto(f"/finetunes/new?from={tuned.id}")
    page.locator('[id="field-name"]').fill("cloned")
    math = page.get_by_role("group", name="expert math")
    math.get_by_text("More options of the data").click()
    page.locator('[id="field-experts.math.data.pad_token"]').fill("pad")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("cloned")
    made = server.store.job(page.url.rsplit("/", 1)[1])
    assert made.document["experts"]["math"]["data"]["pad_token"] == "pad"
    assert made.document["experts"]["text"] == tuned.document["experts"]["text"]
    cancel(server, made.id)


def test_json_is_submitted_as_json(visitor: Visit, tuned: JobRecord, server: ApiServer) -> None:
    """A specification in JSON is sent as JSON, and with an edit of the form as YAML."""
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    for name, kind in (("as-json", "application/json"), ("as-yaml", "application/yaml")):
        editor.fill(json.dumps({**tuned.document, "name": name}))
        if kind == "application/yaml":
            page.get_by_role("button", name="Add an expert").click()
            page.locator('[id="field-experts.expert3.data.file"]').fill("/data/third.jsonl")
            page.locator('[id="field-training.steps"]').fill("3")
        with page.expect_request("**/v1/finetunes") as sent:
            page.get_by_role("button", name="Submit").click()
        assert sent.value.headers["content-type"] == kind
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        cancel(server, page.url.rsplit("/", 1)[1])
        visitor.goto("/finetunes/new")


def test_experts_inherit_their_data(visitor: Visit) -> None:
    """The form of an expert has the kind and the head of the data of all; its own are written where they differ."""
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    editor.fill(
        "name: a\nbase: /models/vit\ndata: {images: /data/all, head: new}\nexperts:\n  pets: {data: {label: pet}}\n"
    )

    def pets() -> dict[str, Any]:
        data: dict[str, Any] = yaml.safe_load(editor.input_value())["experts"]["pets"]["data"]
        return data

    expert = page.get_by_role("group", name="expert pets")
    kind = expert.get_by_role("combobox", name="kind of data")
    heads = expert.get_by_role("combobox", name="kind of head")
    expect(kind).to_have_value("images")
    expect(heads).to_have_value("new")
    images = page.locator('[id="field-experts.pets.data.images"]')
    expect(images).to_have_attribute("placeholder", "default: /data/all")
    heads.select_option("base")
    expect(heads).to_have_value("base")
    assert pets() == {"label": "pet", "head": "base"}
    kind.select_option("file")
    page.locator('[id="field-experts.pets.data.file"]').fill("/data/a.jsonl")
    expect(kind).to_have_value("file")
    assert pets() == {"images": None, "head": "base", "file": "/data/a.jsonl"}
    kind.select_option("images")
    images.fill("/data/pets")
    assert pets() == {"images": "/data/pets"}


def test_several_experts_begin_with_the_data_of_one(visitor: Visit) -> None:
    """The data of a single expert become those of the first of several, and no other expert has them."""
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    editor.fill("name: a\nbase: /models/vit\ndata:\n  images: /data/pets # mine\n  head: new\n")
    page.get_by_role("button", name="Several experts").click()
    expert = page.get_by_role("group", name="expert expert1")
    expect(expert.get_by_role("combobox", name="kind of data")).to_have_value("images")
    experts = {"expert1": {"data": {"images": "/data/pets", "head": "new"}}}
    assert yaml.safe_load(editor.input_value()) == {"name": "a", "base": "/models/vit", "experts": experts}
    assert "# mine" in editor.input_value()


def test_a_problem_of_one_expert_is_at_its_own_field(visitor: Visit) -> None:
    """A refused option that an expert states is not shown at the option of all experts."""
    visitor.expected = ("422",)
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    editor.fill(editor.input_value().replace("steps: 800", "steps: 0"))
    page.get_by_role("button", name="Submit").click()
    own = page.locator('[id="field-experts.text.training.steps"]')
    expect(own).to_have_accessible_description(re.compile("0 is not accepted"))
    expect(page.locator('[id="field-training.steps"]')).not_to_have_accessible_description(re.compile("0 is not"))


def test_a_head_may_begin_with_the_name_of_another(visitor: Visit) -> None:
    """The field of a head stays while a hub id that begins with base or new is typed."""
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    editor.fill("name: a\nbase: /models/vit\ndata: {images: /data/pets}\n")
    page.get_by_role("combobox", name="kind of head").select_option("other")
    head = page.locator('[id="field-data.head"]')
    head.press_sequentially("new/basemodel")
    head.press("Control+A")
    page.keyboard.type("base/vit")
    expect(head).to_have_value("base/vit")
    head.blur()
    assert yaml.safe_load(editor.input_value())["data"]["head"] == "base/vit"


def test_a_text_that_was_left_is_there_again(visitor: Visit, tuned: JobRecord, server: ApiServer) -> None:
    """A specification that was left is as it was, until it is submitted; that of another fine-tuning is its own."""
    page = visitor.goto("/finetunes/new")
    editor = page.get_by_role("textbox", name="Specification")
    example = editor.input_value()

    def leave() -> None:
        page.get_by_role("link", name="Fine-tunings", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Fine-tunings")

    page.locator('[id="field-name"]').fill("half-written")
    leave()
    page.locator(f'a[href="/finetunes/{tuned.id}"]').click()
    page.get_by_role("link", name="Clone", exact=True).click()
    expect(page.locator('[id="field-name"]')).to_have_value(tuned.name)
    leave()
    page.get_by_role("link", name="New fine-tuning").click()
    expect(page.locator('[id="field-name"]')).to_have_value("half-written")
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("half-written")
    cancel(server, page.url.rsplit("/", 1)[1])
    leave()
    page.get_by_role("link", name="New fine-tuning").click()
    expect(editor).to_have_value(example)
    page.locator('[id="field-name"]').fill("other")
    page.get_by_role("button", name="Begin again").click()
    expect(editor).to_have_value(example)


def test_verbs_steer_a_fine_tuning(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """Pause, resume and cancel; cancelling asks first; Escape leaves the dialog."""
    record = stored_finetune(server.store, name="steered")

    def state() -> str:
        return str(http.get(f"/v1/finetunes/{record.id}").json()["state"])

    page = visitor.goto(f"/finetunes/{record.id}")
    press(page.get_by_role("button", name="Pause"))
    for name in ("Resume", "Pause"):  # each takes the place of the one that was pressed, and its focus
        expect(page.get_by_role("button", name=name)).to_be_focused()
        page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Resume")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Pause")).to_be_focused()
    cancelled: list[str] = []
    page.on("request", lambda request: cancelled.append(request.url) if request.url.endswith(":cancel") else None)
    cancel_button = page.get_by_role("button", name="Cancel")
    cancel_button.click()
    expect(page.get_by_role("dialog")).to_contain_text("Experts that are trained are kept.")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(cancel_button).to_be_focused()
    press(page.get_by_role("button", name="Pause"))  # a request after the one that Escape could have sent
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert cancelled == []
    assert state() != "CANCELLED"
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("cancelled").first).to_be_visible()
    assert state() == "CANCELLED"


def test_deleting_asks_for_the_name(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """A fine-tuning is deleted once its name is typed; then the list is shown without it."""
    record = finished_finetune(server.store, server.data_dir, name="short-lived")
    page = visitor.goto(f"/finetunes/{record.id}")
    page.get_by_role("button", name="Delete").click()
    dialog = page.get_by_role("dialog")
    button = dialog.get_by_role("button", name="Delete")
    expect(button).to_be_disabled()
    dialog.get_by_role("textbox").press_sequentially("short-live")
    expect(button).to_be_disabled()
    dialog.get_by_role("textbox").press_sequentially("d")
    dialog.get_by_role("textbox").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Fine-tunings")
    assert http.get(f"/v1/finetunes/{record.id}").status_code == 404


def test_experts_lead_to_a_study(visitor: Visit, tuned: JobRecord, server: ApiServer) -> None:
    """Trained experts have a link to a new study that merges them; without all of them there is none."""
    page = visitor.goto(f"/finetunes/{tuned.id}")
    link = page.get_by_role("link", name="Search merges of these experts")
    expect(link).to_have_attribute("href", f"/studies/new?finetune={tuned.id}")
    begun = stored_finetune(server.store, name="begun")
    visitor.goto(f"/finetunes/{begun.id}")
    expect(page.get_by_role("link", name="Clone")).to_be_visible()
    expect(link).to_have_count(0)
    cancel(server, begun.id)


def test_views_are_accessible(browser: Browser, server: ApiServer, tuned: JobRecord, other: JobRecord) -> None:
    """The page of a fine-tuning, beside another one and before it has begun, violates no rule of axe."""
    begun = stored_finetune(server.store, name="begun")
    for path in (f"{tuned.id}?against={other.id}", begun.id):
        check_view(browser, server.url, f"/finetunes/{path}")
    cancel(server, begun.id)


@pytest.fixture
def company(tmp_path: Path, own_port: int) -> Iterator[Company]:
    with ApiServer(tmp_path, port=own_port) as server:
        yield Company.on(server)


def test_readers_see_no_verbs(browser: Browser, company: Company) -> None:
    """A user who may only read sees results and downloads, and nothing that changes or submits something."""
    record = company.tuned(company.server.data_dir)
    headers = bearer(company.tokens["owner", Scope.READ])
    with visit(browser, company.server.url, headers=headers) as opened:
        page = opened.goto(f"/finetunes/{record.id}")
        expect(page.get_by_role("link", name="Report")).to_be_visible()
        expect(page.get_by_role("button", name="Delete")).to_have_count(0)
        expect(page.get_by_role("link", name="Clone")).to_have_count(0)
        opened.goto("/finetunes/new")
        expect(page.get_by_text("You may not submit fine-tunings")).to_be_visible()
        expect(page.get_by_role("textbox", name="Specification")).to_have_count(0)


def test_one_is_submitted_for_a_team(browser: Browser, company: Company) -> None:
    """A member of several teams chooses the team, and who may read the fine-tuning."""
    company.accounts.set_role("blue", "owner", Role.MEMBER, actor=OPERATOR)
    headers = bearer(company.tokens["owner", Scope.SUBMIT])
    with visit(browser, company.server.url, headers=headers) as opened:
        page = opened.goto("/finetunes/new")
        page.get_by_role("combobox", name="Team").select_option("blue")
        page.get_by_role("combobox", name="Sharing").select_option("private")
        page.get_by_role("button", name="Submit").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("family")
    (tuned,) = company.server.store.jobs("finetune")
    assert (tuned.owner, tuned.team, tuned.sharing.value) == ("owner", "blue", "private")
