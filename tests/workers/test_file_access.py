"""Access to files below given directories only, also through symbolic links."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from workers.file_access import FileAccess
from workers.object_store import blob_path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("a/inner", "ab"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a" / "out").symlink_to(tmp_path / "ab")
    (tmp_path / "ab" / "in").symlink_to(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "may_be_read"),
    [
        ("a", True),
        ("a/inner/../x", True),
        ("a/none/x", True),
        ("ab/in/x", True),
        ("ab", False),
        ("ab/x", False),
        ("a/../ab", False),
        ("a/out/x", False),
        ("", False),
    ],
)
@pytest.mark.parametrize("root", ["a", "link"])
def test_what_is_below_may_be_read(place: Path, path: str, may_be_read: bool, root: str) -> None:
    access = FileAccess((str(place / root),))
    refusal = access.refusal(place / path)
    assert (refusal is None) == may_be_read
    if refusal is not None:
        assert refusal.startswith(f"{place / path}: is not below a directory that studies may read ({place / root};")
        assert refusal.endswith("can add its directory with --allow-dir")


def test_files_of_a_directory_may_be_links_to_other_places(place: Path) -> None:
    access = FileAccess((str(place / "a"),))
    assert access.refusal(place / "a") is None
    assert access.refusal_of_all(place / "a/inner") is None
    assert str(place / "a" / "out") in (access.refusal_of_all(place / "a") or "")


def test_trusted_directories_may_be_read_and_others_run_no_code(place: Path) -> None:
    access = FileAccess((str(place / "a"),), (str(place / "ab"),))
    assert access.refusal(place / "ab" / "x") is None
    assert access.distrust(place / "ab") is None
    assert "--trust-dir" in (access.distrust(place / "a") or "")


@pytest.mark.parametrize(
    ("url", "may_be_read"),
    [
        ("s3://bucket/models/math", True),
        ("s3://bucket/models/", True),
        ("s3://bucket/models", True),
        ("s3://bucket/models2/math", False),
        ("s3://bucket/models/../private", False),
        ("s3://bucket", False),
        ("gs://bucket/models/math", False),
    ],
)
def test_models_below_a_url_may_be_read(url: str, may_be_read: bool) -> None:
    """Only folders below an allowed URL may be read; access of earlier versions allows none."""
    access = FileAccess(("/data",), urls=("s3://bucket/models/",))
    assert (access.url_refusal(url) is None) is may_be_read
    assert FileAccess.of(json.loads(json.dumps(asdict(access)))) == access
    old = FileAccess.of({"readable": ["/data"], "trusted": []})
    assert "there is none" in (old.url_refusal(url) or "")


@pytest.mark.parametrize("more", [f" s3://other/private/{blob_path('ab' * 32)}", "\ts3://other", "::s3://other", "'"])
def test_a_url_inside_an_allowed_one_is_refused(more: str) -> None:
    access = FileAccess((), urls=("s3://bucket/models",))
    assert "has white space, a quote" in (access.url_refusal(f"s3://bucket/models/x{more}") or "")


def test_a_closed_directory_is_not_read(place: Path) -> None:
    """Below a closed directory only those are read that are allowed there by name, however it is reached."""
    closed = (str(place / "a"),)
    for readable in (("",), ("a",), ("", "a", "link")):
        access = FileAccess(tuple(str(place / name) for name in readable), (str(place),), closed=closed)
        for path in ("a", "a/x", "link/x", "a/inner/x"):
            assert "among the server's own files" in (access.refusal(place / path) or ""), (readable, path)
        assert access.refusal(place / "ab" / "x") is None
        assert access.distrust(place / "a" / "inner") is not None
        assert access.distrust(place / "ab") is None
    access = FileAccess((str(place),), closed=closed).allowing([str(place / "a" / "inner")])
    assert access.refusal(place / "a" / "inner" / "x") is None
    assert access.refusal(place / "a" / "x") is not None
    assert FileAccess.of(json.loads(json.dumps(asdict(access)))) == access
