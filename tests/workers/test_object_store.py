"""Object stores: objects come back unchanged, and every failure names the attempted operation."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.s3_server import S3, failing
from workers import object_store
from workers.object_store import ObjectStore, ObjectStoreError, is_object_url, object_url_problem

MIB = 2**20


@pytest.fixture
def objects(s3: S3) -> ObjectStore:
    return ObjectStore(f"{s3.bucket()}/studies/1")


def test_objects_come_back(objects: ObjectStore) -> None:
    objects.write("a/b", b"0123456789")
    assert objects.read("a/b") == b"0123456789"
    assert objects.read("a/b", start=2, stop=5) == b"234"
    with objects.open("a/b") as stream:
        assert (stream.read(4), stream.read()) == (b"0123", b"456789")
    info = objects.info("a/b")
    assert info is not None
    assert info.num_bytes == 10
    assert list(objects.list()) == list(objects.list("a")) == ["a/b"]
    objects.delete("a/b")
    objects.delete("a/b")
    assert objects.info("a/b") is None
    assert objects.list() == {}
    with pytest.raises(FileNotFoundError):
        objects.read("a/b")


def test_listings_are_never_old(objects: ObjectStore) -> None:
    """A listing shows what another client has written since the last one."""
    assert objects.list() == {}
    ObjectStore(objects.url).write("new", b"1")
    assert list(objects.list()) == ["new"]
    ObjectStore(objects.url).write("new", b"12")
    assert objects.list()["new"].num_bytes == 2


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file of 11 MiB be sent in three parts."""
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)


@pytest.mark.usefixtures("small_parts")
def test_large_files_are_sent_in_parts(objects: ObjectStore, s3: S3, tmp_path: Path) -> None:
    content = os.urandom(11 * MIB)
    (tmp_path / "weights").write_bytes(content)
    s3.requests.clear()
    objects.upload(tmp_path / "weights", "weights")
    assert sum("partNumber" in path for _, path in s3.requests) == 3
    objects.download("weights", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content


@pytest.mark.usefixtures("small_parts")
def test_a_failed_part_leaves_no_object(objects: ObjectStore, s3: S3, tmp_path: Path) -> None:
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(11 * MIB)
    with (
        failing(s3, lambda _, path: (403, "AccessDenied") if "partNumber=3" in path else None),
        pytest.raises(ObjectStoreError, match=r"studies/1/weights: cannot write it: .*refused by the test"),
    ):
        objects.upload(tmp_path / "weights", "weights")
    assert objects.list() == {}


def test_one_of_many_creates(objects: ObjectStore) -> None:
    """Of several writers of one path exactly one succeeds, and its content stays."""
    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(lambda number: objects.create("owner", str(number).encode()), range(8)))
    assert sum(created) == 1
    assert objects.read("owner") == str(created.index(True)).encode()


def test_short_failures_are_retried(objects: ObjectStore, s3: S3) -> None:
    answers = iter([(503, "SlowDown"), (500, "InternalError")])
    with failing(s3, lambda method, _: next(answers, None) if method == "PUT" else None):
        objects.write("a", b"1")
    assert objects.read("a") == b"1"
    assert next(answers, None) is None


@pytest.mark.parametrize(
    ("method", "what"), [("PUT", "write"), ("DELETE", "delete"), ("GET", "list")], ids=["write", "delete", "list"]
)
def test_missing_rights_are_found_at_once(objects: ObjectStore, s3: S3, method: str, what: str) -> None:
    """The check names the operation that the store refuses."""
    objects.check()
    assert objects.list() == {}
    with (
        failing(s3, lambda each, _: (403, "AccessDenied") if each == method else None),
        pytest.raises(ObjectStoreError, match=rf"{objects.url}.*: cannot {what} it: .*refused by the test"),
    ):
        objects.check()


def test_a_missing_bucket_is_named(s3: S3) -> None:
    with pytest.raises(ObjectStoreError, match=r"s3://no-such-bucket/x: .*bucket does not exist; create the bucket"):
        ObjectStore("s3://no-such-bucket/x").check()


def test_a_store_that_does_not_answer_is_an_error(objects: ObjectStore, s3: S3) -> None:
    with (
        failing(s3, lambda *_: (401, "InvalidAccessKeyId")),
        pytest.raises(ObjectStoreError, match="cannot read it"),
    ):
        objects.read("a")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("s3://", "is no URL of an object store"),
        ("ftp://host/x", "is no URL of an object store; expected s3://BUCKET/FOLDER or gs://BUCKET/FOLDER"),
        ("s3://key:secret@bucket/x", r"s3://\*\*\*@bucket: credentials do not belong in a URL"),
        ("s3://bucket/x s3://other", "has white space, a quote, a control character or '::'; use the URL of a folder"),
        ("s3://bucket/x\u3000y", "has white space"),
        ("s3://bucket/x'y", "has white space, a quote"),
        ("s3://bucket/\x00", "has white space, a quote, a control character"),
        ("s3://bucket/x::file:///etc", "has white space, a quote, a control character or '::'"),
    ],
)
def test_wrong_urls_are_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        ObjectStore(url)
    assert "secret" not in str(error.value)
    assert object_url_problem("s3://bucket") is None


def test_paths_are_no_urls() -> None:
    assert is_object_url("s3://bucket/x")
    assert not any(map(is_object_url, ["/s3/x", "owner/name", "http://host", "s3:/bucket", "file:///x"]))


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ImportError("Install gcsfs", name="gcsfs")

    monkeypatch.setattr("fsspec.core.url_to_fs", absent)
    with pytest.raises(
        ObjectStoreError, match=r"needs the driver gcsfs; install it with `pip install 'mergesearch\[gs\]'`"
    ):
        object_store.ObjectStore("gs://bucket/x")
