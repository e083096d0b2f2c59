"""Profiles of machines by name and from files, and refused profiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.errors import InvalidStudy
from service.studies.planning.named import profile_named
from service.studies.planning.profiles import KINDS, MachineProfile


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_declared_kind_is_complete(kind: str) -> None:
    """A kind with GPUs has all of their speeds, and says where its figures are from."""
    found = profile_named(f"{kind}x4")
    assert found.source
    assert found.gpus in (0, 4)
    assert found.host_bytes == 4 * KINDS[kind].host_bytes
    speeds = (found.gpu_flops, found.gpu_flops_float32, found.gpu_bandwidth, found.link_bandwidth)
    assert all(speed > 0 for speed in (*speeds, found.mapped_bandwidth)) == (found.gpus > 0)


def test_kinds_with_numbers_in_their_names() -> None:
    assert profile_named("a100-40gbx8").gpu_bytes == 40 * 10**9
    assert (profile_named("rtx4090x2").gpus, profile_named("rtx4090").gpus) == (2, 1)
    assert (profile_named("h100x8", nodes=3, price=2.5).nodes, profile_named("h100x8", price=2.5).price) == (3, 2.5)


@pytest.mark.parametrize("name", ["", "b200x8", "h100x0", "h100x", "H100x8"])
def test_unknown_profiles_are_refused(name: str) -> None:
    with pytest.raises(InvalidStudy, match=r"--profile: .* is no profile; give one of h100, .*such as h100x8, a YAML"):
        profile_named(name)


def test_number_of_machines_replaces_that_of_a_file(tmp_path: Path) -> None:
    """A given number of machines counts, also one machine; without it, the file's number does."""
    file = tmp_path / "ours.yaml"
    file.write_text("like: h100x4\nnodes: 3\n")
    assert [profile_named(str(file), nodes=nodes).nodes for nodes in (None, 1, 2)] == [3, 1, 2]


def test_files_change_a_profile_or_state_one(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("like: h100x4\nhost_bytes: 500000000000\nprice: 2\n")
    found = profile_named(str(file))
    assert (found.name, found.gpus, found.host_bytes, found.price) == ("ours", 4, 5 * 10**11, 2)
    file.write_text("cores: 8\nhost_bytes: 1.0e+10\n")
    assert profile_named(str(file)) == MachineProfile("ours", 8, 10**10, source="ours.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "is not a mapping"),
        ("cores: 8", "host_bytes is missing; give it, or like: h100x8"),
        ("like: b200x8", "ours.yaml: like: 'b200x8' is no profile; give one of h100, "),
        ("like: h100x4\nspeed: 3", "'speed' is not a field; give like, name, cores"),
        ("like: h100x4\ncores: many", "cores: 'many' is not a number"),
        ("like: h100x4\ncores: 1.5", "cores: 1.5 is not a whole number"),
        ("like: h100x4\ngpu_bandwidth: -1", "gpu_bandwidth: -1 is not a number of at least 0"),
        ("like: h100x4\ngpu_bandwidth: .nan", "gpu_bandwidth: nan is not a number of at least 0"),
        ("like: h100x4\ncores: 0", "cores: must be above 0"),
        ("like: cpux4\ngpus: 2", "gpus=2 needs gpu_bytes, gpu_flops"),
        ("a: [", "cannot be read"),
    ],
    ids=["list", "missing", "like", "unknown", "text", "fraction", "negative", "nan", "zero", "no-gpu", "yaml"],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    """A wrong file is refused with the field, the value, what is accepted, and the file."""
    file = tmp_path / "ours.yaml"
    file.write_text(text)
    with pytest.raises(InvalidStudy) as caught:
        profile_named(str(file))
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
