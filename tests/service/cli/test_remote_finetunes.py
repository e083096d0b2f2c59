"""Commands that use a server, for fine-tunings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from service.cli.main import main
from tests.service.api.harness import ApiServer, finished_finetune, stored_finetune
from tests.service.cli.terminals import ServerTerminal
from tests.service.client.test_finetunes import specification
from tests.service.site import Site


def test_submit_tells_a_specification_from_a_study(site: Site, terminal: ServerTerminal, tmp_path: Path) -> None:
    name = site.new_name()
    out = terminal.shown("submit", specification(tmp_path, name))
    (record,) = [record for record in site.store.jobs() if record.name == name]
    assert out == (f"fine-tuning {name}: {record.id}, CREATED\nfollow it with `mergesearch watch {record.id[:8]}`\n")
    assert "of the whole fleet" in terminal.refused("submit", changed(tmp_path, name, base="other"))
    assert f"{name} created 0/2 0s" in " ".join(terminal.shown("finetunes").split())
    assert terminal.shown("cancel", name) == f"fine-tuning {name}: {record.id}, CANCELLED\n"
    assert terminal.shown("delete", name) == f"deleted: {name}: {record.id}\n"


def changed(directory: Path, name: str, **options: str) -> Path:
    import yaml

    file = specification(directory, name)
    document = yaml.safe_load(file.read_text())
    document["experts"]["math"] |= options
    file.write_text(yaml.safe_dump(document))
    return file


def test_a_finished_one_is_shown_watched_and_exported(site: Site, terminal: ServerTerminal, tmp_path: Path) -> None:
    name = site.new_name()
    record = finished_finetune(site.store, site.directory, name=name)
    shown = terminal.shown("show", name)
    assert "math: mergopt, trained, update 4, loss 1.0000, accuracy 0.250" in shown
    assert f"/v1/finetunes/{record.id}/report" in shown
    assert terminal.document("show", name)["experts"]["text"]["bytes"] == 4002
    assert terminal.shown("log", name).startswith("==> driver <==")

    code, out, err = terminal.run("watch", name, "--server", site.url)
    assert code == 0
    assert "math: step 4 of 4  loss 1.0000  0.10 s a step" in err
    assert "text: step 4  accuracy 0.500" in err
    assert f"mergesearch export {record.id[:8]} math --out DIR" in out
    lines = [json.loads(line) for line in terminal.shown("watch", name, "--json").splitlines()]
    assert [line["kind"] for line in lines[-2:]] == ["end", "finetune"]

    assert terminal.shown("export", name, "math", "--out", tmp_path / "math") == f"expert: {tmp_path / 'math'}\n"
    assert (tmp_path / "math" / "model.safetensors").exists()
    assert "several experts; give one of math, text" in terminal.refused(
        "export", name, "best", "--out", tmp_path / "b"
    )
    refused = terminal.refused("export", name, "math", "--dtype", "float32", "--out", tmp_path / "b")
    assert "--dtype and --prefer are for trials of studies" in refused
    for verb in ("trials", "pareto"):
        assert "is a fine-tuning, which has no trials" in terminal.refused(verb, name)


def test_report_link_has_the_path_prefix_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind a proxy that serves the server below a path, the printed link leads to the report."""
    with ApiServer(tmp_path, prefix="/merge") as server:
        record = finished_finetune(server.store, tmp_path)
        assert main(["watch", record.id, "--server", f"{server.url}/merge"]) == 0
        out = capsys.readouterr().out
    assert f"report: {server.url}/merge/v1/finetunes/{record.id}/report\n" in out


def test_one_that_failed_says_why(site: Site, terminal: ServerTerminal) -> None:
    from service.types import JobState

    record = stored_finetune(site.store, name=site.new_name())
    site.store.open_attempt(record.id).set_state(JobState.FAILED, "step 3: the loss is nan")
    code, out, err = terminal.run("watch", record.name, "--server", site.url)
    assert (code, out) == (1, "")
    assert "the fine-tuning is FAILED: step 3: the loss is nan" in err
    assert terminal.shown("resume", record.name) == f"fine-tuning {record.name}: {record.id}, STOPPED\n"
