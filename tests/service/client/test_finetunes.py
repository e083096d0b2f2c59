"""Fine-tunings by the Python client, against the server's own application over real HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from search_spaces.errors import InvalidStudy
from service.errors import Conflict, NotFound, RequestRefused
from tests.service.api.harness import analysed_fleet, finetuning, finished_finetune, stored_finetune
from tests.service.client.asker import Asker
from tests.service.http_server import HttpServer
from tests.service.site import Site


def specification(directory: Path, name: str) -> Path:
    fleet = finetuning(name)
    for alias, expert in fleet["experts"].items():  # relative to the file
        (directory / f"{alias}.jsonl").write_text(Path(expert["data"]["file"]).read_text())
        expert["data"] = {"file": f"{alias}.jsonl", "completion": "{{answer}}"}
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(fleet))
    return file


def test_a_fleet_is_submitted_found_cancelled_and_deleted(site: Site, ask: Asker, tmp_path: Path) -> None:
    name = site.new_name()
    file = specification(tmp_path, name)
    created = ask("submit_finetune", file, idempotency_key=name)
    assert ask("submit_finetune", str(file), idempotency_key=name)["id"] == created["id"]
    stored = site.store.job(created["id"]).document
    assert stored["experts"]["math"]["data"]["file"] == str(tmp_path / "math.jsonl")
    assert created["id"] in [found["id"] for found in ask("finetunes")]
    assert created["id"] not in [found["id"] for found in ask("studies")]
    assert ask("find", name)["id"] == ask("find", created["id"][:12])["id"] == created["id"]
    assert ask("finetune", created["id"]) == ask("finetune", created) == created
    assert "scored" in ask("log", created)
    assert ask("cancel", created)["state"] == "CANCELLED"
    with pytest.raises(RequestRefused, match="is CANCELLED"):
        ask("resume", created)
    ask("delete", created)
    with pytest.raises(RequestRefused, match="there is no such fine-tuning"):
        ask("finetune", created["id"])


def test_curves_events_report_and_experts(site: Site, ask: Asker, tmp_path: Path) -> None:
    analysis = {"samples": 3, "fleets": [analysed_fleet("mergopt", 1, 2, 3, 4)]}
    record = finished_finetune(site.store, site.directory, name=site.new_name(), analysis=analysis)
    document = ask("finetune", record.id)
    assert ask("analysis", record.id) == analysis
    other = finished_finetune(site.store, site.directory, name=site.new_name(), analysis=analysis)
    assert len(ask("analysis", document, against=[other.id])["fleets"]) == 2
    assert [curve["expert"] for curve in ask("curves", record.id)["experts"]] == ["math", "text"]
    assert record.name in ask("report", document)
    kinds = [event.kind for event in ask.events(document)]
    assert kinds.count("training") == 4
    assert kinds[-1] == "end"
    sizes: list[int] = []
    out = ask("download", document, "text", tmp_path / "text", received=lambda count, _: sizes.append(count))
    assert (out / "model.safetensors").read_bytes() == b"text" * 1000
    assert sizes[-1] >= 4002
    with pytest.raises(Conflict, match="exists already"):
        ask("download", record.id, "text", tmp_path / "text")
    with pytest.raises(NotFound, match=r"expert 'none': fine-tuning .* has math, text"):
        ask("download", record.id, "none", tmp_path / "none")
    begun = stored_finetune(site.store, name=site.new_name())
    with pytest.raises(Conflict, match="expert 'math' is not trained yet"):
        ask("download", begun.id, "math", tmp_path / "none")


def test_mistakes_are_found_here_and_on_the_server(ask: Asker, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(finetuning(training={"steps": 0})))
    with pytest.raises(InvalidStudy, match=r"experts\.math\.training\.steps"):
        ask("submit_finetune", wrong)
    with pytest.raises(RequestRefused, match=r"experts\.math\.training\.steps"):
        ask("submit_finetune", finetuning(training={"steps": 0}))
    with pytest.raises(NotFound, match="give the id of a fine-tuning"):
        ask("finetune", "")


def test_a_server_without_fine_tunings_has_studies(ask: Asker) -> None:
    from fastapi import FastAPI

    from service.api.problems import install_handlers

    app = FastAPI()
    install_handlers(app)
    study = {"id": "5f" * 16, "name": "old", "state": "RUNNING"}
    app.get("/v1/studies")(lambda: {"studies": [study]})
    with HttpServer(lambda: app) as server:
        assert ask.at(server.url)("find", "old") == {"kind": "search", **study}
