"""Fixtures of the tests on a GPU: families of models and tasks, and the figures that are printed at the end.

`tests/conftest.py` is not needed, so that these tests run where vLLM and Ray are not installed (`--confcutdir`).
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before torch is imported. With a thread for each of many cores, small operations on the CPU wait for their threads.
os.environ.setdefault("OMP_NUM_THREADS", "4")

import pytest
import torch

from workers.cache import CACHE_VARIABLE
from workers.types import Family, TaskSpec

# The variable that makes the tests with vLLM run without a GPU; "cpu" is its only value.
ON_CPU = "GPU_TESTS_ON"


def engines_on() -> str:
    """Device of the tests with vLLM: "cuda" or "cpu"; "" if they do not run.

    Raises UsageError if the variable GPU_TESTS_ON has another value than "cpu".
    """
    asked = os.environ.get(ON_CPU, "")
    if asked not in ("", "cpu"):
        raise pytest.UsageError(
            f"{ON_CPU}={asked!r}; expected cpu, or nothing: tests run on a CUDA device if there is one"
        )
    if importlib.util.find_spec("vllm") is None:
        return ""
    return "cuda" if torch.cuda.is_available() else asked


# Without a device one test says so for all.
collect_ignore_glob = [
    *([] if torch.cuda.is_available() else ["test_[!d]*.py"]),
    *([] if engines_on() else ["engines"]),
]

ENGINES = Path(__file__).with_name("engines")

FIGURES: list[str] = []
Figure = Callable[[str], None]


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    """Free the GPU memory that each test took."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """A function that takes a line of measurements, which is printed at the end of the session."""
    return lambda line: request.node.user_properties.append(("figure", line))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests of engines run last, as vLLM changes settings of its process, and the others measure."""
    items.sort(key=lambda item: ENGINES in item.path.parents)  # stable


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        FIGURES.extend(str(line) for name, line in report.user_properties if name == "figure")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        terminalreporter.section(f"figures: {device}, PyTorch {torch.__version__}")
        for line in FIGURES:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def small_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Llama with a tied head, five layers of 128 columns, in bfloat16, with two experts."""
    from tests.builders import tiny_family

    directory = tmp_path_factory.mktemp("small")
    return tiny_family(directory, experts=("math", "text"), layers=5, hidden=128, dtype=torch.bfloat16, noise=0.05)


@pytest.fixture(scope="session")
def float_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Qwen2 with a tied head and biases, in float32, with two experts."""
    from tests.builders import tiny_family, tiny_qwen2

    directory = tmp_path_factory.mktemp("float")
    return tiny_family(directory, build=tiny_qwen2, experts=("math", "text"), hidden=128, noise=0.05)


@pytest.fixture(scope="session")
def large_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Llama of 76M parameters in bfloat16, with two experts: large enough for its memory and speed to be measured."""
    from tests.builders import tiny_family

    directory = tmp_path_factory.mktemp("large")
    return tiny_family(
        directory,
        experts=("math", "text"),
        tied=False,
        layers=5,
        hidden=1024,
        intermediate_size=2816,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=6000,
        initializer_range=0.02,
        noise=0.002,
        dtype=torch.bfloat16,
    )


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> TaskSpec:
    file = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    lines = [json.dumps({"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)}) for i in range(40)]
    file.write_text("\n".join(lines) + "\n")
    return TaskSpec({"file": str(file), "max_tokens": 6}, "exact_match", permutation_seed=5)


@pytest.fixture(scope="session")
def long_texts(tmp_path_factory: pytest.TempPathFactory) -> TaskSpec:
    """A task of 64 samples with about 500 tokens each, which is one character each."""
    file = Path(tmp_path_factory.mktemp("texts")) / "texts.jsonl"
    lines = [json.dumps({"prompt": "x" * 492, "answer": f"y {i:04}"}) for i in range(64)]
    file.write_text("\n".join(lines) + "\n")
    return TaskSpec({"file": str(file), "max_tokens": 8}, "exact_match")
