"""The main job on the web page: submit a study, watch it, pick a merge from its front by sliders, download it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from playwright.sync_api import Page, expect

from tests.service.web.driving import chromium, visit

__all__ = ["download", "fetch_recipe", "merge", "pick", "submit", "tab", "watch", "weights"]


@contextmanager
def tab(url: str) -> Iterator[Page]:
    """A tab of a browser on the server at `url`, in which nothing may go wrong."""
    with chromium() as browser, visit(browser, url) as opened:
        yield opened.page


def submit(page: Page, url: str, document: Mapping[str, Any], *, timeout_s: float) -> str:
    """Submit a study file at the page for new studies; returns the id of the study, whose page is open then."""
    page.goto(f"{url}/studies/new")
    # By way of JSON, so that no part is written as an alias of another.
    page.get_by_role("textbox", name="Study file").fill(yaml.safe_dump(json.loads(json.dumps(document))))
    page.get_by_role("button", name="Submit").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(str(document["name"]), timeout=1e3 * timeout_s)
    page.wait_for_url("**/studies/*")
    return page.url.rpartition("/")[2]


def watch(page: Page, *, timeout_s: float) -> None:
    """Wait until the open page of a study says, without a reload, that the study is complete."""
    expect(page.get_by_label("Connection")).to_have_text("no more changes", timeout=1e3 * timeout_s)
    expect(page.locator("main .state").first).to_contain_text("complete")
    expect(page.get_by_role("region", name="Values on held-out data")).to_be_visible()


def pick(page: Page, weights: Mapping[str, int]) -> int:
    """Move the slider of each objective to its weight of 0 or 100, and return the trial that the page picks."""
    for name, weight in weights.items():
        page.get_by_role("slider", name=f"Importance of {name}").press("End" if weight else "Home")
    said = page.get_by_test_id("picked").inner_text()
    return int(said.removeprefix("Trial ").partition(":")[0].partition(",")[0])


def download(page: Page, trial: int, directory: Path, *, timeout_s: float) -> dict[str, Any]:
    """Export the picked trial, download it into `directory`, and return its recipe.json."""
    page.get_by_role("button", name=f"Export trial {trial}").click()
    begun = page.get_by_role("status").filter(has_text=f"xport of trial {trial}")
    expect(begun).to_be_visible(timeout=1e3 * timeout_s)
    page.get_by_role("navigation", name="Views of the study").get_by_role("link", name="Exports").click()
    link = page.get_by_role("link", name="Download").first
    expect(link).to_be_visible(timeout=1e3 * timeout_s)
    with page.expect_download() as downloading:
        link.click()
    with tarfile.open(downloading.value.path()) as archive:
        archive.extractall(directory)  # of this test's own server; Python 3.11.2 has no filters
    (file,) = directory.rglob("recipe.json")
    recipe: dict[str, Any] = json.loads(file.read_text())
    return {**recipe, "directory": str(file.parent)}


def fetch_recipe(page: Page, url: str, study: str, trial: int, directory: Path) -> Path:
    """Store the recipe that the page of a trial offers with `curl` in `directory`, and return the file."""
    page.goto(f"{url}/studies/{study}/trials/{trial}")
    page.get_by_role("combobox", name="Copy as").select_option("curl")
    command = page.get_by_role("textbox", name="curl").input_value()
    (address,) = re.findall(r"http\S+", command)
    file = directory / "fetched.json"
    file.write_bytes(page.request.get(address).body())
    return file


def merge(file: Path, models: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """Merge a downloaded file with `mergesearch merge`; returns the recipe.json of the result, with its `weights`."""
    options = [word for alias, place in models.items() for word in ("--model", f"{alias}={place}")]
    command = [sys.executable, "-m", "service.cli.main", "merge", str(file), "--out", str(out), *options]
    subprocess.run(command, check=True, timeout=300)
    recipe: dict[str, Any] = json.loads((out / "recipe.json").read_text())
    return {**recipe, "weights": weights(out)}


def weights(directory: Path) -> dict[str, bytes]:
    """Bytes of the files of a model's tensors, by name."""
    return {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}
