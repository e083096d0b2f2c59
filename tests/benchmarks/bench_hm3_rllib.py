"""HM3's own learner compared with RLlib's RLModule, Learner and PPO with KL penalty, on the environment of `hm3_toy`.

All learners learn from the same runner's episodes, with the same options. The comparison covers the episodes until the
best path is found, the change of the policy by an update, CPU seconds, lines of code, packages, and whether a killed
learner continues with the same bits. RLlib needs packages that the project does not need; without these packages its
arms are skipped.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from search_spaces.spaces.layer_paths import LayerPaths
from tests.benchmarks.arms import kept
from tests.benchmarks.bench_hm3_toy import NUM_LAYERS, NUM_MODELS, NUM_STEPS, OPTIONS, Toy, median
from tests.benchmarks.code_digests import code_digest, statements_of
from workers.training.hm3.episodes import Role, play
from workers.training.hm3.learner import BaseLearner, Learner
from workers.training.hm3.training import PolicyTraining

BENCHMARK = "hm3_rllib"
SEEDS = range(6)
MAX_EPISODES = 4000

# Updates of a learner that is killed after some of them: RLlib's KL coefficient has changed by then.
UPDATES, KILLED_AFTER = 16, 14

PACKAGE = "ray[rllib]"
RLLIB = Path(__file__).with_name("rllib_learner.py")
HM3 = Path(__file__).parents[2] / "workers" / "training" / "hm3"


@dataclass(frozen=True)
class Candidate:
    """A learner to compare, and the code that only this learner needs.

    `learner` is its class in `rllib_learner`, or None for the project's learner. `modules` is the module to import, and
    `parts` has the names of the classes and functions of the learner's own code, by file.
    """

    name: str
    learner: str | None
    modules: str
    parts: Mapping[Path, frozenset[str]]
    keeps_kl: bool = True


SHIPPED = frozenset({"PathModule", "RllibLearner"})
OWN = Candidate(
    "own learner",
    None,
    "workers.training.hm3.learner",
    {
        HM3 / "learner.py": frozenset({"Learner", "mean_of", "normalised", "_is_of_policy"}),
        HM3 / "ppo.py": frozenset({"gae", "surrogate"}),
        HM3 / "actions.py": frozenset({"distribution", "LegalSteps"}),
    },
)
CANDIDATES = (
    OWN,
    Candidate("RLlib's PPO", "RllibLearner", "tests.benchmarks.rllib_learner", {RLLIB: SHIPPED}),
    Candidate(
        "RLlib's PPO, value network with memory",
        "RecallingRllibLearner",
        "tests.benchmarks.rllib_learner",
        {RLLIB: SHIPPED | {"RecallingPPO", "RecallingRllibLearner"}},
    ),
)


def learner_class(candidate: Candidate) -> type[BaseLearner]:
    if candidate.learner is None:
        return Learner
    from tests.benchmarks import rllib_learner

    found: type[BaseLearner] = getattr(rllib_learner, candidate.learner)
    return found


def layer_paths() -> LayerPaths:
    return LayerPaths(tuple(f"model{number}" for number in range(NUM_MODELS)), NUM_LAYERS, NUM_STEPS, NUM_STEPS)


# -- quality -----------------------------------------------------------------------------------------------------------


class Training(PolicyTraining):
    """The training of policies with another class of learners."""

    learner_class: type[BaseLearner]

    def _new(self, iteration: int) -> BaseLearner:
        seed = self._stream(f"policy {self.policy_of(iteration)}")
        return self.learner_class(self.paths, self.options.networks, self.options.learner, seed=seed)


def search(candidate: Candidate, seed: int) -> dict[str, Any]:
    """Figures of one training: episodes until the best path; CPU seconds, KL divergences and clipped shares."""
    toy = Toy(seed)
    training = Training(layer_paths(), OPTIONS, seed=seed, preferences=((1.0,),))
    training.learner_class = learner_class(candidate)
    scores: list[float] = []
    seconds, kl, clipped = [], [], []
    num_finished = 0
    found = None
    while found is None and len(scores) < MAX_EPISODES:
        number = len(scores)
        while num_finished < training.num_needed(number):
            outcomes = torch.tensor([[scores[each]] for each in training.numbers_in(num_finished)])
            started = time.process_time()
            update = training.learn(num_finished, outcomes)
            if update is not None:
                seconds.append(time.process_time() - started)
                kl.append(update.kl)
                clipped.append(update.clipped or 0.0)
            num_finished += 1
        path = training.play(number).path
        scores.append(toy.score(path))
        found = len(scores) if path == toy.best else None
    return {
        "episodes": found,
        "updates": len(kl),
        "update_cpu_s": statistics.median(seconds),
        "kl": statistics.mean(kl),
        "kl_max": max(kl),
        "clipped": statistics.mean(clipped),
    }


# -- cost --------------------------------------------------------------------------------------------------------------


def cost(candidate: Candidate) -> dict[str, Any]:
    """Costs of a learner: lines, packages, CPU seconds, and whether a killed learner continues with equal results."""
    with tempfile.TemporaryDirectory() as directory:
        whole, parts = Path(directory) / "whole", Path(directory) / "parts"
        _in_process(candidate, whole, None, expected=0)
        _in_process(candidate, parts, KILLED_AFTER, expected=-signal.SIGKILL)
        _in_process(candidate, parts, None, expected=0)
        is_same = _networks_in(whole) == _networks_in(parts)
        seconds = json.loads(whole.with_suffix(".json").read_text())
    return {
        "lines": sum(lines(path, names) for path, names in candidate.parts.items()),
        "packages_mb": {} if candidate.learner is None else additional_packages(),
        "import_cpu_s": statistics.median(_import_s(candidate.modules) for _ in range(3)),
        "first_update_cpu_s": seconds[0],
        "update_cpu_s": statistics.median(seconds[1:]),
        "continues_bit_for_bit": is_same,
    }


def _in_process(candidate: Candidate, file: Path, killed_after: int | None, *, expected: int) -> None:
    process = multiprocessing.get_context("spawn").Process(target=improve, args=(candidate, file, killed_after))
    process.start()
    process.join()
    if process.exitcode != expected:
        raise RuntimeError(f"{candidate.name}: a process ended with {process.exitcode}; expected {expected}")


def improve(candidate: Candidate, file: Path, killed_after: int | None) -> None:
    """Let a learner make UPDATES updates, or those that are left after its checkpoint in `file`.

    It writes its checkpoint after each, and kills its process after `killed_after` updates.
    """
    torch.set_num_threads(1)
    toy, options = Toy(0), OPTIONS
    learner = learner_class(candidate)(layer_paths(), options.networks, options.learner, seed="cost")
    if not candidate.keeps_kl:
        learner.keeps_kl = False  # type: ignore[attr-defined]
    if file.exists():
        learner.restore(file.read_bytes())
    seconds = []
    while learner.num_updates < UPDATES:
        first = learner.num_updates * options.episodes
        roles = [Role(number, (1.0,), options.exploration) for number in range(first, first + options.episodes)]
        episodes = play(learner.networks, roles, seed="cost", k=options.k)
        started = time.process_time()
        learner.update(episodes, torch.tensor([[toy.score(each.path)] for each in episodes]))
        seconds.append(time.process_time() - started)
        file.write_bytes(learner.to_bytes())
        if learner.num_updates == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
    file.with_suffix(".json").write_text(json.dumps(seconds))


def _networks_in(file: Path) -> dict[str, list[float]]:
    networks = torch.load(file, weights_only=True)["networks"]
    return {name: tensor.flatten().tolist() for name, tensor in networks.items()}


def _import_s(module: str) -> float:
    """CPU seconds of a process that imports a module."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def lines(path: Path, names: Iterable[str]) -> int:
    """Number of lines of the given classes and functions, without comments, docstrings and blank lines."""
    tree = ast.parse(path.read_text())
    found = {each.name: each for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)}
    return sum(len(ast.unparse(_without_prose(found[name])).splitlines()) for name in names)


def _without_prose(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = body[1:] or [ast.Pass()]  # type: ignore[index]
    return tree


def additional_packages() -> dict[str, float]:
    """Size in megabytes of each package that `ray[rllib]` needs and the project does not need."""
    own = set(_needed("mergesearch", frozenset()))
    return {name: _size_mb(name) for name in sorted(set(_needed("ray", frozenset({"rllib"}))) - own)}


def _size_mb(package: str) -> float:
    files = [Path(str(each.locate())) for each in importlib.metadata.files(package) or []]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def _needed(package: str, extras: frozenset[str]) -> Iterator[str]:
    """Yield the names of a package and of all installed packages that it needs, with some of its extras."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    waiting, seen = [(canonicalize_name(package), extras)], set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            stated = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield name
        for requirement in map(Requirement, stated):
            environments = [{"extra": extra} for extra in wanted or {""}]
            if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))


# -- arms --------------------------------------------------------------------------------------------------------------


def run() -> dict[str, Any]:
    torch.set_num_threads(1)  # a seed's figure depends on rounding
    own_state = replace(CANDIDATES[1], name="RLlib's PPO, its own state alone", keeps_kl=False)
    try:
        return {
            "searches": {each.name: _searches(each) for each in CANDIDATES},
            # The last candidate differs from the second one in the loss alone.
            "costs": [_cost(each) for each in CANDIDATES[:2]],
            "own_state": _cost(own_state),
        }
    except ModuleNotFoundError as error:
        return {"skipped": f"the arms of RLlib need {PACKAGE}, which is not installed: {error}"}


def _searches(candidate: Candidate) -> list[dict[str, Any]]:
    # All others are defaults, which the digest of the code covers.
    options = {name: getattr(OPTIONS, name) for name in ("episodes", "explored", "exploration")}
    settings = {"limit": MAX_EPISODES, "options": options}
    return [
        _arm(candidate, str(seed), {"seed": seed, **settings}, lambda seed=seed: search(candidate, seed))  # type: ignore[misc]
        for seed in SEEDS
    ]


def _cost(candidate: Candidate) -> dict[str, Any]:
    settings = {"updates": UPDATES, "killed_after": KILLED_AFTER}
    return _arm(candidate, "cost", settings, lambda: cost(candidate))


def _arm(
    candidate: Candidate, name: str, settings: Mapping[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    file = re.sub(r"[^a-z0-9.]+", "-", candidate.name.lower()).strip("-")
    return kept(BENCHMARK, f"{file}-{name}", settings, measure, depends=lambda: _depends(candidate))


def _depends(candidate: Candidate) -> dict[str, str]:
    digests = {"code": code_digest("workers.training.hm3.training")}
    if candidate.learner is None:
        return digests
    learner = hashlib.sha256(statements_of(RLLIB.read_text()).encode()).hexdigest()[:16]
    return digests | {"learner": learner, "ray": importlib.metadata.version("ray")}


def table(result: Mapping[str, Any]) -> str:
    """Table with one column for each learner."""
    searches, costs, own_state = result["searches"].values(), result["costs"], result["own_state"]
    rows: dict[str, list[str]] = {
        f"episodes until the best path, seed {seed}": [_count(each[seed]["episodes"]) for each in searches]
        for seed in SEEDS
    }
    rows["median"] = [_count(median([each["episodes"] for each in found], MAX_EPISODES)) for found in searches]
    rows["KL divergence after an update, mean and maximum"] = [
        f"{statistics.mean(each['kl'] for each in found):.3f}, {max(each['kl_max'] for each in found):.3f}"
        for found in searches
    ]
    rows["ratios outside the clip after an update"] = [
        f"{statistics.mean(each['clipped'] for each in found):.0%}" for found in searches
    ]
    rows["CPU seconds of an update, restored from a checkpoint before it"] = [
        f"{statistics.median(each['update_cpu_s'] for each in found):.2f}" for found in searches
    ]
    rows["the same without restoring"] = [f"{each['update_cpu_s']:.2f}" for each in costs]
    rows["CPU seconds of the first update of a process"] = [f"{each['first_update_cpu_s']:.2f}" for each in costs]
    rows["CPU seconds of the import"] = [f"{each['import_cpu_s']:.1f}" for each in costs]
    rows["lines of code of its own"] = [str(each["lines"]) for each in costs]
    rows["additional packages"] = [_packages(each["packages_mb"]) for each in costs]
    rows["continues bit for bit after a kill"] = [_yes(each["continues_bit_for_bit"]) for each in costs]
    rows["the same, with RLlib's saved state alone"] = ["", _yes(own_state["continues_bit_for_bit"])]
    head = [f"| | {' | '.join(each.name for each in CANDIDATES)} |", f"|---|{'---|' * len(CANDIDATES)}"]
    every = {name: [*cells, *[""] * (len(CANDIDATES) - len(cells))] for name, cells in rows.items()}
    return "\n".join([*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in every.items())])


def _count(episodes: float | None) -> str:
    return f"> {MAX_EPISODES:,}" if episodes is None or episodes >= MAX_EPISODES else f"{episodes:,.0f}"


def _packages(found: Mapping[str, float]) -> str:
    return f"{len(found)}, {sum(found.values()):.0f} MB" if found else "none"


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def show(result: dict[str, Any]) -> None:
    if "skipped" in result:
        print(f"skipped: {result['skipped']}")
        return
    print(table(result))
    print(f"additional packages: {result['costs'][1]['packages_mb']}")


TABLES = {"learners": lambda: table(run())}
