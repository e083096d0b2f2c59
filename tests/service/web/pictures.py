"""Pictures of the web page for README and docs, from the study of a finished `mergesearch demo`.

`python -m tests.service.web.pictures runs/demo docs/pictures` writes them; `make pictures` runs the demo first.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page

from service.api.app import create_app
from service.disk import DATABASE
from service.store import Store
from tests.service.http_server import HttpServer
from tests.service.site import FakeCluster, LocalPreflight
from tests.service.web.driving import chromium, visit, wait_until

__all__ = ["PICTURES", "main"]

SIZE = (1280, 860)


@dataclass(frozen=True)
class Picture:
    """A picture of a view: its file, the address below the study's, and the heading at the top of the view."""

    file: str
    address: str
    top: str | None = None
    scheme: Literal["light", "dark"] = "light"


PICTURES: Sequence[Picture] = (
    Picture("page-overview.png", "", scheme="dark"),
    Picture("page-front.png", "", top="Pareto front"),
    Picture("page-trial.png", "/trials/15", top="Recipe"),
    # Beside the best published recipe.
    Picture("page-samples.png", "/trials/15/samples?objective=lookup&split=holdout&against=9&only=differs"),
)


def main(run: Path, out: Path) -> int:
    """Write the pictures of the study in the directory `run` to the directory `out`."""
    with tempfile.TemporaryDirectory(prefix="mergesearch-pictures-") as directory:
        database = Path(directory) / DATABASE
        shutil.copy(run / "study.db", database)  # opening it migrates it
        store = Store(f"sqlite:///{database}")
        (study,) = store.jobs("search")
        app = create_app(store, cluster=FakeCluster(), data_dir=Path(directory), preflight=LocalPreflight())
        server = HttpServer(lambda: app, grace_s=1)
        server.start()
        try:
            with chromium() as browser:
                for picture in PICTURES:
                    _take(browser, server.url, study.id, picture, out / picture.file)
                    print(f"written: {out / picture.file}")
        finally:
            server.stop()
            store.close()
    return 0


def _take(browser: Browser, url: str, study: str, picture: Picture, file: Path) -> None:
    width, height = SIZE
    with visit(browser, url, scheme=picture.scheme, width=width, height=height) as opened:
        page = opened.goto(f"/studies/{study}{picture.address}")
        _wait_until_loaded(page)
        if picture.top is not None:
            heading = page.get_by_role("heading", name=picture.top)
            heading.evaluate("element => window.scrollTo(0, element.getBoundingClientRect().top + scrollY - 12)")
        page.wait_for_timeout(500)
        page.screenshot(path=file)


def _wait_until_loaded(page: Page) -> None:
    page.get_by_role("heading", level=1).wait_for()
    page.wait_for_timeout(1000)  # requests have begun
    wait_until(page, "!document.body.innerText.includes('Loading')", timeout_s=120)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
