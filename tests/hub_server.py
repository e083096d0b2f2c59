"""A small Hugging Face hub: the routes that its client uses, on this machine, with a record of what was served."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from workers.cache import CACHE_VARIABLE

NAME = r"(?P<name>(?:datasets/)?[\w.-]+/[\w.-]+)"
API = re.compile(
    rf"/api/(?:models/)?{NAME}(?:/(?P<kind>revision|tree|paths-info)/(?P<revision>[\w.%-]+)(?:/(?P<below>[\w./-]+))?)?"
)
FILE = re.compile(rf"/{NAME}/resolve/(?P<revision>[\w.%-]+)/(?P<file>[\w./-]+)")
PARQUET = "refs%2Fconvert%2Fparquet"  # where the hub puts Parquet files that it made; here the same as "main"
BLOB = re.compile(rf"/blobs/{NAME}/(?P<commit>\w+)/(?P<file>[\w./-]+)")


@dataclass
class Repository:
    """Repository of the hub: its commits by hash, the last one, and commits by branch, such as refs/pr/1.

    `refusal` is the status and error code with which the hub answers for files whose names end with `refused`.
    """

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    branches: dict[str, str] = field(default_factory=dict)
    refusal: tuple[int, str] | None = None
    refused: str = ""


@dataclass
class Hub:
    """Repositories by name ("datasets/owner/name" for data).

    The hub also records requests as (method, path), the number of bytes sent of each LFS file ("name/file"), the
    contents of uploaded LFS files by sha256, and whether each repository created by a client is private.
    `write_refusal` is the status and error code with which the hub refuses to create repositories.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    sends_ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    uploaded: dict[str, bytes] = field(default_factory=dict)
    is_private: dict[str, bool] = field(default_factory=dict)
    write_refusal: tuple[int, str] | None = None

    def push(self, name: str, directory: Path) -> str:
        """Commit the directory's files as the new head, and return the commit's hash."""
        files = {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
        repository = self.repositories.setdefault(name, Repository())
        content = json.dumps([name, sorted((file, digest(data)) for file, data in files.items())])
        repository.head = digest(content.encode())[:40]
        repository.commits[repository.head] = files
        return repository.head

    def sent_of(self, name: str) -> int:
        return sum(count for file, count in self.sent.items() if file.startswith(f"{name}/"))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serving(hub: Hub) -> Iterator[None]:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def only_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[None]:
    """Let the client know `hub` alone, with empty caches in `directory`, and serve it meanwhile."""
    monkeypatch.setenv(CACHE_VARIABLE, str(directory / "cache"))
    with serving(hub):
        constants = "huggingface_hub.constants"
        monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(directory / "hub"))
        monkeypatch.setattr(f"{constants}.ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        for pattern, answer in UPLOADS.items():
            if match := pattern.fullmatch(path):
                self.hub.requests.append((self.command, path))
                return answer(self, body, **match.groupdict())
        return self._answer(json.loads(body or b"{}"))

    def do_PUT(self) -> None:
        """Receive the content of an LFS file, whose name is its sha256."""
        self.hub.requests.append((self.command, self.path))
        data = self._body()
        if digest(data) != self.path.rpartition("/")[2]:
            return self._refuse(400, "BadContent")
        self.hub.uploaded[digest(data)] = data
        return self._send(200, b"", {})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if self.hub.write_refusal is not None:
            return self._refuse(*self.hub.write_refusal)
        if name in self.hub.repositories:
            return self._send(409, json.dumps({"url": f"{self.hub.url}/{name}", "id": name}).encode(), {})
        self.hub.repositories[name] = Repository({"0" * 40: {}}, "0" * 40)
        self.hub.is_private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return self._send_json({"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def _preupload(self, body: bytes, name: str) -> None:
        files = [
            {"path": file["path"], "uploadMode": "lfs" if _is_lfs(file["path"]) else "regular", "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        self._send_json({"files": files})

    def _lfs_batch(self, body: bytes, name: str) -> None:
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        self._send(
            200,
            json.dumps({"transfer": "basic", "objects": objects}).encode(),
            {"Content-Type": "application/vnd.git-lfs+json"},
        )

    def _commit(self, body: bytes, name: str) -> None:
        """Apply a commit: a header, and lines that add or delete files, one JSON document each."""
        repository = self.hub.repositories[name]
        files = dict(repository.commits[repository.head])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.hub.uploaded[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        repository.head = digest(json.dumps([name, sorted((f, digest(d)) for f, d in files.items())]).encode())[:40]
        repository.commits[repository.head] = files
        url = f"{self.hub.url}/{name}/commit/{repository.head}"
        self._send_json({"success": True, "commitOid": repository.head, "commitUrl": url})

    def _validate(self, body: bytes) -> None:
        self._send_json({"errors": [], "warnings": []})

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, asked: Any = None) -> None:
        path, _, query = self.path.partition("?")
        self.hub.requests.append((self.command, path))
        if match := BLOB.fullmatch(path):
            data = self.hub.repositories[match["name"]].commits[match["commit"]][match["file"]]
            return self._send_part(data, f"{match['name']}/{match['file']}")
        match = API.fullmatch(path) or FILE.fullmatch(path)
        repository = self.hub.repositories.get(match["name"]) if match else None
        if match is None or repository is None:
            return self._refuse(401, "RepoNotFound")
        revision = match["revision"] or "main"
        named = {"main": repository.head, PARQUET: repository.head, **repository.branches}
        commit = named.get(revision) or named.get(unquote(revision), revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[commit]
        if match.re is FILE:
            if repository.refusal and match["file"].endswith(repository.refused):
                return self._refuse(*repository.refusal)
            return self._send_file(match["name"], commit, match["file"], files.get(match["file"]))
        if match["kind"] == "tree":
            within = {file: data for file, data in files.items() if _is_below(file, match["below"])}
            if "recursive=true" in query.lower() or not match["name"].startswith("datasets/"):
                return self._send_json([_tree_entry(file, data) for file, data in within.items()])
            return self._send_json(_children(within, match["below"]))
        if match["kind"] == "paths-info":
            found = [_tree_entry(path, files[path]) for path in asked["paths"] if path in files]
            found += [_directory(path) for path in asked["paths"] if any(_is_below(file, path) for file in files)]
            return self._send_json(found)
        siblings = [_sibling(file, data, with_sizes="blobs=true" in query.lower()) for file, data in files.items()]
        return self._send_json({"id": match["name"], "sha": commit, "siblings": siblings, "private": False})

    def _send_file(self, name: str, commit: str, file: str, data: bytes | None) -> None:
        if data is None:
            return self._refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest(data)[:40]}"'}
        if not _is_lfs(file):
            return self._send(200, data, headers)
        host = self.hub.url.replace("127.0.0.1", "localhost")  # another one, as the hub's storage is
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{digest(data)}"'}
        return self._send(302, b"", {**headers, **linked, "Location": f"{host}/blobs/{name}/{commit}/{file}"})

    def _send_part(self, data: bytes, label: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.hub.sends_ranges:
            begin, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            part, status = data[begin : end + 1], 206
            headers = {"Content-Range": f"bytes {begin}-{end}/{len(data)}"}
        else:
            part, status, headers = data, 200, {}
        self.hub.sent[label] = self.hub.sent.get(label, 0) + len(part)
        self._send(status, part, headers)

    def _send_json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            try:
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):  # who asks has seen enough
                self.close_connection = True


UPLOADS: dict[re.Pattern[str], Callable[..., None]] = {
    re.compile(r"/api/repos/create"): _Handler._create,
    re.compile(r"/api/validate-yaml"): _Handler._validate,
    re.compile(rf"/api/models/{NAME}/preupload/main"): _Handler._preupload,
    re.compile(rf"/{NAME}\.git/info/lfs/objects/batch"): _Handler._lfs_batch,
    re.compile(rf"/api/models/{NAME}/commit/main"): _Handler._commit,
}


def _is_lfs(file: str) -> bool:
    return file.endswith((".safetensors", ".bin", ".parquet"))


def _is_below(file: str, directory: str | None) -> bool:
    return directory is None or file.startswith(f"{directory}/")


def _directory(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": digest(path.encode())[:40]}


def _children(files: dict[str, bytes], below: str | None) -> list[dict[str, Any]]:
    """The files and directories in the directory `below`, from the paths in `files`."""
    start = 0 if below is None else len(below) + 1
    names = {file[:start] + file[start:].split("/")[0] for file in files}
    return [_tree_entry(name, files[name]) if name in files else _directory(name) for name in sorted(names)]


def _sibling(file: str, data: bytes, *, with_sizes: bool) -> dict[str, Any]:
    sizes: dict[str, Any] = {"size": len(data), "blobId": digest(data)[:40]} if with_sizes else {}
    if with_sizes and _is_lfs(file):
        sizes["lfs"] = {"size": len(data), "sha256": digest(data), "pointerSize": 134}
    return {"rfilename": file, **sizes}


def _tree_entry(file: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(data), "oid": digest(data)[:40]}
    if _is_lfs(file):
        entry["lfs"] = {"oid": digest(data), "size": len(data), "pointerSize": 134}
    return entry
