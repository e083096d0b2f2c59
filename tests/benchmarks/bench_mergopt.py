"""Time of a step of MergOPT and of SAM, compared with a step of AdamW, on one Llama of 21M parameters.

The optimizers take turns in one process with two threads: forward and backward passes of 2,048 tokens, and the update.
MergOPT is measured in its two modes: parameters from a copy, and noise in the layers. The bound is for the ratio of
elapsed time on an otherwise idle machine; with other programs on the same cores, the ratio of CPU time is steadier.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

ROWS, COLUMNS = 16, 128  # 2,048 tokens a step
REPEATS = 6
OPTIMIZERS = ("adamw", "mergopt", "mergopt in layers", "sam")
THREADS = 2
MUST = 1.10  # times AdamW, for MergOPT that copies


def run() -> dict[str, Any]:
    import torch

    torch.set_num_threads(THREADS)
    parameters = sum(parameter.numel() for parameter in model().parameters())
    rows = {name: steps_of(name) for name in OPTIMIZERS}
    for step in rows.values():
        step()  # makes the optimizer's state, compiles
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    computing: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(REPEATS):
        for name, step in rows.items():
            started, worked = time.perf_counter(), time.process_time()
            step()
            seconds[name].append(time.perf_counter() - started)
            computing[name].append(time.process_time() - worked)
    found: list[dict[str, Any]] = []
    for name, times in seconds.items():
        ratios = [ours / bare for ours, bare in zip(times, seconds["adamw"], strict=True)]
        lower, _, upper = statistics.quantiles(ratios, n=4)
        found.append(
            {
                "optimizer": name,
                "step_s": statistics.median(times),
                "ratio": statistics.median(ratios),
                "quartiles": (lower, upper),
                "cpu_ratio": statistics.median(computing[name]) / statistics.median(computing["adamw"]),
            }
        )
    ratio = next(row["ratio"] for row in found if row["optimizer"] == "mergopt")
    return {
        "met": ratio <= MUST,
        "must": MUST,
        "threads": THREADS,
        "parameters": parameters,
        "tokens": ROWS * COLUMNS,
        "rows": found,
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['parameters'] / 1e6:.1f}M parameters, {result['tokens']} tokens a step")
    print("optimizer           step s   ratio to adamw (quartiles)   of CPU time")
    for row in result["rows"]:
        print(
            f"{row['optimizer']:<18} {row['step_s']:7.3f} {row['ratio']:7.3f} "
            f"({row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f})  {row['cpu_ratio']:12.3f}"
        )
    print(f"mergopt: must {result['must']}")


def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2048,
            hidden_size=384,
            intermediate_size=1536,
            num_hidden_layers=9,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=COLUMNS,
            tie_word_embeddings=True,
        )
    )


def steps_of(name: str) -> Callable[[], Any]:
    import torch

    from workers.training.mergopt.optimizer import MergOPT
    from workers.training.mergopt.sharpness import SharpnessAware

    trained = model()
    bare = torch.optim.AdamW(trained.parameters(), lr=1e-5)
    optimizer: Any = {
        "adamw": lambda: bare,
        "mergopt": lambda: MergOPT(bare),
        "mergopt in layers": lambda: MergOPT(bare, model=trained),
        "sam": lambda: SharpnessAware(bare),
    }[name]()
    tokens = torch.randint(0, 2048, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1))

    def closure() -> Any:
        optimizer.zero_grad()
        loss: torch.Tensor = trained(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)
