"""The Markdown pages of this repository, with the links, code blocks and tables that tests check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP_FOLDERS = ("search_spaces", "workers", "service", "tests", "docs", "deploy", ".github")


@dataclass(frozen=True)
class Page:
    """A Markdown page; `text` is its content, so that tests can also use made-up pages."""

    file: Path
    text: str

    @classmethod
    def read(cls, file: Path) -> Page:
        return cls(file, file.read_text())

    @property
    def name(self) -> str:
        return self.file.relative_to(ROOT).as_posix()

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Language and content of every fenced block."""
        return re.findall(r"^```(\w*)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)

    @cached_property
    def prose(self) -> str:
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)

    def blocks_in(self, *languages: str) -> list[str]:
        return [content for language, content in self.blocks if language in languages]

    def commands(self, program: str) -> Iterator[str]:
        """Lines of code blocks that call `program`, without comments."""
        for block in self.blocks_in("", "sh", "bash"):
            for line in block.splitlines():
                if line.split(" ")[0] == program:
                    yield re.sub(r"\s+#.*", "", line)

    def code(self) -> list[str]:
        """Texts in backticks in the prose."""
        return re.findall(r"`([^`\n]+)`", self.prose)

    def links(self) -> list[str]:
        """Targets of the page's links."""
        return re.findall(r"\]\(([^)\s]+)\)", self.prose.replace("\n", " "))

    def section(self, heading: str) -> str:
        """The prose from a heading of the second level to the next one."""
        text: str
        (text,) = re.findall(rf"^{re.escape(heading)}$.*?(?=^## |\Z)", self.prose, re.MULTILINE | re.DOTALL)
        return text

    def anchors(self) -> set[str]:
        """Anchors of the page's headings, as GitHub makes them."""
        headings = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    def broken_links(self) -> list[str]:
        """Relative links to files that are not there, or to headings that the page does not have."""
        broken = []
        for target in self.links():
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            file = (self.file.parent / path).resolve() if path else self.file
            page = self if not path else Page.read(file) if file.suffix == ".md" and file.is_file() else None
            if not file.exists() or (anchor and (page is None or anchor not in page.anchors())):
                broken.append(target)
        return broken

    def missing_paths(self) -> list[str]:
        """Paths of this repository in backticks that do not exist."""
        paths = [code.rstrip("/") for code in self.code() if code.split("/")[0] in TOP_FOLDERS and "/" in code]
        return [path for path in paths if not re.search(r"[\s{}]", path) and not list(ROOT.glob(path))]


PAGES = [Page.read(ROOT / name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")]
PAGES += [Page.read(file) for file in sorted((ROOT / "docs").rglob("*.md"))]
