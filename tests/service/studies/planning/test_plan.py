"""Plans of studies of 7B to 70B models, from configurations alone: whether they fit, and changes that would help."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from search_spaces.study.engine import Engine
from service.cli.main import main
from service.cli.plan import plan_text
from service.jobs.search.dry_run import CheckedPlan, check
from service.jobs.search.plan_document import plan_document
from service.schemas.json_schemas import schemas
from service.studies.planning.chart import chart_values
from service.studies.planning.named import profile_named
from service.studies.planning.placement import Part
from service.studies.planning.plan import StudyPlan, _threads
from tests.service.studies.planning.examples import EXAMPLES, Example, example_study
from workers.engines.vllm.memory import logprobs_bytes

pytestmark = pytest.mark.slow  # shapes of large models are built, and vLLM is asked about them

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "plan.md"

Planned = Callable[..., CheckedPlan]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """Function that plans an example with some fields changed; equal plans are computed once."""
    known: dict[str, CheckedPlan] = {}

    def plan(name: str, **changes: Any) -> CheckedPlan:
        key = f"{name} {sorted(changes.items())}"
        if key not in known:
            directory = tmp_path_factory.mktemp("example")
            nodes = changes.pop("nodes", 1)
            example: Example = EXAMPLES[name]._replace(**changes)
            study = example_study(directory, example)
            profile = profile_named(example.profile, nodes=nodes)
            known[key] = check(study, directory, metadata_only=True, profile=profile)
        return known[key]

    return plan


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_page_shows_the_plans(planned: Planned, name: str) -> None:
    """Every plan on the page of plans is what the program prints now."""
    text = plan_text(plan_document(planned(name)))
    assert f"<!-- plan: {name} -->\n```\n{text}\n```\n" in PAGE.read_text()


def test_parameters_are_those_of_the_published_models(planned: Planned) -> None:
    """Sizes that follow from the configurations are the published ones."""
    sizes = {name: planned(name).num_parameters for name in EXAMPLES}
    assert sizes["Llama-3-8B, 3 full experts"] == 8_030_261_248
    assert sizes["Qwen2.5-7B, 3 full experts"] == 7_615_616_512
    assert sizes["Llama-2-13B, 3 full experts"] == 13_015_864_320
    assert sizes["70B, tensor parallel 8"] == 70_553_706_496


def test_adapters_take_less_memory_and_time(planned: Planned) -> None:
    """Three LoRA experts leave one model to keep; swaps read less."""
    full, lora = (planned(f"Llama-3-8B, 3 {kind} experts").machine for kind in ("full", "LoRA"))
    assert lora.facts.bank_bytes < 0.3 * full.facts.bank_bytes
    assert lora.placement.host_bytes < full.placement.host_bytes
    assert lora.placement.bank == "gpu"


def test_what_does_not_fit_says_what_to_change(planned: Planned) -> None:
    """70B on one GPU does not fit; each named change of engines, and of the study for the host, then suffices."""
    plan = planned("70B on one GPU").machine
    assert not plan.fits
    of_engine, of_host = plan.lacks
    assert of_engine.endswith("are usable; use engine.tensor_parallel_size: 2 on machines of 2 GPUs")
    assert "search.algorithm: smac with engine.verify: false; or machines with " in of_host
    assert "LoRA" not in of_host, "mapped files take no memory that adapters would free"
    two = planned("70B on one GPU", profile="h100x2", engine={"tensor_parallel_size": 2}).machine
    assert not [lack for lack in two.lacks if "an engine needs" in lack]


def test_named_changes_of_an_engine_suffice(planned: Planned) -> None:
    """Only options are named with which the engine fits: a dtype where it is float32, and lengths that are enough."""
    name, profile = "Llama-2-13B, 3 full experts", "rtx4090x2"
    (lack, *_) = planned(name, profile=profile, engine={"dtype": "float32", "tensor_parallel_size": 2}).machine.lacks
    assert lack.endswith("use engine.tensor_parallel_size: 4 on machines of 4 GPUs, or engine.dtype: bfloat16")
    assert planned(name, profile=profile, engine={"dtype": "bfloat16", "tensor_parallel_size": 2}).machine.fits
    (one, *_) = planned("Qwen2.5-7B, 3 full experts", profile="rtx4090x1", engine={"dtype": "float32"}).machine.lacks
    assert "use engine.tensor_parallel_size: 2 on machines of 2 GPUs, or engine.dtype: bfloat16" in one


def test_named_changes_of_a_host_suffice(planned: Planned) -> None:
    """Each change that is named for a lack of host memory is enough, also one of two that are needed together."""
    name = "Qwen2.5-7B, 3 full experts"
    (lack,) = (lack for lack in planned(name, profile="cpux32").machine.lacks if lack.startswith("a host needs"))
    assert "are usable; use engine.verify: false; or machines with " in lack
    assert planned(name, profile="cpux32", engine={"verify": False}).machine.fits
    memory = re.search(r"machines with ([0-9.]+) GiB of memory", lack)
    assert memory is not None
    assert planned(name, profile=f"cpux{math.ceil(float(memory[1]) / 4)}").machine.fits
    four = {"replicas": 4, "dtype": "bfloat16"}
    (lack,) = (each for each in planned(name, profile="cpux32", engine=four).machine.lacks if "a host" in each)
    assert "use engine.replicas: 1 (or --nodes 4) with engine.verify: false; or engine.replicas: 1 (or" in lack
    assert planned(name, profile="cpux32", engine=four | {"replicas": 1, "verify": False}).machine.fits


def test_gradients_are_planned_in_usable_memory(tmp_path: Path) -> None:
    """Passes of gradients have the size that fits into the part of a host's memory that a study may plan for."""
    example = EXAMPLES["Llama-3-8B, 3 LoRA experts"]._replace(engine={})
    study = example_study(tmp_path, example)
    profile = replace(profile_named("rtx4090x2"), host_bytes=182 * 10**9)  # larger passes would take 99 % of it
    assert check(study, tmp_path, metadata_only=True, profile=profile).machine.fits


def test_more_engines_than_gpus_are_refused(planned: Planned) -> None:
    """Engines without GPUs are a lack with the number of machines that they need, which then suffices."""
    many = {"replicas": 9}
    lacks = planned("Qwen2.5-7B, 3 full experts", profile="a100x8", engine=many).machine.lacks
    said = "engine.replicas: 9 engines of 1 GPUs do not fit on 1 x a100x8; use at most 8, or --nodes 2"
    assert said in lacks
    assert planned("Qwen2.5-7B, 3 full experts", profile="a100x8", engine=many, nodes=2).machine.fits


def test_more_engines_are_never_slower(planned: Planned) -> None:
    """More engines take less time for everything but the work for which each has fewer of the CPU's threads."""
    seconds, by_cpu = [], []
    for replicas in (1, 2, 4, 7):
        plan = planned("Qwen2.5-7B, 3 full experts", profile="h100x8", engine={"replicas": replicas}).machine
        of = {phase.name: phase.elapsed_s for phase in plan.phases}
        by_cpu.append([of.pop(name).least for name in ("statistics", "canary")])
        seconds.append((sum(each.least for each in of.values()), sum(each.most for each in of.values())))
    assert seconds == sorted(seconds, reverse=True)
    assert by_cpu == sorted(by_cpu)


@pytest.mark.parametrize(
    ("bank", "gib", "shm"), [("gpu", 100, 64), ("host", 10, 64), ("host", 80, 84), ("host", 200, 107)]
)
def test_shared_memory_of_pods_holds_the_sources(
    planned: Planned, tmp_path: Path, bank: str, gib: int, shm: int
) -> None:
    """The chart's pods have shared memory for the sources that engines share, up to the half that the chart accepts."""
    name = "Qwen2.5-7B, 3 full experts"
    placed = replace(planned(name).machine.placement, bank=bank)
    study = example_study(tmp_path, EXAMPLES[name])
    values = chart_values(study, profile_named("a100x1"), placed, sources_bytes=gib << 30)
    assert values["ray"]["gpuGroups"][0]["shm"] == f"{shm}Gi"


def test_memory_of_pods_is_what_the_study_needs(planned: Planned, tmp_path: Path) -> None:
    """A study that fits, but needs more than the usual share of a machine, gets it in its pods."""
    name = "Qwen2.5-7B, 3 full experts"
    placed, profile = planned(name).machine.placement, profile_named("a100x1")
    study = example_study(tmp_path, EXAMPLES[name])
    memory = []
    for needed in (100, 220, 300):
        whole = replace(placed, parts=(Part("engines", "host", host_bytes=needed << 30),))
        values = chart_values(study, profile, whole, sources_bytes=1 << 30)
        memory.append(values["ray"]["gpuGroups"][0]["memory"])
    assert memory == ["214Gi", "220Gi", "214Gi"]


def test_only_known_gpus_are_selected(planned: Planned, tmp_path: Path) -> None:
    """A file's profile whose name begins as that of a GPU may have other GPUs, and selects no nodes by their label."""
    name = "Qwen2.5-7B, 3 full experts"
    placed, study = planned(name).machine.placement, example_study(tmp_path, EXAMPLES[name])
    for profile, is_selected in (("rtx4090x2", True), ("a100", True), ("h100-pcie", False), ("l40s4", False)):
        machine = replace(profile_named("a100x1"), name=profile)
        group = chart_values(study, machine, placed, sources_bytes=1 << 30)["ray"]["gpuGroups"][0]
        assert ("nodeSelector" in group) == is_selected


def test_parts_add_up_to_what_is_compared(planned: Planned) -> None:
    """The memory of all parts is within the capacity of GPU and host exactly where the study fits."""
    for name in EXAMPLES:
        placed = planned(name).machine.placement
        if not placed.lacks:
            assert placed.gpu_bytes <= placed.gpu_capacity * 1.001
            assert placed.host_bytes <= placed.host_capacity


def test_tight_gpus_serve_few_texts_and_merge_on_the_cpu(planned: Planned) -> None:
    """On 24 GB an 8B engine keeps the room of a few texts, and its parts are no more than the GPU has."""
    placed = planned("Llama-3-8B, 3 full experts", profile="rtx4090x2", engine={}).machine.placement
    assert not placed.lacks
    assert placed.gpu_bytes <= placed.gpu_capacity
    assert 10 <= placed.texts <= 16
    merging = next(part for part in placed.parts if part.name.startswith("merging one tensor"))
    assert merging.place == "each GPU; larger ones on the CPU"


def test_gpus_without_an_engine_verify(planned: Planned) -> None:
    """Verification is planned on free GPUs, as many as hold a merge in float32."""
    name = "Llama-3-8B, 3 full experts"

    def of(**changes: Any) -> tuple[str, float]:
        plan = planned(name, **changes).machine
        place = next(part.place for part in plan.placement.parts if part.name == "verification")
        return place, next(phase.seconds.most for phase in plan.phases if phase.name == "verification")

    free, full = of(), of(engine={"replicas": 4, "tensor_parallel_size": 2})
    assert free[0] == "a GPU without an engine, after the search"
    assert full[0] == "host CPU, after the search"
    assert 4 * free[1] < full[1]
    two, one = (of(profile="a100-40gbx8", engine={"replicas": replicas}) for replicas in (6, 7))
    assert two[0] == "2 GPUs without an engine, after the search"
    assert one[0] == "host CPU, after the search"
    assert 4 * two[1] < one[1]


def test_verification_on_the_cpu_has_the_threads_of_a_replica(planned: Planned) -> None:
    """Eight engines on a machine leave each as many threads as the one of a machine with an eighth of the cores."""
    name, seconds = "Llama-3-8B, 3 full experts", []
    for number in (1, 8):
        plan = planned(name, profile=f"rtx4090x{number}", engine={"replicas": number}).machine
        assert any(part.place == "host CPU, after the search" for part in plan.placement.parts)
        seconds.append(next(phase.seconds.most for phase in plan.phases if phase.name == "verification"))
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)


@pytest.mark.parametrize(("name", "nodes", "engines"), [("rtx4090x1", 8, 1), ("h100x8", 2, 8), ("here", 4, 2)])
def test_engines_of_other_machines_take_no_threads(name: str, nodes: int, engines: int) -> None:
    """Engines share the cores of their own machine only, as replicas do, which count engines where they run."""
    profile = replace(profile_named(name), nodes=nodes)
    profile = replace(profile, gpus=0, cores=17) if name == "here" else profile
    assert _threads(profile, Engine(replicas=8)) == (profile.cores - 1) // engines


def test_keys_and_values_of_long_answers_are_planned(tmp_path: Path) -> None:
    """Verification takes their memory where a GPU is free; in the share of an engine, fewer answers grow at once."""
    parts, phases, together = {}, {}, {}
    for name, profile, tokens in (("short", "a100x2", 16), ("long", "a100x2", 1500), ("shared", "a100x1", 1500)):
        task = {"file": "tasks.jsonl", "max_tokens": tokens}
        objectives = [{"name": each, "task": task, "metric": "exact_match"} for each in ("sums", "words")]
        example = EXAMPLES["Qwen2.5-7B, 3 full experts"]._replace(engine={"verify": {"trials": 3, "samples": 32}})
        study = example_study(tmp_path / name, example, objectives=objectives)
        plan = check(study, tmp_path / name, metadata_only=True, profile=profile_named(profile)).machine
        parts[name] = next(part for part in plan.placement.parts if part.name.startswith("verification"))
        together[name] = plan.placement.verified_together
        phases[name] = next(phase.seconds.most for phase in plan.phases if phase.name == "verification")
    parameters, keys_and_values = 7_615_616_512, 64 * 1500 * 114_688
    assert 5 * parameters <= parts["short"].gpu_bytes < parts["long"].gpu_bytes
    assert parts["long"].gpu_bytes > 4 * parameters + keys_and_values
    assert parts["shared"].place.startswith("one engine's GPU")
    assert phases["shared"] > 1.2 * phases["long"]
    assert together == {"short": 64, "long": 64, "shared": 32}


def test_the_only_gpu_computes_gradients_too(planned: Planned) -> None:
    """Engine and gradients of a 7B model share a GPU of 80 GB, and verification follows the gradients there."""
    plan = planned("Qwen2.5-7B, 3 full experts").machine
    assert plan.fits
    assert plan.advice == ()
    of = {part.name: part for part in plan.placement.parts}
    assert of["gradients beside engines"].place.startswith("one engine's GPU: ")
    assert of["verification"].place == "one engine's GPU, in the memory of gradients, after the search"
    assert plan.placement.gpu_bytes <= plan.placement.gpu_capacity
    assert plan.placement.texts >= 128
    assert plan.gpu_hours == plan.hours
    alone = planned("Qwen2.5-7B, 3 full experts", profile="a100x2").machine
    assert any(part.place.startswith("a GPU of their own") for part in alone.placement.parts)
    steps = {
        profile: next(phase.seconds.most for phase in plan.phases if phase.name == "gradient step")
        for profile, plan in (("shared", plan), ("own", alone))
    }
    assert steps["shared"] == pytest.approx(steps["own"], rel=0.5)


def test_every_engine_leaves_the_same_share(planned: Planned) -> None:
    """Engines are alike, so with engines on all GPUs of a machine each leaves room for the gradients of the study."""
    plan = planned("Llama-3-8B, 3 full experts", engine={"replicas": 8}).machine
    assert plan.fits
    assert plan.placement.gpu_bytes <= plan.placement.gpu_capacity
    assert plan.gpu_hours.least == pytest.approx(8 * plan.hours.least)


@pytest.mark.parametrize(("profile", "sources"), [("a100x1", "host"), ("h200x1", "gpu")])
def test_verification_needs_no_second_gpu(tmp_path: Path, profile: str, sources: str) -> None:
    """Engines of any study leave room for it, if the sources stay where they are without it."""
    example = EXAMPLES["Qwen2.5-7B, 3 full experts"]._replace(profile=profile)
    verification = {}
    for name, verify in (("with", {}), ("without", False)):
        sections: dict[str, Any] = {"search_space": {"kind": "lfs"}, "search": {"algorithm": "smac", "max_trials": 9}}
        study = example_study(tmp_path / name, example._replace(engine={"verify": verify}), **sections)
        plan = check(study, tmp_path / name, metadata_only=True, profile=profile_named(profile)).machine
        assert plan.fits
        assert plan.placement.bank == sources
        assert plan.placement.gpu_bytes <= plan.placement.gpu_capacity
        assert plan.placement.texts >= 128
        verification[name] = [part for part in plan.placement.parts if part.name.startswith("verification")]
    (part,) = verification["with"]
    assert part.name == "verification beside engines"
    assert part.gpu_bytes > 5 * 7_615_616_512
    assert not verification["without"]


def test_a_share_that_would_move_the_sources_is_not_left(planned: Planned, tmp_path: Path) -> None:
    """On a GPU that holds engine and sources, but not the share as well, verification is left to the CPU."""
    example = EXAMPLES["Qwen2.5-7B, 3 full experts"]
    sections: dict[str, Any] = {"search_space": {"kind": "lfs"}, "search": {"algorithm": "smac", "max_trials": 9}}
    study = example_study(tmp_path, example, **sections)
    profile = replace(profile_named("h200x1"), gpu_bytes=125 * 10**9)
    plan = check(study, tmp_path, metadata_only=True, profile=profile).machine
    assert plan.placement.bank == "gpu"
    assert next(part.place for part in plan.placement.parts if part.name == "verification").startswith("host CPU")


def test_only_a_single_engine_is_made_slow(planned: Planned) -> None:
    """Several engines that would serve few texts at once share no GPU; a single one, which cannot be left out, does."""
    name, engine = "Llama-2-13B, 3 full experts", {"dtype": "bfloat16"}
    many = planned(name).machine
    assert next(part.place for part in many.placement.parts if part.name == "gradients") == "host CPU"
    one = planned(name, profile="a100x1", engine=engine).machine
    assert any(part.name == "gradients beside engines" for part in one.placement.parts)
    assert 16 <= one.placement.texts < 128
    assert one.placement.gpu_bytes <= one.placement.gpu_capacity
    small = planned(name, profile="a100-40gbx1", engine=engine)
    assert "beside an engine a GPU has no room for the " in small.algorithm_reason


def test_refinement_shares_the_gpu_of_a_path_engine(planned: Planned, tmp_path: Path) -> None:
    """The pool of layers becomes smaller; a longest merge that leaves no room sends the gradients to the CPU."""
    example = EXAMPLES["Qwen2.5-7B, 3 full experts"]

    def of(max_layers: int) -> StudyPlan:
        sections = {
            "search_space": {"kind": "hm3"},
            "search": {"algorithm": "random", "max_trials": 4, "refinement": {}},
            "limits": {"max_layers": max_layers},
        }
        directory = tmp_path / str(max_layers)
        study = example_study(directory, example, **sections)
        return check(study, directory, metadata_only=True, profile=profile_named(example.profile)).machine

    short, long = of(32), of(100)
    assert any(part.name == "gradients beside engines" for part in short.placement.parts)
    assert short.placement.gpu_bytes <= short.placement.gpu_capacity
    place = next(part.place for part in long.placement.parts if part.name.startswith("gradients"))
    assert place.startswith("host CPU")


def test_engines_on_every_gpu_are_advised_against(planned: Planned) -> None:
    """The plan says with how many engines a GPU would compute what takes the CPU long: gradients and verification."""
    name = "Llama-3-8B, 3 full experts"
    assert planned(name).machine.advice == ()
    gradients, _ = planned(name, engine={"replicas": 4, "tensor_parallel_size": 2}).machine.advice
    (verification,) = planned(name, engine={"replicas": 8}).machine.advice
    said = r"{} .* hours on the CPU, because engines use every GPU: use engine\.replicas: {}"
    assert re.fullmatch(said.format("gradients take", 3) + r", or search\.algorithm: smac", gradients)
    assert re.match(said.format("verification takes", 7), verification)
    assert planned("70B on one GPU").machine.advice == (), "what does not fit comes first"
    (large,) = planned("70B, tensor parallel 8", nodes=2).machine.advice
    less = "fewer of engine.verify's trials and samples"
    assert f"on the CPU, because engines use every GPU: use a machine with more GPUs, or {less}" in large
    name = "Llama-3-8B, 3 full experts"
    (short,) = planned(name, profile="a100-40gbx8", engine={"replicas": 7}).machine.advice
    assert f"because it needs 2 GPUs, and engines leave 1: use engine.replicas: 6, or {less}" in short
    small, _ = planned(name, profile="rtx4090x8", engine={"replicas": 8}).machine.advice
    assert "engine.replicas: 6, or search.algorithm: smac" in small, "one GPU is too small for the gradients"
    assert planned(name, profile="rtx4090x8", engine={"replicas": 6}).machine.advice == ()
    (alone,) = planned(name, profile="rtx4090x1", engine={}).machine.advice
    assert f"because one GPU is too small for it: use {less}" in alone


def test_gradients_on_another_machine_are_counted(planned: Planned) -> None:
    """Engines on every GPU of one machine leave gradients to GPUs of another, which the chart must have, too."""
    plan = planned("70B, tensor parallel 8", nodes=2).machine
    assert any(part.name == "gradients" and "GPUs of their own" in part.place for part in plan.placement.parts)
    assert plan.placement.nodes == 2
    assert plan.placement.engines == 1
    assert plan.chart["ray"]["gpuGroups"][0]["maxReplicas"] == 2
    assert planned("Llama-3-8B, 3 full experts", nodes=2).machine.placement.nodes == 1


def test_machines_without_engines_are_not_counted(planned: Planned) -> None:
    """Canaries are made where engines are, and advice for these engines is about their machine."""
    plan = planned("Llama-3-8B, 3 full experts", nodes=2, engine={"replicas": 8}).machine
    assert plan.placement.nodes == 2
    canary = next(phase for phase in plan.phases if phase.name == "canary")
    assert (canary.number, canary.width) == (9, 1)
    (advice,) = plan.advice
    assert "because engines use every GPU: use engine.replicas: 7, or fewer" in advice
    (one,) = {
        planned("Qwen2.5-7B, 3 full experts", profile="cpux128", nodes=nodes).machine.gpu_hours for nodes in (1, 3)
    }
    assert one.least > 0


def test_engines_of_paths_hold_a_pool_of_layers(planned: Planned, tmp_path: Path) -> None:
    """Their weights are those of the pool, their texts many, and a longest merge that does not fit is named."""
    example = EXAMPLES["Llama-3-8B, 3 full experts"]

    def of(max_layers: int) -> StudyPlan:
        sections = {"search_space": {"kind": "dis"}, "search": {"algorithm": "smac", "max_trials": 4}}
        directory = tmp_path / str(max_layers)
        study = example_study(directory, example, **sections, limits={"max_layers": max_layers})
        return check(study, directory, metadata_only=True, profile=profile_named("h100x8")).machine

    plan = of(40)
    weights = plan.placement.parts[0]
    assert weights.place.endswith("a pool of layers")
    assert weights.gpu_bytes > 2 * 2 * plan.facts.parameters
    assert plan.fits
    assert plan.placement.gpu_bytes <= plan.placement.gpu_capacity
    assert plan.placement.texts >= 128
    (lack,) = of(400).lacks
    assert "paths of up to 400 layers: one layer takes 0.436 GB, and the GPU has room for" in lack


def test_gpus_of_one_engine_merge_their_parts(planned: Planned, tmp_path: Path) -> None:
    """Methods with statistics of whole tensors, such as SLERP, need the memory of whole tensors; so do adapters."""
    example = EXAMPLES["70B, tensor parallel 8"]

    def merging(plan: StudyPlan) -> int:
        return next(part.gpu_bytes for part in plan.placement.parts if part.name.startswith("merging one tensor"))

    result = 128_256 * 8192 * 2
    parts = merging(planned("70B, tensor parallel 8").machine)
    assert parts == logprobs_bytes(128_256, "bfloat16", 2048) > result, (
        "a part of all operands is smaller than a result"
    )
    space = {"kind": "lfs", "methods": ["task_arithmetic", "slerp"]}
    study = example_study(tmp_path, example, search_space=space, search={"algorithm": "smac", "max_trials": 4})
    whole = check(study, tmp_path, metadata_only=True, profile=profile_named(example.profile)).machine
    assert merging(whole) == 5 * result


def test_cost_is_that_of_the_gpu_hours(planned: Planned) -> None:
    """Machines with 8 engines and gradients on the CPU count 8 GPUs; without a price there is no cost."""
    plan = planned("Llama-2-13B, 3 full experts").machine
    assert plan.gpu_hours.least == pytest.approx(8 * plan.hours.least)
    assert plan.cost is None


def test_document_follows_its_schema(planned: Planned) -> None:
    for name in EXAMPLES:
        document = json.loads(json.dumps(plan_document(planned(name))))
        jsonschema.validate(document, schemas()["plan"])
        assert document["fits"] == (document["lacks"] == [])


def test_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with 0 if the study fits, with 1 if it does not, with 2 for a wrong profile."""
    example = EXAMPLES["Qwen2.5-7B, 3 full experts"]
    study = example_study(tmp_path, example)
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study.canonical()))
    assert main(["plan", str(file), "--profile", "a100x1", "--price", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, schemas()["plan"])
    assert document["cost"]["least"] == pytest.approx(2 * document["gpu_hours"]["least"])
    assert main(["plan", str(file), "--profile", "cpux4"]) == 1
    assert "does not fit: " in capsys.readouterr().out
    assert main(["plan", str(file), "--profile", "b200"]) == 2
    assert "'b200' is no profile" in capsys.readouterr().err


def test_profile_decides_in_place_of_this_machine(planned: Planned) -> None:
    """On any machine, a profile with GPUs means bfloat16 and one without means float32."""
    assert planned("Qwen2.5-7B, 3 full experts").machine.dtype == "bfloat16"
    small = planned("Qwen2.5-7B, 3 full experts", profile="cpux64").machine
    assert small.dtype == "float32"
    assert small.placement.gpu_bytes == 0
    assert replace(small.profile, nodes=1).machines[0].num_gpus == 0
