"""The view of a study's exports, compared with the API's answers."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from service.store.exports import ExportStore
from service.types import ExportRecord, ExportState, JobRecord, Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.family import family_study
from tests.service.api.harness import ApiServer, finished_study, stored_study
from tests.service.web.driving import Visit, expect, press, visit

WEIGHTS = b"w" * 1_234_567


@pytest.fixture
def exported(server: ApiServer) -> Iterator[JobRecord]:
    """A study with a complete and a failed export."""
    study = finished_study(server.store, num_trials=9)
    for trial, state, reason in ((3, ExportState.COMPLETE, None), (4, ExportState.FAIL, "models math have changed")):
        name = f"{trial}{study.id[1:]}"
        record = ExportRecord(name, study.id, trial, "bfloat16", state, reason=reason, created_at=1.7e9)
        ExportStore(server.store).add_export(record)
        if state is ExportState.COMPLETE:
            directory = server.app.state.services.exports.directory(record)
            directory.mkdir(parents=True)
            (directory / "model.safetensors").write_bytes(WEIGHTS)
    yield study
    server.store.delete_job(study.id)


def test_exports_are_those_of_the_api(visitor: Visit, exported: JobRecord, http: httpx.Client, tmp_path: Path) -> None:
    """Each export has its trial, dtype, state, bytes and reason; the link downloads the model."""
    complete, failed = http.get(f"/v1/studies/{exported.id}/exports").json()["exports"]
    page = visitor.goto(f"/studies/{exported.id}/exports")
    rows = page.get_by_role("region", name="Exports of the study").get_by_role("row")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text(f"{complete['bytes'] / 1e6:.2f} MB")
    expect(rows.nth(1)).to_contain_text(complete["dtype"])
    expect(rows.nth(2)).to_contain_text(failed["reason"])
    expect(rows.nth(2).get_by_role("link", name="Download")).to_have_count(0)
    with page.expect_download() as started:
        rows.nth(1).get_by_role("link", name="Download the export of trial 3").click()
    started.value.save_as(tmp_path / "model.tar")
    with tarfile.open(tmp_path / "model.tar") as tar:
        (member,) = [each for each in tar if each.name.endswith("model.safetensors")]
        assert member.size == len(WEIGHTS)


def test_an_export_is_deleted_after_a_question(visitor: Visit, exported: JobRecord, http: httpx.Client) -> None:
    """The dialog is left by Escape or `Keep` without a change; `Delete` deletes the export that it names."""
    page = visitor.goto(f"/studies/{exported.id}/exports")
    delete = page.get_by_role("button", name="Delete the export of trial 3")
    dialog = page.get_by_role("dialog")
    press(delete)
    expect(dialog).to_contain_text("Delete the export of trial 3 in bfloat16")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(delete).to_be_focused()
    deleted: list[str] = []
    page.on("request", lambda request: deleted.append(request.url) if request.method == "DELETE" else None)
    delete.click()
    dialog.get_by_role("button", name="Keep").click()
    expect(dialog).to_have_count(0)
    expect(delete).to_be_focused()
    page.wait_for_timeout(500)  # a request would have been sent by now
    assert deleted == []
    assert len(http.get(f"/v1/studies/{exported.id}/exports").json()["exports"]) == 2
    delete.click()
    dialog.get_by_role("button", name="Delete").click()
    expect(delete).to_have_count(0)
    (left,) = http.get(f"/v1/studies/{exported.id}/exports").json()["exports"]
    assert left["trial"] == 4


@pytest.mark.slow
def test_a_new_export_is_followed_to_its_end(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """An export that begins here is shown until it is complete, with the bytes that the API then has."""
    study = family_study(server.store)
    page = visitor.goto(f"/studies/{study.id}/exports")
    expect(page.get_by_text("No model of the study has been exported.")).to_be_visible()
    page.get_by_role("combobox", name="Export").select_option(label="a trial")
    expect(page.get_by_role("button", name="Begin")).to_be_disabled()  # until there is a number
    page.get_by_role("textbox", name="Trial").fill("5")
    page.get_by_role("combobox", name="dtype").select_option("float32")
    press(page.get_by_role("button", name="Begin"))
    row = page.get_by_role("region", name="Exports of the study").get_by_role("row").nth(1)
    expect(row.get_by_text("complete")).to_be_visible(timeout=60_000)
    (export,) = http.get(f"/v1/studies/{study.id}/exports").json()["exports"]
    assert (export["trial"], export["dtype"]) == (5, "float32")
    expect(row).to_contain_text(f"{export['bytes'] / 1e6:.2f} MB")
    expect(row.get_by_role("link", name="Download")).to_have_attribute("href", export["links"]["download"])


def test_weights_export_what_the_server_picks(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """The export by weights sends them with the sum 1, and is of the trial that the API picks by them."""
    study = finished_study(server.store, num_trials=20)
    names = [each["name"] for each in http.get(f"/v1/studies/{study.id}/pareto").json()["objectives"]]
    page = visitor.goto(f"/studies/{study.id}/exports")
    page.get_by_role("combobox", name="Export").select_option(label="the trial that weights pick")
    for name in names:
        page.get_by_role("textbox", name=f"Weight of {name}").fill("90" if name == "text" else "5")
    with page.expect_request("**/exports") as sent:
        page.get_by_role("button", name="Begin").click()
    wanted = {name: 0.9 if name == "text" else 0.05 for name in names}
    assert sent.value.post_data_json == {"prefer": wanted}
    expect(page.get_by_text("has begun")).to_be_visible()
    weights = ",".join(f"{name}={weight}" for name, weight in wanted.items())
    picked = http.get(f"/v1/studies/{study.id}/pareto", params={"prefer": weights}).json()["preferred"]["trial"]
    (export,) = http.get(f"/v1/studies/{study.id}/exports").json()["exports"]
    assert export["trial"] == picked


def test_weights_of_0_prefer_no_objective(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """Weights that are all 0 are sent as equal ones."""
    study = finished_study(server.store, num_trials=20)
    names = [each["name"] for each in http.get(f"/v1/studies/{study.id}/pareto").json()["objectives"]]
    page = visitor.goto(f"/studies/{study.id}/exports")
    page.get_by_role("combobox", name="Export").select_option(label="the trial that weights pick")
    for name in names:
        page.get_by_role("textbox", name=f"Weight of {name}").fill("0")
    with page.expect_request("**/exports") as sent:
        page.get_by_role("button", name="Begin").click()
    assert sent.value.post_data_json == {"prefer": dict.fromkeys(names, 1 / len(names))}
    expect(page.get_by_text("has begun")).to_be_visible()


def test_who_may_not_export_sees_no_form(browser: Browser, tmp_path: Path, own_port: int) -> None:
    """A viewer sees the exports, and neither the form nor `Delete`; before the end of a study nobody has the form."""
    with ApiServer(tmp_path, port=own_port) as server:
        company = Company.on(server)
        study = company.finished()
        company.exported(study)
        running = company.own(stored_study(server.store, name="waiting"))
        for user, has_form in (("viewer", False), ("member", True)):
            headers = bearer(company.tokens[user, Scope.SUBMIT])
            with visit(browser, server.url, headers=headers) as opened:
                page = opened.goto(f"/studies/{study.id}/exports")
                expect(page.get_by_role("link", name="Download")).to_be_visible()
                expect(page.get_by_role("button", name="Begin")).to_have_count(int(has_form))
                expect(page.get_by_role("button", name="Delete")).to_have_count(int(has_form))
                opened.goto(f"/studies/{running.id}/exports")
                expect(page.get_by_text("Models are exported once the study is complete.")).to_be_visible()
                expect(page.get_by_role("button", name="Begin")).to_have_count(0)
