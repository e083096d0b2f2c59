"""The files of docs/papers: each is accepted without weights, and runs at tiny scale."""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from search_spaces.study.file import Study, parse_study
from service.cli.main import main
from service.engine_machines import VARIABLE
from service.jobs.search.dry_run import check
from tests.builders import character_tokenizer, tiny_llama, tiny_qwen2
from tests.docs.test_pages import page_of
from tests.end_to_end.studies import undisturbed
from tests.workers.task_pack.rows import in_memory, shipped_index
from workers.evaluation import task_index
from workers.evaluation import tasks as tasks_module
from workers.evaluation.built_tasks import BuiltTask
from workers.evaluation.lm_eval_tasks import build, prepare
from workers.training.finetuning.fleet import parse_pipeline
from workers.types import TaskSpec

PAPERS = Path(__file__).parents[2] / "docs" / "papers"
FLEET = "mergopt_experts"
IMAGES = ("hm3_clip_b32", "mergopt_clip_experts")  # tested by test_vision_papers
NAMES = sorted(file.stem for file in PAPERS.glob("*.yaml") if file.stem not in (FLEET, *IMAGES))

# Rows of data sets from which a rung takes more than others, or that have many parts.
NUM_ROWS = 150
SIZES = {
    "qintongli/GSM-Plus": 1000,
    "SakanaAI/gsm8k-ja-test_250-1319": 1000,
    "allenai/openbookqa": 500,
    "cais/mmlu": 18,
}

LLAMA2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Llama-2-13b": LLAMA2 | dict(zip(SHAPES, (5120, 13824, 40, 40, 40), strict=True)),
    "Llama-2-7b": LLAMA2 | dict(zip(SHAPES, (4096, 11008, 32, 32, 32), strict=True)),
    "Llama-3.2-1B": LLAMA2
    | dict(zip(SHAPES, (2048, 8192, 16, 32, 8), strict=True))
    | {"vocab_size": 128256, "tie_word_embeddings": True, "head_dim": 64, "dtype": "bfloat16"},
    "Qwen2.5-1.5B": LLAMA2
    | dict(zip(SHAPES, (1536, 8960, 28, 12, 2), strict=True))
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
}
PARAMETERS = {
    "Llama-2-13b": 13_015_864_320,
    "Llama-2-7b": 6_738_415_616,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen2.5-1.5B": 1_543_714_304,
}


def written(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((PAPERS / f"{name}.yaml").read_text())
    return document


def family_of(document: Mapping[str, Any]) -> str:
    return next(family for family in CONFIGS if family.lower() in document["models"]["base"].lower())


def with_models(document: dict[str, Any], model: Callable[[str], Path]) -> dict[str, Any]:
    experts = {alias: str(model(alias)) for alias in document["models"]["experts"]}
    return document | {"models": {"base": str(model("base")), "experts": experts}}


def once(load_dataset: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes each data set only once, as `datasets` hashes all rows; it returns copies of the dict."""
    found: dict[str, Any] = {}

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        key = json.dumps([path, name, options], sort_keys=True, default=repr)
        if key not in found:
            found[key] = load_dataset(path, name, **options)
        return copy(found[key])

    return load


@pytest.fixture(scope="module", autouse=True)
def _tasks() -> Iterator[None]:
    """Task data in memory. Each task is built once, in this process, because no task executes code of a model here."""
    import datasets

    found: dict[str, BuiltTask] = {}

    def built(spec: TaskSpec) -> BuiltTask:
        if spec.digest not in found:
            found[spec.digest] = build(spec, prepared=prepare(spec))
        return found[spec.digest]

    evaluate = ModuleType("evaluate")
    evaluate.__dict__["load"] = lambda name: SimpleNamespace(compute=lambda **_: ({"pass@1": 1.0}, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_index, "_given", shipped_index())
        patch.setattr(datasets, "load_dataset", once(in_memory(NUM_ROWS, SIZES, distinct=True)))
        patch.setattr(tasks_module, "build", built)
        patch.setitem(sys.modules, "evaluate", evaluate)
        patch.setattr("workers.evaluation.lengths.LOOKED_AT", 1)
        yield


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Callable[[str], Path]]:
    """For a family and an alias, a directory with the real model's configuration and a small tokenizer."""
    root = tmp_path_factory.mktemp("configurations")

    def of(family: str) -> Callable[[str], Path]:
        def model(alias: str) -> Path:
            place = root / family / alias
            if not place.exists():
                character_tokenizer().save_pretrained(place)
                (place / "config.json").write_text(json.dumps(CONFIGS[family]))
            return place

        return model

    return of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Callable[[str], Path]]:
    """For a family and an alias, a tiny model of the same layout."""
    root = tmp_path_factory.mktemp("tiny")

    def of(family: str) -> Callable[[str], Path]:
        def model(alias: str) -> Path:
            place, seed = root / family / alias, zlib.crc32(alias.encode())
            if not place.exists():
                make = tiny_qwen2 if family.startswith("Qwen") else tiny_llama
                make(place, seed, tied=bool(CONFIGS[family]["tie_word_embeddings"]), layers=4)
            return place

        return model

    return of


def scaled_down(document: dict[str, Any]) -> Study:
    """A study with the same options, few trials and few samples."""
    fidelity = dict(document["fidelity"])
    rungs = {3: [2, 4, 6], 2: [2, 4], 1: [4]}
    if fidelity["scheduler"] == "hyperband":
        count = len(fidelity["rungs"]) if "rungs" in fidelity else 2 if fidelity["max_samples"] == 300 else 3
        fidelity = {"scheduler": "hyperband", "rungs": rungs[count]}
    else:
        fidelity = {"scheduler": "none", "max_samples": 4}
    search = document["search"] | {"max_trials": 6, "baselines": "sources"}
    if "hm3" in search:
        search |= {"preferences": {"dirichlet": {"count": 2, "alpha": 1}}, "max_trials": 24}
        search["hm3"] = search["hm3"] | {"episodes": 4}
        document = document | {"search_space": document["search_space"] | {"alignment": "none"}}
    objectives = [{key: value for key, value in each.items() if key != "rungs"} for each in document["objectives"]]
    changes = {
        "fidelity": fidelity,
        "search": search,
        "objectives": objectives,
        "engine": {"dtype": "float32", "max_model_len": 512},
        "limits": {"max_layers": 5} if "limits" in document else {},
    }
    return parse_study(document | changes, PAPERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_accepted_and_runs(
    name: str,
    configured: Callable[[str], Callable[[str], Path]],
    tiny: Callable[[str], Callable[[str], Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`run --check --metadata-only` accepts it without weights, and it runs with tiny models of the same layout.

    The scores of the run are made up; every proposed trial is scored.
    """
    monkeypatch.setattr("service.studies.preflight.examine.start_probe", lambda _: None)  # imports vLLM
    document = written(name)
    family = family_of(document)
    with monkeypatch.context() as machines:
        machines.setenv(VARIABLE, "gpus=8,memory=900GiB,gpu_memory=80GB")
        study = parse_study(with_models(document, configured(family)), PAPERS)
        plan = check(study, tmp_path / "run", metadata_only=True)
    assert plan.num_parameters == PARAMETERS[family]
    assert plan.disk_bytes["download"] == 0
    assert "weights   not read: sizes are those of the models' configurations" in plan.to_text()
    assert plan.trials["search"] == document["search"]["max_trials"]

    study = scaled_down(with_models(document, tiny(family)))
    (tmp_path / "study.json").write_text(json.dumps(study.canonical()))
    trials = undisturbed(tmp_path / "study.json", tmp_path / "tiny")
    assert len(trials) == study.search.max_trials + len(study.models.experts) + 1


def test_a_pipeline_trains_the_seven_experts() -> None:
    pipeline = parse_pipeline(written(FLEET), PAPERS)
    assert pipeline.is_fleet
    assert sorted(written(FLEET)["experts"]) == sorted(written("mergopt")["models"]["experts"])


def test_every_file_is_on_one_page() -> None:
    """The page of a paper links each of its files, and no page links one that does not exist."""
    linked = [
        name
        for page in sorted(PAPERS.glob("*.md"))
        for name in set(re.findall(r"\]\((\w+)\.yaml\)", page_of(f"docs/papers/{page.name}").prose))
    ]
    assert sorted(linked) == sorted([*NAMES, FLEET, *IMAGES])


def test_metadata_only_is_for_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = str(PAPERS / "lfs_math.yaml")
    assert main(["run", study, "--out", str(tmp_path), "--metadata-only"]) == 2
    assert "--metadata-only is for --check: a run needs the weights" in capsys.readouterr().err
