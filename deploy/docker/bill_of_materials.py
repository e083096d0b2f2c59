"""Writes what an image consists of: `python bill_of_materials.py PYTHON_SBOM DIRECTORY NAME==VERSION...`.

PYTHON_SBOM is a CycloneDX document of the installed Python distributions, as `cyclonedx-py environment` writes it.
DIRECTORY gets `sbom.json`, the same document with the Debian packages of this system, and `licences.txt`, a line for
each component with its licence and the place of the licence's text in the image. Each NAME==VERSION must be among the
Python distributions. Only the standard library is used, since the script runs in the image that it describes.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

FIELDS = ("Package", "Version", "Architecture")
DOCUMENTATION = Path("/usr/share/doc")
# How distributions and Debian packages call the files with licences.
TEXTS = re.compile(r"licen[cs]e|copying|notice|copyright", re.IGNORECASE)
# Of a component that names no licence and may have a text of one.
UNKNOWN = "not named"


def debian_packages(documentation: Path = DOCUMENTATION) -> Iterator[dict[str, Any]]:
    """Yield a CycloneDX component for each installed Debian package, with the licences in its file `copyright`."""
    form = "\\t".join(f"${{{field}}}" for field in FIELDS) + "\\n"
    listed = subprocess.run(
        ["dpkg-query", "--show", f"--showformat={form}"], check=True, capture_output=True, text=True
    ).stdout
    for line in sorted(listed.splitlines()):
        name, version, architecture = line.split("\t")
        yield {
            "type": "library",
            "bom-ref": f"deb:{name}:{architecture}",
            "name": name,
            "version": version,
            "purl": f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}",
            "licenses": [{"license": {"name": licence}} for licence in debian_licences(documentation / name)],
            "properties": [{"name": "licence-text", "value": str(documentation / name / "copyright")}],
        }


def debian_licences(directory: Path) -> list[str]:
    """Names of the licences in a package's file `copyright`, as far as it is machine-readable."""
    try:
        text = (directory / "copyright").read_text(errors="replace")
    except OSError:
        return []
    if not text.startswith("Format:"):
        return []
    return sorted(set(re.findall(r"^License: *(\S.*?) *$", text, re.MULTILINE)))


def licence_of(component: Mapping[str, Any]) -> str:
    """The licence that a component declares, on one line."""
    found = []
    for entry in component.get("licenses", ()):
        licence = entry.get("license", {})
        name = entry.get("expression") or licence.get("id") or licence.get("name") or ""
        found.append(" ".join(name.split()))
    return "; ".join(dict.fromkeys(filter(None, found))) or UNKNOWN


def texts_of(component: Mapping[str, Any]) -> list[str]:
    """Files of this system with the texts of a component's licences."""
    if stated := [entry["value"] for entry in component.get("properties", ()) if entry["name"] == "licence-text"]:
        return stated
    try:
        distribution = importlib.metadata.distribution(component["name"])
    except importlib.metadata.PackageNotFoundError:
        return []
    files = distribution.files or ()
    # Texts of what a distribution contains are there too, in folders of its metadata.
    return [
        str(distribution.locate_file(file)) for file in files if ".dist-info" in str(file) and TEXTS.search(file.name)
    ]


def missing(components: Iterable[Mapping[str, Any]], expected: Sequence[str]) -> list[str]:
    """The entries of `expected`, each NAME==VERSION, that are not among the components."""
    found = {f"{component['name']}=={component['version']}" for component in components}
    return [each for each in expected if each not in found]


def main(arguments: Sequence[str]) -> int:
    """Write both files; the result is the exit code."""
    document = json.loads(Path(arguments[0]).read_text())
    directory = Path(arguments[1])
    if absent := missing(document["components"], arguments[2:]):
        wanted = {each.partition("==")[0] for each in absent}
        found = [f"{each['name']}=={each['version']}" for each in document["components"] if each["name"] in wanted]
        print(
            f"not installed: {', '.join(absent)}; found: {', '.join(found) or 'no other version'}; "
            "correct the versions of the image's labels, or the folder of wheels of the build",
            file=sys.stderr,
        )
        return 1
    document["components"] += debian_packages()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sbom.json").write_text(json.dumps(document, indent=1) + "\n")
    rows = [
        "\t".join((component["name"], component["version"], licence_of(component), " ".join(texts_of(component))))
        for component in document["components"]
    ]
    (directory / "licences.txt").write_text("\n".join(["name\tversion\tlicence\ttext", *rows]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
