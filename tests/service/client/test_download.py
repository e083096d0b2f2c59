"""Unpacking a downloaded model: completely or not at all, and never outside its directory."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from service.client.download import unpack
from service.errors import Conflict, InvalidAnswer

FILES = {
    "model/config.json": b"{}",
    "model/tokenizer/vocab.txt": b"a\nb\n",
    "model/model.safetensors": bytes(3_000_000),
}
TOTAL = sum(map(len, FILES.values()))


def archive(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", **headers: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.pax_headers = kind, link, 0o6777, headers
    return info


def good() -> bytes:
    return archive((member("model", tarfile.DIRTYPE), b""), *((member(name), data) for name, data in FILES.items()))


def chunks(data: bytes, size: int = 50_000) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def test_a_folder_comes_out_as_it_went_in(tmp_path: Path) -> None:
    for number, size in enumerate((333, 50_000, 10**8)):
        out = tmp_path / "deep" / f"merged-{number}"
        assert unpack(chunks(good(), size), out, num_bytes=TOTAL) == out
        found = {f"model/{file.relative_to(out)}": file.read_bytes() for file in out.rglob("*") if file.is_file()}
        assert found == FILES
    assert sorted(os.listdir(tmp_path / "deep")) == ["merged-0", "merged-1", "merged-2"]


def test_modes_and_owners_of_the_archive_mean_nothing(tmp_path: Path) -> None:
    out = unpack(chunks(good()), tmp_path / "merged")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((out / "config.json").stat().st_mode) == 0o666 & ~mask
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~mask


def test_nothing_is_seen_of_it_before_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "merged"

    def watched() -> Iterator[bytes]:
        for chunk in chunks(good()):
            assert not out.exists()
            yield chunk

    unpack(watched(), out)
    assert out.is_dir()


def test_a_relative_directory_is_one_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert unpack(chunks(good()), Path("merged")) == tmp_path / "merged"


@pytest.mark.parametrize(
    "take",
    [lambda path: path.mkdir(), lambda path: path.write_text("mine"), lambda path: path.symlink_to("nowhere")],
    ids=["directory", "file", "dangling link"],
)
def test_what_exists_is_left_as_it_is(tmp_path: Path, take: Callable[[Path], object]) -> None:
    out = tmp_path / "merged"
    take(out)
    with pytest.raises(Conflict, match=rf"^{out}: exists already; give a directory that does not$"):
        unpack(chunks(good()), out)
    assert os.listdir(tmp_path) == ["merged"]


def test_a_directory_that_appears_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "merged"

    def slow() -> Iterator[bytes]:
        first, *others = chunks(good())
        yield first
        out.mkdir()
        yield from others

    with pytest.raises(Conflict, match="exists already"):
        unpack(slow(), out)
    assert list(out.iterdir()) == []


def test_a_disk_that_is_too_small_is_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9 - 10**6, 10**6))
    with pytest.raises(
        Conflict, match=r"merged: the disk has 0\.0 GiB free, the merged model needs 20\.1 GiB; make room"
    ):
        unpack(iter(()), tmp_path / "merged", num_bytes=20 * 2**30)


TRICKS = {
    "parent": (member("model/../../evil"), "leads out of its folder"),
    "parent at the start": (member("../evil"), "leads out of its folder"),
    "absolute": (member("/tmp/evil"), "leads out of its folder"),
    "backslashes": (member("model\\..\\evil"), "leads out of its folder"),
    "zero byte": (member("model/a", path="model/a\0b"), "leads out of its folder"),
    "symbolic link": (member("model/link", tarfile.SYMTYPE, link="/etc/passwd"), "neither a folder nor an ordinary"),
    "hard link": (member("model/link", tarfile.LNKTYPE, link="model/config.json"), "neither a folder nor an ordinary"),
    "device": (member("model/null", tarfile.CHRTYPE), "neither a folder nor an ordinary file"),
    "pipe": (member("model/pipe", tarfile.FIFOTYPE), "neither a folder nor an ordinary file"),
    "second folder": (member("other/config.json"), "'other/config.json' is not in the folder 'model'"),
    "file beside the folder": (member("evil"), "'evil' is not in a folder"),
    "the folder as a file": (member("model"), "'model' is not in a folder"),
    "twice": (member("model/config.json"), "holds model/config.json twice"),
    "file as a folder": (member("model/config.json/evil"), "holds model/config.json twice"),
    "file as a deep folder": (member("model/config.json/a/evil"), "twice"),
}


@pytest.mark.parametrize("name", TRICKS)
def test_tricks_are_refused_and_leave_nothing_behind(tmp_path: Path, name: str) -> None:
    trick, message = TRICKS[name]
    directory = tmp_path / "inner"
    directory.mkdir()
    content = b"" if trick.type != tarfile.REGTYPE else b"evil"
    data = archive((member("model/config.json"), b"{}"), (trick, content))
    with pytest.raises(InvalidAnswer, match=message):
        unpack(chunks(data), directory / "merged")
    assert [str(path) for path in tmp_path.rglob("*")] == [str(directory)]


def test_a_sparse_file_that_would_fill_the_disk_is_refused(tmp_path: Path) -> None:
    sparse = member("model/huge")
    sparse.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.size": str(2**50), "GNU.sparse.map": "0,4"}
    with pytest.raises(InvalidAnswer, match="neither a folder nor an ordinary file"):
        unpack(chunks(archive((sparse, b"evil"))), tmp_path / "merged")


def test_a_name_that_the_disk_cannot_hold_is_a_message(tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="cannot be written: File name too long"):
        unpack(chunks(archive((member("model/" + 300 * "a"), b""))), tmp_path / "merged")
    assert os.listdir(tmp_path) == []


def test_an_archive_that_was_cut_off_is_refused_wherever_it_was(tmp_path: Path) -> None:
    data = archive(*((member(f"model/{number}"), bytes(700)) for number in range(3)))
    end = 3 * 1536  # a header and two blocks each; then zeros
    for cut in (0, 100, 512, 1000, 1536, 2000, end - 600):
        with pytest.raises(InvalidAnswer, match=r"^archive: (cannot be read|cut off after|is empty)"):
            unpack(chunks(data[:cut], 100), tmp_path / "merged", num_bytes=2100)
    assert os.listdir(tmp_path) == []
    unpack(chunks(data[:end]), tmp_path / "merged", num_bytes=2100)


def test_more_than_was_announced_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidAnswer, match="holds more than the 3000001 bytes announced"):
        unpack(chunks(good()), tmp_path / "merged", num_bytes=3_000_001)


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"<html>not found</html>", bytes(10240)):
        with pytest.raises(InvalidAnswer, match=r"^archive: (cannot be read|is empty)"):
            unpack(chunks(data), tmp_path / "merged")


def test_whatever_ends_the_download_leaves_nothing_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        yield good()[:200_000]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack(broken(), tmp_path / "merged")
    assert os.listdir(tmp_path) == []
