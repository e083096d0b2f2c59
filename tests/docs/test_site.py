"""The docs site is built as `make docs` builds it, without a warning, and can be read without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from service.client import Client
from tests.docs.pages import PAGES, ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the command of the Makefile into a temporary directory."""
    (command,) = re.findall(r"^docs:.*\n\t\$\(BIN\)/sphinx-build (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    out = tmp_path_factory.mktemp("site")
    arguments = command.replace("build/doctrees", str(out / "doctrees")).replace("build/site", str(out)).split()
    assert "--fail-on-warning" in arguments
    built = subprocess.run([sys.executable, "-m", "sphinx", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert (built.returncode, built.stderr) == (0, "")
    return out


class Loaded(HTMLParser):
    """Addresses that a browser loads by itself: scripts, styles, fonts, pictures, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag == "link" and found.get("rel") not in {"search", "next", "prev", "index"}:
            self.addresses.append(found.get("href") or "")
        if "src" in found:
            self.addresses.append(found["src"] or "")


@pytest.mark.slow
def test_every_page_is_in_the_site(site: Path) -> None:
    missing = [page.name for page in PAGES if not (site / page.name).with_suffix(".html").is_file()]
    assert missing == []


@pytest.mark.slow
def test_the_sites_first_page_leads_to_the_docs(site: Path) -> None:
    """A server's `/`, and `index.html` of the archive of a release, open the docs."""
    (target,) = re.findall(r'http-equiv="refresh" content="0; url=([^"]+)"', (site / "index.html").read_text())
    assert "<h1>" in (site / target).read_text()


@pytest.mark.slow
def test_the_site_needs_no_network(site: Path) -> None:
    """Pages and styles load files of the site only."""
    pages = {}
    for file in site.rglob("*.html"):
        loaded = Loaded()
        loaded.feed(file.read_text())
        pages[file] = loaded.addresses
    assert pages.pop(site / "index.html") == []
    assert all("_static/scripts/furo.js" in " ".join(addresses) for addresses in pages.values())
    assert [address for addresses in pages.values() for address in addresses if re.match(r"(\w+:)?//", address)] == []
    styles = list(site.rglob("*.css"))
    assert styles
    assert [file.name for file in styles if re.search(r"(@import|url\()\s*[\"']?(https?:)?//", file.read_text())] == []


@pytest.mark.slow
def test_the_search_works_in_files(site: Path) -> None:
    """The index of the search is a script, which a browser also loads from a file."""
    index = (site / "searchindex.js").read_text()
    assert index.startswith("Search.setIndex(")
    assert {"hypervolum", "canari"} <= set(re.findall(r'"?(\w+)"?:', index))


@pytest.mark.slow
def test_the_client_is_documented(site: Path) -> None:
    """The page of the client has each public method, with the first sentence of its docstring."""
    text = re.sub(r"<[^>]+>", "", (site / "docs" / "reference" / "client.html").read_text())
    methods = {name: getattr(Client, name) for name in vars(Client) if not name.startswith("_")}
    assert len(methods) > 15
    words = re.sub(r"\W+", " ", text)
    for name, method in methods.items():
        if method.__doc__:
            sentence = re.sub(r"\W+", " ", method.__doc__.strip().split("\n\n")[0])
            assert sentence.strip() in words, name
