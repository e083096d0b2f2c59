"""The warm engine: one vLLM engine that holds one merge after another without a restart.

A swap is: nothing in flight, weights written in place, packed again (CPU), prefix cache reset, parameters summed. A
wrong swap gives wrong scores without any error, so log-probabilities are compared with transformers on the same merged
weights when the engine starts, and every `CANARY_EVERY` swaps.

Not for several threads at once: whoever owns the engine (`workers.serving.replica`) holds a lock over swap and score.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.engines.host_memory import free_host_bytes
from workers.engines.vllm.memory import (
    EngineMemory,
    divide_memory,
    gpus_of_this_machine,
    kv_token_bytes,
    memory_requirements,
)
from workers.errors import EngineUnavailable, EvidenceMismatch, InvalidModel, TrialFailed
from workers.evaluation.prompts import LOGPROB_TOLERANCE, Continuation, Generation, Prompts
from workers.models.config import read_config
from workers.models.family import open_sources
from workers.types import EngineOptions, Family

__all__ = [
    "Engine",
    "SwapReport",
    "base_recipe",
    "engine_environment",
    "free_gpu_bytes",
    "kv_cache_bytes",
    "typical_difference",
]

log = logging.getLogger(__name__)

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 4096
CANARY_EVERY = 32  # swaps
CANARY_TOKENS = 48
GIB = 1 << 30
# A GPU with this share of its memory free has no other user.
MOSTLY_FREE = 0.9
# So begin vLLM's classes for models that it has no code for.
GENERIC = "Transformers"


@dataclass(frozen=True)
class SwapReport:
    """What the engine holds after a swap, by its own word, and the seconds it took; `repack_s`, for CPU's kernels, is
    part of `swap_s`. `is_new` is False where the recipe was held already and nothing was done."""

    digest: str
    swap_count: int
    weights_checksum: str
    materialise_s: float
    swap_s: float
    repack_s: float
    is_new: bool


def _let_llvmlite_be_inspected() -> None:
    """vLLM looks into the attributes of all that loaded modules hold. llvmlite's handle of its library (there once
    numba is) takes every name it does not know for a function of that library, `__dict__` too, and vLLM fails on it."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    handle = type(ffi.lib)
    find = handle.__getattr__

    def find_function(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return find(self, name)

    handle.__getattr__ = find_function


class Engine:
    """One vLLM engine and the bank of a family. Implements workers.evaluation.prompts.Backend for the recipe it holds.

    Starts with the base model's weights held. Raises InvalidModel for sources that cannot be used, EngineUnavailable,
    with the reason, if vLLM cannot start or compute, and EvidenceMismatch if its log-probabilities are not those of
    transformers.
    """

    def __init__(self, family: Family, options: EngineOptions, *, log_file: str | None = None) -> None:
        self.family = family
        self.options = options
        self._sources = open_sources(family)
        self.prompts = Prompts(self._sources.result_dir, options)
        self.swap_s: list[float] = []
        self._state: dict[str, Any] = {"digest": None, "swaps": 0, "checksum": "", "bank": {}}
        self._new_tokenizer: tempfile.TemporaryDirectory[str] | None = None
        started = time.perf_counter()
        try:
            self._start()
            self.start_s = time.perf_counter() - started
            self.swap(base_recipe(family), check=True)
        except (EngineUnavailable, EvidenceMismatch, InvalidModel):
            self.close()
            raise
        except Exception as error:  # vLLM raises anything; the caller needs one class and the reason
            self.close()
            raise EngineUnavailable(
                f"vLLM did not start for {family.base.directory}: {type(error).__name__}: {_reason(error)}"
                + (f"; its log is {log_file}" if log_file else "")
            ) from error
        log.info("engine for %s started in %.1f s", family.base.directory, self.start_s)

    def _start(self) -> None:
        from workers.engines.vllm.worker_extension import family_to_json

        self.max_length = self.prompts.max_length  # fails before the long import if there is no model
        os.environ.update(engine_environment(self.options, os.environ))
        from vllm import LLM
        from vllm.platforms import current_platform

        from workers.engines.vllm.capabilities import model_config

        is_cpu = bool(current_platform.is_cpu())
        self.dtype = self.options.dtype
        if self.dtype == "auto":
            self.dtype = "float32" if is_cpu else "bfloat16"
        _let_llvmlite_be_inspected()
        opening: dict[str, Any] = {"keeps_ranks": self.options.rank_cache}
        by_device: dict[str, Any]
        if is_cpu:
            cache = kv_cache_bytes(self.prompts.config, self.max_length, self.dtype)
            by_device = {
                "enforce_eager": True,
                "kv_cache_memory_bytes": cache,
                # vLLM's kernels for state-space layers fail on CPU where states are cached by prefix.
                "enable_prefix_caching": not model_config(self.prompts.directory, dtype=self.dtype).has_inner_state,
            }
        else:
            division, scratch_bytes = self._divide_memory()
            opening |= {"places": division.places, "scratch_bytes": scratch_bytes, "reason": division.reason}
            by_device = {
                "gpu_memory_utilization": division.gpu_share,
                # Other kernels for mixtures of experts shuffle the weights when they are loaded: what is written over
                # them later would be read in the wrong order.
                "moe_backend": "triton",
                "enforce_eager": not _has_code_for(self.prompts.config),
                "enable_prefix_caching": True,
            }
        self._llm: Any = LLM(
            model=self.prompts.directory,
            tokenizer=self._tokenizer_directory(),
            dtype=self.dtype,
            max_model_len=self.max_length,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, self.max_length),
            tensor_parallel_size=self.options.tensor_parallel_size,
            # Left to itself vLLM may take Ray inside of Ray, and wait for GPUs that this process has already.
            distributed_executor_backend="mp" if self.options.tensor_parallel_size > 1 else None,
            # Whatever is loaded is overwritten by the first swap; where the vocabulary is not the base's, nothing is.
            load_format="safetensors" if self.prompts.directory == self.family.base.directory else "dummy",
            generation_config="vllm",  # end-of-text tokens are passed with each request, defaults for sampling ignored
            worker_extension_cls="workers.engines.vllm.worker_extension.MergeExtension",
            seed=self.options.seed,
            disable_log_stats=True,
            trust_remote_code=False,
            **by_device,
        )
        self.bank_fingerprint = str(self._call("mergesearch_open", family_to_json(self.family), **opening))
        self.sources = str(self._call("mergesearch_sources"))

    def _divide_memory(self) -> tuple[EngineMemory, int]:
        """How engine and bank share the GPU, from what is free now, and the bytes left to merge in."""
        ranks = self.options.tensor_parallel_size
        needs = memory_requirements(
            self._sources, config=self.prompts.config, dtype=self.dtype, max_length=self.max_length, ranks=ranks
        )
        free, total = free_gpu_bytes(ranks)
        division = divide_memory(
            needs,
            gpu_free=free,
            gpu_total=total,
            host_free=free_host_bytes(),
            copies=max(ranks, gpus_of_this_machine()),
        )
        log.info("%s; the engine has %.2f of the GPU", division.reason, division.gpu_share)
        return division, needs.scratch

    def _tokenizer_directory(self) -> str:
        """Where vLLM finds the tokenizer that we use: the model's folder, or a copy that says which class reads it."""
        from transformers import AutoTokenizer

        ours = self.prompts.tokenizer
        if type(AutoTokenizer.from_pretrained(self.prompts.directory)) is type(ours):
            return self.prompts.directory
        self._new_tokenizer = tempfile.TemporaryDirectory(prefix="mergesearch-tokenizer-")
        ours.save_pretrained(self._new_tokenizer.name)
        return self._new_tokenizer.name

    @property
    def held_digest(self) -> str | None:
        """The digest of the recipe whose weights the engine holds, asked of the engine; None if a swap failed."""
        digest: str | None = self._call("mergesearch_held")["digest"]
        return digest

    @property
    def swap_count(self) -> int:
        return int(self._state["swaps"])

    @property
    def bank_summary(self) -> dict[str, Any]:
        """What the bank said of itself at the last swap (`bank.Bank.summary`), and why it is where it is."""
        return dict(self._state["bank"])

    @property
    def weights_checksum(self) -> str:
        """The checksum of the parameters as of the last swap."""
        return str(self._state["checksum"])

    def compute_checksum(self) -> str:
        """The checksum of the parameters as they are now."""
        return str(self._call("mergesearch_checksum"))

    def swap(self, recipe: Recipe, *, check: bool = False) -> SwapReport:
        """Hold `recipe`; nothing is done if it is held already. `check` compares with transformers afterwards.

        Raises TrialFailed if the merge cannot be computed, EvidenceMismatch if the engine does not hold it after all.
        """
        try:
            is_new = self.held_digest != recipe.digest
        except InvalidRecipe as error:
            raise TrialFailed(f"the merge cannot be computed: {error}") from error
        timings = {"materialise_s": 0.0, "swap_s": 0.0, "repack_s": 0.0}
        if is_new:
            if self._llm.llm_engine.has_unfinished_requests():
                raise RuntimeError("swap while requests are in flight")
            if len(recipe.layers) != (layers := int(self.prompts.config["num_hidden_layers"])):
                raise TrialFailed(f"the recipe has {len(recipe.layers)} layers, the model {layers}")
            state = self._call("mergesearch_apply", json.dumps(recipe.to_json()))
            if "refused" in state:
                raise TrialFailed(f"the merge cannot be computed: {state['refused']}")
            self._state = state
            started = time.perf_counter()
            # vLLM never does this by itself, and stale blocks give wrong scores.
            if not self._llm.reset_prefix_cache():
                raise EvidenceMismatch("vLLM did not reset its prefix cache after a swap: blocks are still in use")
            timings["materialise_s"] = float(self._state["materialise_s"])
            timings["repack_s"] = float(self._state["repack_s"])
            timings["swap_s"] = float(self._state["swap_s"]) + time.perf_counter() - started
            self.swap_s.append(timings["materialise_s"] + timings["swap_s"])
            if self.held_digest != recipe.digest:
                raise EvidenceMismatch(f"after a swap the engine holds {self.held_digest}, not {recipe.digest}")
        if check or (is_new and self.swap_count % CANARY_EVERY == 0):
            self.check_against_transformers(recipe)
        return SwapReport(recipe.digest, self.swap_count, self.weights_checksum, **timings, is_new=is_new)

    def check_against_transformers(self, recipe: Recipe) -> float | None:
        """How far the log-probabilities are from transformers' on the merged weights of `recipe`, by
        `typical_difference`.

        Raises EvidenceMismatch if it is beyond LOGPROB_TOLERANCE. None, with a warning, where there is no memory for
        a second model or the candidate's logits are not finite (scoring it says so).
        """
        from workers.engines.transformers.backend import logprobs, merged_model

        needed = 2 * sum(file.stat().st_size for file in Path(self.family.base.directory).glob("*.safetensors"))
        if needed > free_host_bytes():
            log.warning("not compared with transformers: that takes %.1f GiB more memory", needed / GIB)
            return None
        vocabulary = int(self.prompts.config["vocab_size"])
        prompt = [(7919 * i + 11) % vocabulary for i in range(min(CANARY_TOKENS, self.max_length - 1))]
        try:
            ours = self.logprobs([prompt])[0]
        except TrialFailed:
            return None
        from workers.engines.vllm.worker_extension import family_to_json, open_bank

        theirs = logprobs(merged_model(recipe, open_bank(family_to_json(self.family)), dtype=self.dtype), prompt)
        difference = typical_difference(ours, theirs, dtype=self.dtype)
        if not difference <= LOGPROB_TOLERANCE[self.dtype]:
            raise EvidenceMismatch(
                f"recipe {recipe.digest[:12]}: log-probabilities of the engine and of transformers differ by "
                f"{difference:.3g}; at most {LOGPROB_TOLERANCE[self.dtype]} is rounding in {self.dtype}"
            )
        return difference

    def generate(self, requests: Sequence[Generation]) -> list[str]:
        """One batch. Raises TrialFailed if the model's logits were NaN at any step."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        known: dict[tuple[Any, ...], Any] = {}

        def parameters(request: Generation) -> Any:
            key = (request.max_tokens, request.stop, request.temperature, request.top_p, request.top_k, request.seed)
            if key not in known:
                known[key] = SamplingParams(
                    max_tokens=request.max_tokens,
                    stop=list(request.stop) or None,
                    stop_token_ids=list(self.prompts.stop_token_ids) or None,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    seed=request.seed if request.temperature > 0 else None,
                    skip_special_tokens=False,
                    spaces_between_special_tokens=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
            return known[key]

        outputs = self._run([request.tokens for request in requests], [parameters(request) for request in requests])
        return [str(output.outputs[0].text) for output in outputs]

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        """One batch. Raises TrialFailed if the model's logits were NaN at any step."""
        results = []
        for request, scored in zip(requests, self._read([request.tokens for request in requests]), strict=True):
            tail = scored[request.num_context - 1 :]
            results.append((sum(logprob for logprob, _ in tail), all(rank == 1 for _, rank in tail)))
        return results

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Per prompt the log-probability of each token but the first, given those before it."""
        return [[logprob for logprob, _ in scored] for scored in self._read(prompts)]

    def _read(self, prompts: Sequence[Sequence[int]]) -> list[list[tuple[float, int]]]:
        """Per prompt (log-probability, rank) of each token but the first."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._run(prompts, [parameters] * len(prompts))
        return [
            [
                (float(position[token].logprob), int(position[token].rank))
                for token, position in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def _run(self, prompts: Sequence[Sequence[int]], parameters: list[Any]) -> list[Any]:
        from vllm import TokensPrompt

        self._call("mergesearch_nan_rows")
        outputs: list[Any] = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts], parameters, use_tqdm=False
        )
        if rows := int(self._call("mergesearch_nan_rows")):
            self._llm.reset_prefix_cache()
            raise TrialFailed(f"the merged model's logits are NaN ({rows} rows in {len(prompts)} prompts)")
        return outputs

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the worker extension; with tensor parallelism all ranks must agree on digest and count."""
        results = self._llm.collective_rpc(method, args=args, kwargs=kwargs)
        if method == "mergesearch_nan_rows":
            return max(results)
        if isinstance(results[0], dict):
            if len({(result["digest"], result["swaps"]) for result in results}) > 1:
                raise EvidenceMismatch(f"the engine's ranks hold different weights: {results}")
            return {**results[0], "checksum": "+".join(result["checksum"] for result in results)}
        return results[0] if len(set(results)) == 1 else "+".join(map(str, results))

    def close(self) -> None:
        """Shut vLLM down and free its memory; may be called twice."""
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        if self._new_tokenizer is not None:
            self._new_tokenizer.cleanup()
            self._new_tokenizer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def engine_environment(options: EngineOptions, environment: Any = None) -> dict[str, str]:
    """What a process that starts an engine needs in its environment, before torch is imported.

    Where `environment` already says otherwise, it is left alone, except what the engine cannot do without.
    """
    threads = options.threads or max(1, (len(os.sched_getaffinity(0)) - 1) // options.tensor_parallel_size)
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MERGESEARCH_KEEP_WEIGHTS": "1", "VLLM_NO_USAGE_STATS": "1"}
    known = environment or {}
    return {name: value for name, value in wanted.items() if name not in known} | fixed


def kv_cache_bytes(config: dict[str, Any], max_length: int, dtype: str) -> int:
    """Memory for keys and values on CPU: a full batch of texts of up to 512 tokens, within 1 GiB, and always one text
    of `max_length`."""
    per_token = kv_token_bytes(config, dtype)
    block = 128  # tokens, vLLM's default on CPU
    one_text = (max_length // block + 2) * block * per_token
    return max(one_text, min(GIB, MAX_NUM_SEQS * min(512, max_length + block) * per_token))


def free_gpu_bytes(num_gpus: int, *, wait_s: float = 20.0, poll_s: float = 1.0) -> tuple[int, int]:
    """(free, all) bytes of the first `num_gpus` GPUs that this process sees; of each the least.

    Waits up to `wait_s` where they are not MOSTLY_FREE: what a killed engine held may come free only now. Raises
    EngineUnavailable.
    """
    deadline = time.monotonic() + wait_s
    while True:
        free, total = _gpu_bytes(num_gpus)
        if free >= MOSTLY_FREE * total or time.monotonic() >= deadline:
            return free, total
        time.sleep(poll_s)


def _gpu_bytes(num_gpus: int) -> tuple[int, int]:
    """Several GPUs are looked at by a process that ends: a context of this one would stay in the first one's memory,
    beside the rank that computes there."""
    if num_gpus == 1:
        import torch

        return torch.cuda.mem_get_info()
    code = f"import json, torch; print(json.dumps([torch.cuda.mem_get_info(i) for i in range({num_gpus})]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineUnavailable(f"the memory of {num_gpus} GPUs cannot be read: {reason}")
    free, total = zip(*json.loads(answer.stdout), strict=True)
    return min(free), min(total)


def _reason(error: Exception) -> str:
    """One line; of several mistakes in vLLM's configuration the first, which pydantic puts below a headline."""
    mistakes = error.errors() if hasattr(error, "errors") else ()
    text = str(mistakes[0]["msg"] if mistakes else error).strip()
    return text.splitlines()[0] if text else ""


def _has_code_for(config: Mapping[str, Any]) -> bool:
    """vLLM has code of its own for the model. What it runs through transformers' modules is not compiled: for that it
    would change transformers' classes (`vllm_plugin`), and graphs are captured of compiled models."""
    from vllm import ModelRegistry

    names = config.get("architectures") or ()
    runs = [getattr(ModelRegistry.models.get(name), "class_name", GENERIC) for name in names]
    return any(not name.startswith(GENERIC) for name in runs)


def typical_difference(ours: Sequence[float], theirs: Sequence[float], *, dtype: str) -> float:
    """Of two lists of log-probabilities: the largest in float32; else the root of the mean square, because there the
    rounding of a whole model, whatever it does on average, moves some unlikely token far."""
    apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    return max(apart) if dtype == "float32" else math.sqrt(sum(value * value for value in apart) / len(apart))


def base_recipe(family: Family) -> Recipe:
    """The recipe that is the base model itself."""
    num_layers = int(read_config(family.base.directory)["num_hidden_layers"])

    def taken(layer: int | None) -> Merge:
        return Merge("passthrough", (Source(family.base.alias, layer),))

    layers = tuple(LayerRecipe(taken(i), taken(i), taken(i)) for i in range(num_layers))
    return Recipe(
        family.fingerprints,
        family.base.alias,
        layers,
        embedding=taken(None),
        head=taken(None),
        tokenizer=family.tokenizer,
    )
