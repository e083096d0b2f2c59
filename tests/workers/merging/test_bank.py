from __future__ import annotations

import itertools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import lora_adapter, tiny_family
from tests.conftest import HIDDEN
from tests.workers.recipes import arithmetic
from workers.errors import EvidenceMismatch, InvalidModel
from workers.merging.bank import Bank, _HostMemory, _pin
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.methods.arithmetic import cosine, inner_products, total
from workers.merging.methods.competition import variance
from workers.merging.order_statistics import MagnitudeTable, magnitude_keys
from workers.models.checkpoints import open_checkpoint
from workers.models.family import open_family, resolve_family
from workers.models.fingerprints import fingerprint
from workers.types import Family

NAME = "model.layers.1.self_attn.q_proj.weight"


def changed(family: Family, root: Path, changes: dict[str, torch.Tensor], **config: object) -> Family:
    """The family with its last expert replaced by a copy that has other tensors and another configuration."""
    expert = family.experts[-1]
    copy = shutil.copytree(expert.directory, root / "changed")
    save_file({**load_file(copy / "model.safetensors"), **changes}, copy / "model.safetensors", {"format": "pt"})
    settings = json.loads((copy / "config.json").read_text()) | config
    (copy / "config.json").write_text(json.dumps(settings))
    replaced = replace(
        expert, directory=str(copy), fingerprint=fingerprint(open_checkpoint(copy), cache=root / "cache")
    )
    return replace(family, experts=(*family.experts[:-1], replaced))


def overwrite(file: Path, *, in_place: bool = True) -> None:
    """Write other weights of the same size into a file, or replace it by another file of the same name."""
    contents = bytearray(file.read_bytes())
    contents[-100:] = bytes(100)
    with file.open("r+b") if in_place else (file.parent / "new").open("wb") as stream:
        stream.write(contents)
    if not in_place:
        (file.parent / "new").replace(file)


def test_refused_pinning_leaves_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """CUDA's error of memory that it does not pin is taken away before it is raised after a merge's kernel."""
    last = [0]

    def register(*_: int) -> int:
        last[0] = 801
        return 801

    def kernel(_: int, *, device: str) -> None:
        error, last[0] = last[0], 0
        raise RuntimeError(f"CUDA error {error} on {device}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "ones", kernel)
    _pin(torch.empty(64, dtype=torch.uint8))
    assert last == [0]
    assert "not pinned (CUDA error 801)" in caplog.text


def test_tensors_follow_the_bank(untied_family: Family, tmp_path: Path) -> None:
    """Requested tensors follow the bank to another device."""
    bank = Bank(untied_family, cache=tmp_path)
    alias = untied_family.experts[0].alias
    assert bank.get(alias, NAME) is bank.get(alias, NAME)
    assert bank.on("meta").get(alias, NAME).device.type == "meta"
    assert bank.get(alias, NAME).device.type == "cpu"


def test_the_bank_gives_the_stored_tensors_in_their_stored_dtype(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    total = 0
    for model in untied_family.models:
        stored = load_file(Path(model.directory) / "model.safetensors")
        for name, tensor in stored.items():
            assert bank.get(model.alias, name).dtype == torch.bfloat16
            assert torch.equal(bank.get(model.alias, name), tensor)
            total += tensor.nbytes
    assert bank.summary() == {
        "placement": "mapped",
        "bytes": total,
        "statistics_bytes": 0,
        "models": 3,
        "fingerprint": bank.fingerprint,
    }


def test_the_bank_can_be_in_memory(untied_family: Family, tmp_path: Path) -> None:
    mapped, held = Bank(untied_family, cache=tmp_path), Bank(untied_family, "host", cache=tmp_path)
    assert held.summary() == {**mapped.summary(), "placement": "host"}
    assert torch.equal(held.get("math", NAME), mapped.get("math", NAME))
    assert held.get("math", NAME).data_ptr() != mapped.get("math", NAME).data_ptr()


@pytest.mark.parametrize("chunk", [1, 50_000, 1 << 30])
def test_in_memory_tensors_lie_apart(
    untied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("workers.merging.bank.CHUNK_BYTES", chunk)
    mapped, held = Bank(untied_family, cache=tmp_path), Bank(untied_family, "host", cache=tmp_path)
    names = [(model.alias, name) for model in untied_family.models for name in mapped.base.tensors]
    assert all(torch.equal(held.get(*name), mapped.get(*name)) for name in names)
    places = sorted((held.get(*name).data_ptr(), held.get(*name).nbytes) for name in names)
    assert all(first + size <= second for (first, size), (second, _) in itertools.pairwise(places))
    assert all(first % 64 == 0 for first, _ in places), "kernels read whole lines"


def test_what_the_bank_does_not_hold_is_named(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    with pytest.raises(InvalidModel, match=r"no tensor 'x' of model 'math'; it holds the tensors of base, math, text"):
        bank.get("math", "x")
    with pytest.raises(ValueError, match=r"placement 'disk'; expected one of mapped, host$"):
        Bank(untied_family, "disk", cache=tmp_path)
    with pytest.raises(ValueError, match=r"placement 'gpu'; expected one of mapped, host$"):
        Bank(untied_family, "gpu", cache=tmp_path)


def test_the_fingerprint_follows_contents_and_not_aliases(
    untied_family: Family, tied_family: Family, tmp_path: Path
) -> None:
    renamed = replace(
        untied_family, experts=tuple(replace(e, alias=e.alias + "2") for e in untied_family.experts[::-1])
    )
    bank, other = Bank(untied_family, cache=tmp_path), Bank(renamed, cache=tmp_path)
    assert bank.fingerprint == other.fingerprint != Bank(tied_family, cache=tmp_path).fingerprint
    assert other.alias(untied_family.experts[0].fingerprint) == "math2"
    assert bank.alias("0" * 64) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_infinite_values_are_refused(untied_family: Family, tmp_path: Path, value: float) -> None:
    """Values that are not finite are refused with tensor and model."""
    bad = load_file(Path(untied_family.base.directory) / "model.safetensors")[NAME]
    bad[3, 4] = bad[5, 6] = value
    family = changed(untied_family, tmp_path, {NAME: bad})
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InvalidModel) as caught:
            Bank(family, cache=tmp_path / "cache")
        assert caught.value.problems == (
            f"model 'text': {tmp_path}/changed: tensor {NAME!r} holds 2 values that are NaN or infinite; "
            "expected finite weights",
        )


def test_contents_are_scanned_once(untied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Bank(untied_family, cache=tmp_path)
    monkeypatch.setattr(torch, "aminmax", lambda tensor: pytest.fail("scanned again"))
    Bank(untied_family, cache=tmp_path)


def test_a_stored_head_that_contradicts_tying_is_refused(tied_family: Family, tmp_path: Path) -> None:
    embedding = load_file(Path(tied_family.experts[-1].directory) / "model.safetensors")["model.embed_tokens.weight"]
    same = changed(tied_family, tmp_path / "same", {"lm_head.weight": embedding.clone()})
    assert Bank(same, cache=tmp_path / "cache").layout.is_tied
    other = changed(tied_family, tmp_path / "other", {"lm_head.weight": embedding + 1})
    with pytest.raises(InvalidModel, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight', though"):
        Bank(other, cache=tmp_path / "cache")


def test_a_model_that_changed_after_it_was_named_is_refused(untied_family: Family, tmp_path: Path) -> None:
    family = changed(untied_family, tmp_path, {})
    tensors = load_file(tmp_path / "changed" / "model.safetensors")
    tensors[NAME] = tensors[NAME] + 1
    save_file(tensors, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidModel, match=r"model 'text': .* has changed: its fingerprint is [0-9a-f]{12}, expected"):
        Bank(family, cache=tmp_path / "cache")


@pytest.mark.parametrize("placement", ["mapped", "host"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_changes_while_the_bank_holds_it_is_refused(
    untied_family: Family, tmp_path: Path, placement: str, in_place: bool
) -> None:
    family = changed(untied_family, tmp_path, {})
    bank, recipe = Bank(family, placement, cache=tmp_path / "cache"), arithmetic(family, 0.3, 0.5)
    before = dict(merged_tensors(recipe, bank, torch.float32))
    file = tmp_path / "changed" / "model.safetensors"
    overwrite(file, in_place=in_place)
    places = {name: torch.empty_like(tensor) for name, tensor in before.items()}
    for merge in (lambda: merged_tensors(recipe, bank, torch.float32), lambda: merge_into(recipe, bank, places)):
        with pytest.raises(EvidenceMismatch) as caught:
            merge()
        assert f"model 'text' has changed since it was opened: {file}: it was modified at " in str(caught.value)
        assert "restore them, or start a new study" in str(caught.value)


def test_touched_file_has_not_changed(untied_family: Family, tmp_path: Path) -> None:
    """A file that was touched or replaced by a copy counts as unchanged."""
    family = changed(untied_family, tmp_path, {})
    bank, recipe = Bank(family, cache=tmp_path / "cache"), arithmetic(family, 0.3, 0.5)
    before = dict(merged_tensors(recipe, bank, torch.float32))
    file = tmp_path / "changed" / "model.safetensors"
    os.utime(file, ns=(0, 0))
    bank.sources.check_unchanged()
    copy = tmp_path / "copy"
    shutil.copy(file, copy)
    copy.replace(file)
    after = dict(merged_tensors(recipe, bank, torch.float32))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    (tmp_path / "changed" / "config.json").write_text("{}")
    with pytest.raises(
        EvidenceMismatch, match=r"changed/config.json: it had \d+ bytes and has 2; expected the contents"
    ):
        bank.sources.check_unchanged()


def test_a_model_that_is_gone_is_still_held(untied_family: Family, tmp_path: Path) -> None:
    family = changed(untied_family, tmp_path, {})
    bank, recipe = Bank(family, cache=tmp_path / "cache"), arithmetic(family, 0.3, 0.5)
    before = dict(merged_tensors(recipe, bank, torch.float32))
    (tmp_path / "changed").rename(tmp_path / "elsewhere")
    after = dict(merged_tensors(recipe, bank, torch.float32))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_family_that_does_not_fit_together_is_refused(
    untied_family: Family, tied_family: Family, tmp_path: Path
) -> None:
    mixed = replace(untied_family, experts=tied_family.experts)
    with pytest.raises(InvalidModel, match="model_type is 'qwen2'; the base has 'llama'"):
        Bank(mixed, cache=tmp_path)


def test_cosines_are_those_of_the_tensors(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    expected = cosine(bank.get("math", NAME).float(), bank.get("text", NAME).float())
    assert 0 < expected < 1
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: bank.cosine(("math", NAME), ("text", NAME)), range(16)))
    assert set(found) == {expected}


def test_ranks_are_kept_where_that_is_asked_for_and_counted(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    sources = [(expert.alias, NAME) for expert in untied_family.experts]
    first = bank.ranks(sources, ("base", NAME))
    taus = [bank.get(*source).float() - bank.get("base", NAME).float() for source in sources]
    for source, ranks, tau in zip(sources, first, taus, strict=True):
        keys = magnitude_keys(tau.abs(), bank.order(source))
        assert torch.equal(ranks.long(), keys.sort(dim=-1).indices.sort(dim=-1).indices)
    assert bank.summary()["statistics_bytes"] == 0
    bank.keep_ranks()
    kept = bank.ranks(sources, ("base", NAME))
    assert all(torch.equal(a.long(), b.long()) for a, b in zip(first, kept, strict=True))
    assert [ranks.data_ptr() for ranks in bank.ranks(sources, ("base", NAME))] == [ranks.data_ptr() for ranks in kept]
    assert bank.summary()["statistics_bytes"] == 2 * sum(tau.numel() for tau in taus)


def test_tables_of_magnitudes_are_made_once_and_counted(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    sources = [("math", NAME), ("text", NAME)]
    found = bank.magnitudes(sources, ("base", NAME))
    assert all(a is b for a, b in zip(found, bank.magnitudes(sources, ("base", NAME)), strict=True))
    tables = [table for table in found if isinstance(table, MagnitudeTable)]
    assert bank.summary()["statistics_bytes"] == sum(table.num_bytes for table in tables)
    for (alias, _), table in zip(sources, tables, strict=True):
        tau = bank.get(alias, NAME).float() - bank.get("base", NAME).float()
        ordered = tau.abs().flatten().sort().values
        for rank in (1, 77, 4000, tau.numel()):
            assert table.threshold(rank, tau.abs(), bank.order((alias, NAME))).magnitude == ordered[-rank]


def subsets(family: Family) -> list[list[tuple[str, str]]]:
    aliases = [expert.alias for expert in family.experts]
    return [
        [(alias, NAME) for alias in chosen]
        for n in range(1, len(aliases) + 1)
        for chosen in itertools.combinations(aliases, n)
    ]


@pytest.mark.slow  # each number of sources is compiled
def test_tables_keep_their_share(tmp_path: Path) -> None:
    """Tables of many sets of sources keep to their share of memory and are made again."""
    family = tiny_family(tmp_path, hidden=HIDDEN, layers=1, dtype=torch.bfloat16)
    bank, forgetful = (Bank(family, cache=tmp_path / "cache", keeps_statistics=keeps) for keeps in (True, False))
    limit, largest = bank.num_bytes // 8, 0
    aliases = [model.alias for model in family.models]
    for chosen in [each for count in (1, 2) for each in itertools.permutations(aliases, count)]:
        for name in [name for name, tensor in bank.base.tensors.items() if len(tensor.shape) == 2]:
            sources = [(alias, name) for alias in chosen]
            table, again = (each.variances(sources, ("base", name)) for each in (bank, forgetful))
            assert table is not None
            assert again is not None
            sizes = variance([bank.get(*source) for source in sources], bank.get("base", name))
            assert again.trim(77).high == table.threshold(77, sizes, bank.order(("base", name)))
        largest = max(largest, bank.summary()["statistics_bytes"])
    assert 0.9 * limit < largest <= limit
    assert forgetful.summary()["statistics_bytes"] == 0


def test_norms_are_those_of_the_plain_methods_and_computed_once(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    sources, base = [("math", NAME), ("text", NAME)], ("base", NAME)
    norms = bank.norms(sources, base)
    assert list(norms) == [total(torch.abs, bank.get(*source).float() - bank.get(*base).float()) for source in sources]
    bank._norms[sources[0], base] = 1.5
    assert bank.norms(sources[::-1], base) == (norms[1], 1.5)


def test_a_table_is_kept_while_it_is_used(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    one, other = [("math", NAME)], [("text", NAME)]
    first = bank.variances(one, ("base", NAME))
    assert isinstance(first, MagnitudeTable)
    bank._recent.max_bytes = 2 * first.num_bytes
    bank.variances(other, ("base", NAME))
    assert bank.variances(one, ("base", NAME)) is first
    bank.variances([*one, *other], ("base", NAME))
    assert bank.variances(one, ("base", NAME)) is first, "the other was used less recently"
    assert bank.summary()["statistics_bytes"] == 2 * first.num_bytes


def test_products_of_all_subsets_of_experts_are_those_of_pairs(tmp_path: Path) -> None:
    family = tiny_family(tmp_path, experts=tuple("abcde"), hidden=HIDDEN, layers=2, dtype=torch.bfloat16)
    bank = Bank(family, cache=tmp_path / "cache")
    for base in (None, ("base", NAME)):
        for chosen in subsets(family):
            tensors = [bank.get(*source) for source in chosen]
            expected = inner_products(tensors, None if base is None else bank.get(*base))
            assert bank.products(chosen, base) == expected
            assert bank.products(chosen[::-1], base) == [row[::-1] for row in expected][::-1]
    assert len(bank._products) == 2 * (5 + 10)


def test_banks_of_two_devices_share_statistics(untied_family: Family, tmp_path: Path) -> None:
    """A bank for merges on another device shares sources and statistics, without those that are on a device."""
    bank = Bank(untied_family, cache=tmp_path)
    other = bank.on("meta")
    assert (bank.on("cpu"), bank.on("meta"), other.on("cpu")) == (bank, other, bank)
    assert other._stored is bank._stored
    # Sorting is the CPU's, wherever merges are computed: a GPU has no memory left for it.
    (table,) = other.magnitudes([("math", NAME)], ("base", NAME))
    assert bank.magnitudes([("math", NAME)], ("base", NAME)) == (table,)
    assert isinstance(table, MagnitudeTable)
    assert bank.summary()["statistics_bytes"] == other.summary()["statistics_bytes"] == table.num_bytes


def test_adapters_statistics_are_those_of_a_device(untied_family: Family, tmp_path: Path) -> None:
    """Statistics of an adapter's tensors are computed again for another device, where its tensors have other bits."""
    base = untied_family.base.directory
    lora_adapter(base, tmp_path / "lora")
    bank = Bank(open_family(base, {"lora": tmp_path / "lora"}, cache=tmp_path), cache=tmp_path)
    bank.magnitudes([("lora", NAME)], ("base", NAME))
    assert len(bank._magnitudes) == 1
    assert len(bank.on("meta")._magnitudes) == 0


def test_a_base_alone_can_be_held(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(replace(untied_family, experts=()), cache=tmp_path)
    assert bank.summary()["models"] == 1


def test_open_family_and_bank_agree(untied_family: Family, tmp_path: Path) -> None:
    experts = {expert.alias: expert.directory for expert in untied_family.experts}
    assert open_family(untied_family.base.directory, experts, cache=tmp_path) == untied_family


def test_a_base_with_another_vocabulary_is_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters change the base as it is stored, and merges use it with other rows; both read the same tensors."""
    family = tiny_family(tmp_path, experts=("math",), layers=1)
    lora_adapter(tmp_path / "base", tmp_path / "adapter")
    placed: list[int] = []
    place = _HostMemory.place

    def counted(memory: _HostMemory, tensor: torch.Tensor) -> torch.Tensor:
        placed.append(tensor.nbytes)
        return place(memory, tensor)

    monkeypatch.setattr(_HostMemory, "place", counted)
    for vocabulary in ({}, {"multiple_of": 512}):
        placed.clear()
        sources = resolve_family(
            family.base.directory, {"adapter": tmp_path / "adapter"}, vocabulary=vocabulary, cache=tmp_path / "cache"
        )
        assert sum(placed) == 0
        assert Bank(sources, "host", cache=tmp_path / "cache").num_bytes == sum(placed) > 0
