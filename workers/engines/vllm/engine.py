"""The warm engine: one vLLM engine whose weights are replaced by one merge after another without a restart.

A swap requires that no request is in flight. The swap writes the weights in place, packs them again (on CPU), resets
the prefix cache and computes a checksum of the parameters. The engine's log-probabilities are compared with
transformers' log-probabilities when the engine starts, every `canaries.CANARY_EVERY` swaps, and on request. An engine
that fails a check refuses all further calls, because its results cannot be trusted.

Not thread-safe: the owner of an engine (module `workers.serving.replica`) holds a lock over swap and score.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.host_memory import free_host_bytes
from workers.engines.logits import in_words
from workers.engines.rank_threads import threads_of_ranks
from workers.engines.source_recipes import base_recipe
from workers.engines.vllm.engine_errors import engine_errors, not_started
from workers.engines.vllm.environment import engine_environment, let_llvmlite_be_inspected
from workers.engines.vllm.memory import MAX_NUM_SEQS, batched_tokens
from workers.engines.vllm.paths.contents import PathContents
from workers.engines.vllm.readings import Read, Reading, ReadingPlan, Scored, neighbours
from workers.engines.vllm.startup.contents import WeightContents
from workers.errors import (
    EngineCrashed,
    EngineFault,
    EngineUnavailable,
    EvidenceMismatch,
    InvalidModel,
    TrialFailed,
)
from workers.evaluation.prompts import Completion, Continuation, Generation, Prompts, Stream
from workers.models.family import on_this_machine, open_sources
from workers.models.tokenizers import stated_directory
from workers.telemetry.phases import phase
from workers.types import CanaryReport, Family

__all__ = ["Engine", "SwapReport"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SwapReport:
    """Evidence and duration of a swap, which writes a merge into a running engine.

    - `digest`: the recipe's digest
    - `swap_count`: the number of swaps of the engine so far
    - `weights_checksum`: the checksum of the engine's parameters after the swap
    - `materialise_s`: the seconds for computing the merge
    - `swap_s`: the seconds for writing the merge, including `repack_s`
    - `repack_s`: the seconds for packing weights, that is, copying them to the layout of vLLM's CPU kernels
    - `is_new`: whether the merge was written; false if the engine already held the recipe and nothing was done
    - `canary`: the report of the comparison with transformers after the swap; None if no comparison was due
    - `off_device`: text that says which part of the merge was not computed on the engine's device; "" if every part was
      computed there
    - `whole`: text that says how many tensors a rank computed as a whole, and why; "" if no tensor was computed as a
      whole. A rank is a process of a tensor-parallel engine, and usually computes only the elements that it holds.
    - `elements_read`: the number of elements of the sources that all ranks together read
    """

    digest: str
    swap_count: int
    weights_checksum: str
    materialise_s: float
    swap_s: float
    repack_s: float
    is_new: bool
    canary: CanaryReport | None = None
    off_device: str = ""
    whole: str = ""
    elements_read: int = 0


class _SourcesChanged(EvidenceMismatch):
    """Raised if files of the source models have changed since the engine opened them.

    The engine is not at fault: other engines would fail in the same way.
    """


class Engine:
    """vLLM engine for merges of a base model and its experts; it holds the weights of one merge at a time.

    The class implements the interface `workers.evaluation.prompts.Backend`: an engine generates and scores with the
    merge that it holds, at first the base model. `family` are the base and the experts. `name` is the name of the
    engine's replica, and `log_file` is the file that messages about a failed start refer to. `most_engines` is the
    largest number of such engines that may run in the cluster at once, which limits the host memory that each may use;
    None means one for each GPU. Raises EngineUnavailable, with the reason, if the models cannot be opened or vLLM
    cannot start or compute. Raises InvalidModel if contents of source models have changed or cannot be used. Raises
    EngineFault if the engine's log-probabilities differ from transformers' log-probabilities.
    """

    def __init__(
        self,
        family: Family,
        options: EngineOptions,
        *,
        log_file: str | None = None,
        name: str = "engine",
        most_engines: int | None = None,
    ) -> None:
        self.options = options
        self.name = name
        self._most_engines = most_engines
        self.swap_s: list[float] = []
        self._is_checked = False  # nothing was scored since the last canary that passed
        self._held: Recipe | None = None
        self._num_streams = 0
        self._fault: EngineFault | None = None
        self._state: dict[str, Any] = {
            "digest": None,
            "swaps": 0,
            "checksum": "",
            "off_device": "",
            "whole": "",
            "bank": {},
        }
        self._new_tokenizer: tempfile.TemporaryDirectory[str] | None = None
        started = time.perf_counter()
        try:
            with phase("looks for the models on its machine"):
                self.family = on_this_machine(family)
                self._sources = open_sources(self.family)
        except InvalidModel as error:
            raise not_started(family, error, log_file) from error
        self.prompts = Prompts(self._sources.result_dir, options)
        try:
            self._start()
            self.start_s = time.perf_counter() - started
            with phase("writes its first merge and compares it with transformers"):
                self.swap(base_recipe(family), check=True)
        except EngineCrashed as error:
            self.close()
            raise not_started(family, error.__cause__ or error, log_file) from error
        except (EngineUnavailable, EvidenceMismatch, InvalidModel):
            self.close()
            raise
        except Exception as error:  # vLLM raises any class; the caller needs one class and the reason
            self.close()
            raise not_started(family, error, log_file) from error
        log.info("engine for %s started in %.1f s", family.base.directory, self.start_s)

    def _start(self) -> None:
        from workers.engines.vllm.canary import Canary
        from workers.engines.vllm.worker_extension import family_to_json

        self.max_length = self.prompts.max_length  # fails here, before the long import, if there is no model
        os.environ.update(engine_environment(self.options, os.environ))
        from vllm import LLM

        let_llvmlite_be_inspected()
        self._contents = (PathContents if self.options.max_layers else WeightContents)(
            self._sources,
            self.prompts,
            self.options,
            aligns=bool(self.family.alignments_dir),
            most_engines=self._most_engines,
        )
        self.dtype = self._contents.dtype
        by_device, opening = self._contents.options_by_device()
        with phase("starts vLLM"):
            self._llm: Any = LLM(
                model=self.prompts.directory,
                tokenizer=self._tokenizer_directory(),
                dtype=self.dtype,
                max_model_len=self.max_length,
                max_num_seqs=MAX_NUM_SEQS,
                max_num_batched_tokens=batched_tokens(self.max_length, is_cpu=self._contents.is_cpu),
                tensor_parallel_size=self.options.tensor_parallel_size,
                # By default vLLM may choose Ray inside Ray, and wait for GPUs that this process already holds.
                distributed_executor_backend="mp" if self.options.tensor_parallel_size > 1 else None,
                generation_config="vllm",  # not the model's: requests pass their end-of-text tokens and sampling
                worker_extension_cls="workers.engines.vllm.worker_extension.MergeExtension",
                seed=self.options.seed,
                disable_log_stats=True,
                trust_remote_code=False,
                **self._contents.model_options(),
                **by_device,
            )
        self.canary = Canary(
            self.family,
            base=base_recipe(self.family),
            replica=self.name,
            dtype=self.dtype,
            vocabulary=int(self.prompts.config["vocab_size"]),
            max_length=self.max_length,
        )
        with phase("reads the sources"):
            self.bank_fingerprint = str(self._call("mergesearch_open", family_to_json(self.family), **opening))
        self.sources = str(self._call("mergesearch_sources"))

    def _tokenizer_directory(self) -> str:
        """Directory from which vLLM loads a tokenizer that is equal to the tokenizer of this engine's prompts.

        The result is the model's directory, if vLLM loads the right tokenizer from there. Otherwise it is a temporary
        directory with a copy of the tokenizer, whose files name the tokenizer's class.
        """
        self._new_tokenizer = stated_directory(self.prompts.directory, self.prompts.tokenizer)
        return self._new_tokenizer.name if self._new_tokenizer else self.prompts.directory

    @property
    def held_digest(self) -> str | None:
        """The digest of the recipe whose merge the engine reports to hold.

        The result is None after a failed swap (writing a merge into the engine), and after the engine failed a check.
        """
        if self._fault is not None:
            return None
        with self._failing_for_good():
            digest: str | None = self._call("mergesearch_held")["digest"]
        return digest

    @property
    def swap_count(self) -> int:
        return int(self._state["swaps"])

    @property
    def bank_summary(self) -> dict[str, Any]:
        """Description of where the source models' weights (the bank) are kept, and of their size.

        The description was made when a merge was last written into the engine. Its keys are the keys of the result of
        the method `bank.Bank.summary`, and "reason": why the weights are in GPU memory, host memory or files.
        """
        return dict(self._state["bank"])

    @property
    def weights_checksum(self) -> str:
        """The checksum of the model's parameters after the last swap (writing of a merge into the engine)."""
        return str(self._state["checksum"])

    def compute_checksum(self) -> str:
        """Compute the checksum of the model's current parameters."""
        return str(self._call("mergesearch_checksum"))

    def fault(self, reason: str) -> EngineFault:
        """Declare the engine faulty, so that it refuses all further calls, and return the EngineFault to raise.

        `reason`, a part of the error's message, says how the engine's weights or results are wrong.
        """
        self._fault = EngineFault(f"engine {self.name}: {reason}", self.name, self.canary.num_passed)
        log.error("%s; this engine is not used again", self._fault)
        return self._fault

    def _refuse_after_a_fault(self) -> None:
        if self._fault is not None:
            raise EngineFault(*self._fault.args)

    @contextmanager
    def _failing_for_good(self) -> Iterator[None]:
        """Context manager around calls of the engine that declares the engine faulty if a check fails.

        A failed check is an EvidenceMismatch: the engine's weights or results do not belong to the requested recipe.
        The failed check is raised as an EngineFault, and the engine refuses all later calls. There is one exception: if
        files of the source models have changed, the engine is not at fault, and the error is raised as an
        EvidenceMismatch. If the engine has failed a check before, EngineFault is raised before the context is entered.
        """
        self._refuse_after_a_fault()
        try:
            yield
        except _SourcesChanged as error:
            raise EvidenceMismatch(str(error)) from error
        except EvidenceMismatch as error:
            raise self.fault(str(error)) from error

    def swap(self, recipe: Recipe, *, check: bool = False) -> SwapReport:
        """Write the merge of `recipe` over the engine's weights, unless the engine already holds the recipe.

        With `check`, the engine is compared with transformers afterwards. Without `check`, it is compared only if a
        regular comparison is due.

        Raises:
            TrialFailed: The merge cannot be computed.
            EvidenceMismatch: Files of the sources have changed.
            EngineFault: The engine does not hold the merge after the write, or the engine differs from transformers in
                a comparison. After such a failure every later call raises this error.
        """
        with self._failing_for_good():
            return self._swap(recipe, check=check)

    def _swap(self, recipe: Recipe, *, check: bool) -> SwapReport:
        try:
            is_new = self.held_digest != recipe.digest
        except InvalidRecipe as error:
            raise TrialFailed(f"the merge cannot be computed: {error}") from error
        timings = {"materialise_s": 0.0, "swap_s": 0.0, "repack_s": 0.0}
        if is_new:
            if self._llm.llm_engine.has_unfinished_requests():
                raise RuntimeError("swap while requests are in flight")
            if refusal := self._contents.refusal(recipe):
                raise TrialFailed(refusal)
            state = self._call("mergesearch_apply", json.dumps(recipe.to_json()))
            if "refused" in state:
                raise TrialFailed(f"the merge cannot be computed: {state['refused']}")
            if "changed" in state:
                raise _SourcesChanged(state["changed"])
            if "mismatch" in state:
                raise EvidenceMismatch(str(state["mismatch"]))
            self._state = state
            self._held = recipe
            started = time.perf_counter()
            # vLLM never resets the prefix cache itself, and blocks computed with earlier weights give wrong scores.
            if not self._llm.reset_prefix_cache():
                raise EvidenceMismatch("vLLM did not reset its prefix cache after a swap: blocks are still in use")
            timings["materialise_s"] = float(self._state["materialise_s"])
            timings["repack_s"] = float(self._state["repack_s"])
            timings["swap_s"] = float(self._state["swap_s"]) + time.perf_counter() - started
            self.swap_s.append(timings["materialise_s"] + timings["swap_s"])
            if self.held_digest != recipe.digest:
                raise EvidenceMismatch(f"after a swap the engine holds {self.held_digest}, not {recipe.digest}")
        canary = None
        if check or (is_new and self.canary.is_due(self.swap_count)):
            canary = self._make_canary(recipe)
        return SwapReport(
            recipe.digest,
            self.swap_count,
            self.weights_checksum,
            **timings,
            is_new=is_new,
            canary=canary,
            off_device=str(self._state["off_device"]),
            whole=str(self._state["whole"]),
            elements_read=int(self._state["elements_read"]) if is_new else 0,
        )

    def check(self) -> CanaryReport:
        """Compare the engine with transformers now, and return a report on the comparisons that it has passed so far.

        Nothing is compared if the engine has scored nothing since the last comparison that it passed. The comparison is
        on the merge of the recipe that the engine holds. If the engine holds no recipe, or if this comparison is not
        possible, for example because logits are not finite, the base model is written into the engine and compared.
        Raises EngineFault if the engine's log-probabilities differ from transformers' log-probabilities.
        """
        with self._failing_for_good():
            if not self._is_checked:
                held = self._held if self.held_digest is not None else None
                if held is None or self._make_canary(held).skipped:
                    self._swap(base_recipe(self.family), check=True)
            return self.canary.report

    def _make_canary(self, recipe: Recipe) -> CanaryReport:
        with threads_of_ranks(self.options.tensor_parallel_size):
            report = self.canary.make(recipe, self.logprobs, free_bytes=free_host_bytes, swap_count=self.swap_count)
        self._is_checked = not report.skipped
        return report

    def check_against_transformers(self, recipe: Recipe) -> float | None:
        """Compare the engine with transformers on the merge of `recipe`, whatever recipe the engine reports to hold.

        Returns how much the log-probabilities differ (function `backend.typical_difference`), or None if the comparison
        was skipped. Raises EvidenceMismatch if they differ by more than rounding explains (method
        `canary.Canary.compare`).
        """
        with threads_of_ranks(self.options.tensor_parallel_size):
            return self.canary.compare(recipe, self.logprobs, free_bytes=free_host_bytes)

    def generate(
        self, requests: Sequence[Generation], *, finished: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        """Generate one batch of completions, and return them in the order of `requests`.

        `finished` is called with the index and the completion of a request as soon as the completion is ready. Raises
        TrialFailed if the model's logits were NaN or infinite at any step.
        """
        from vllm.sampling_params import RequestOutputKind

        known: dict[tuple[Any, ...], Any] = {}

        def parameters(request: Generation) -> Any:
            key = (request.max_tokens, request.stop, request.temperature, request.top_p, request.top_k, request.seed)
            if key not in known:
                known[key] = self._sampling(request, RequestOutputKind.FINAL_ONLY, skip_special_tokens=False)
            return known[key]

        places: dict[Generation, list[int]] = {}  # a task may repeat a greedy request
        for index, request in enumerate(requests):
            places.setdefault(request, []).append(index)
        distinct = list(places)
        ordered = [distinct[index] for index in neighbours([request.tokens for request in distinct])]
        completions: dict[Generation, Completion] = {}

        def finish(index: int, output: Any) -> None:
            request = ordered[index]
            completion = Completion(str(output.outputs[0].text), tuple(output.outputs[0].token_ids))
            completions[request] = completion
            if finished is not None:
                for place in places[request]:
                    finished(place, completion)

        self._run([request.tokens for request in ordered], [parameters(request) for request in ordered], finish)
        return [completions[request] for request in requests]

    def stream(self, take: Callable[[bool], Sequence[Stream]]) -> None:
        """Generate completions, and pass their texts on after each step of the engine, until no completion is left.

        `take` is called before each step, and returns the completions that begin with this step. The argument of `take`
        says whether earlier completions are still being generated; if it is False and `take` returns nothing, the
        method ends. If `take` raises an error, all completions end, and the error is raised. Raises TrialFailed if the
        model's logits were NaN or infinite at any step; this is checked whenever a completion ends.
        """
        from vllm import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._refuse_after_a_fault()
        self._is_checked = False
        self._call("mergesearch_bad_rows")
        live: dict[str, tuple[str, Stream]] = {}  # by the name under which vLLM reports a request: its id in vLLM
        with engine_errors():
            try:
                while True:
                    for new in take(bool(live)):
                        prompt = TokensPrompt(prompt_token_ids=list(new.generation.tokens))
                        parameters = self._sampling(new.generation, RequestOutputKind.DELTA, skip_special_tokens=True)
                        self._num_streams += 1
                        name = f"stream {self._num_streams}"
                        # `LLM.enqueue` would let vLLM report only complete texts.
                        live[name] = self._llm.llm_engine.add_request(name, prompt, parameters), new
                    for name in [name for name, (_, each) in live.items() if each.is_cancelled]:
                        self._llm.llm_engine.abort_request([live.pop(name)[0]], internal=True)
                    if not live:
                        break
                    outputs = [output for output in self._llm.llm_engine.step() if output.request_id in live]
                    if any(output.finished for output in outputs):
                        self._check_logits(len(live))
                    for output in outputs:
                        _, each = live.pop(output.request_id) if output.finished else live[output.request_id]
                        (new_text,) = output.outputs
                        each.add(str(new_text.text), len(new_text.token_ids), new_text.finish_reason)
            except BaseException:
                with suppress(Exception):  # an engine that has ended has no requests either
                    self._llm.llm_engine.abort_request([number for number, _ in live.values()], internal=True)
                raise

    def _sampling(self, request: Generation, output_kind: Any, *, skip_special_tokens: bool) -> Any:
        """Create vLLM's sampling options for the completion `request`.

        `output_kind` is vLLM's option for when generated text is returned, for example only at the end.
        `skip_special_tokens` says whether vLLM leaves special tokens out of the text.
        """
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=request.max_tokens,
            stop=list(request.stop) or None,
            stop_token_ids=list(self.prompts.stop_token_ids) or None,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed if request.temperature > 0 else None,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=False,
            output_kind=output_kind,
        )

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        """Score one batch of continuations, and return (log-likelihood, is greedy) for each of `requests`.

        A continuation is a text whose beginning is given and whose end is scored. The log-likelihood of the end is its
        natural log-probability, given the beginning. The second value says whether greedy decoding would generate this
        end. Raises TrialFailed if the model's logits were NaN or infinite at any step.
        """
        return [
            (sum(logprob for logprob, _ in tokens), all(is_likeliest for _, is_likeliest in tokens))
            for tokens in self._scored(requests)
        ]

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each prompt, the log-probabilities of its tokens except the first, given the preceding tokens.

        Prompts are lists of token ids; log-probabilities are natural logarithms.
        """
        scored = self._scored([Continuation(tuple(prompt), 1) for prompt in prompts])
        return [[logprob for logprob, _ in tokens] for tokens in scored]

    def _scored(self, continuations: Sequence[Continuation]) -> list[list[Scored]]:
        """A list for each of `continuations`, with a pair (log-probability, is likeliest) for each scored token.

        A continuation is a text whose beginning is given and whose other tokens are scored. The second value says
        whether the token is the likeliest in its place. Raises TrialFailed if the model's logits were NaN or infinite.
        """
        plan = ReadingPlan(continuations, block=self._cache_block)
        outputs = self._read(plan.readings)
        # vLLM computes no rows of logits for cached tokens. A reading that lacks rows is repeated without the cache.
        missing = [
            index
            for index, (reading, output) in enumerate(zip(plan.readings, outputs, strict=True))
            if reading.num_rows and (output.num_cached_tokens or 0) >= reading.start
        ]
        if missing:
            again = self._read([plan.readings[index] for index in missing], uses_cache=False)
            for index, output in zip(missing, again, strict=True):
                outputs[index] = output
        return plan.scores([_result(*pair) for pair in zip(plan.readings, outputs, strict=True)])

    @property
    def _cache_block(self) -> int:
        """The number of tokens in a block of the prefix cache; 0 if the engine has no prefix cache."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.block_size) if cache.enable_prefix_caching else 0

    def _read(self, readings: Sequence[Reading], *, uses_cache: bool = True) -> list[Any]:
        """Compute the log-probabilities that `readings` ask for, and return vLLM's output for each of them.

        A reading is one prompt, with the tokens whose log-probabilities are needed. `uses_cache` says whether the
        prefix cache may be used. A reading that needs no log-probabilities of its prompt's own tokens always uses the
        prefix cache.
        """
        from vllm import SamplingParams

        block = self._cache_block

        def parameters(reading: Reading) -> Any:
            return SamplingParams(
                temperature=0,
                max_tokens=1,
                logprob_token_ids=list(reading.choices),
                prompt_logprobs=0 if reading.num_rows else None,
                # Rows that begin in the first block need that block computed, not cached.
                skip_reading_prefix_cache=reading.num_rows > 0 and not (uses_cache and reading.start > block),
                flat_logprobs=True,
                detokenize=False,
            )

        return self._run([reading.tokens for reading in readings], list(map(parameters, readings)))

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        parameters: list[Any],
        finished: Callable[[int, Any], None] = lambda index, output: None,
    ) -> list[Any]:
        from vllm import TokensPrompt

        self._refuse_after_a_fault()
        self._is_checked = False
        self._call("mergesearch_bad_rows")
        with engine_errors():
            ids = self._llm.enqueue(
                [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts], parameters, use_tqdm=False
            )
            # vLLM numbers requests, returns the numbers with random characters behind them, and reports them without.
            positions = {name.partition("-")[0]: index for index, name in enumerate(ids)}
            outputs: list[Any] = [None] * len(ids)
            try:
                while self._llm.llm_engine.has_unfinished_requests():
                    for output in self._llm.llm_engine.step():
                        if output.finished:
                            index = positions[output.request_id]
                            outputs[index] = output
                            finished(index, output)
            except BaseException:
                with suppress(Exception):  # an engine that has ended has no requests either
                    self._llm.llm_engine.abort_request(ids, internal=True)
                raise
        self._check_logits(len(prompts))
        return outputs

    def _check_logits(self, num_prompts: int) -> None:
        """Raise TrialFailed if logits of the `num_prompts` prompts were NaN or infinite since the last check."""
        if any(rows := self._call("mergesearch_bad_rows")):
            self._llm.reset_prefix_cache()
            raise TrialFailed(f"the merged model's logits are {in_words(rows, num_prompts=num_prompts)}")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the class `MergeExtension` in every process of the engine, and combine the results.

        `method` is the name of the method, and `args` and `kwargs` are its arguments. With tensor parallelism there are
        several processes (ranks). Their results are combined according to what they mean: for example, the numbers of
        elements read are added, and different checksums are joined by "+". Raises EvidenceMismatch if the ranks do not
        hold the same merge.
        """
        with engine_errors():
            results = self._llm.collective_rpc(method, args=args, kwargs=kwargs)
        if method == "mergesearch_bad_rows":
            return [max(counts) for counts in zip(*results, strict=True)]
        if isinstance(results[0], dict):
            if len({(result["digest"], result["swaps"]) for result in results}) > 1:
                raise EvidenceMismatch(f"the engine's ranks hold different weights: {results}")

            def texts(key: str) -> str:
                return "+".join(sorted({text for result in results if (text := result.get(key))}))

            joined = {
                "checksum": "+".join(result["checksum"] for result in results),
                "off_device": texts("off_device"),
                "whole": texts("whole"),
                "elements_read": sum(result.get("elements_read", 0) for result in results),
            }
            return {**results[0], **joined}
        return results[0] if len(set(results)) == 1 else "+".join(map(str, results))

    def close(self) -> None:
        """Shut vLLM down and free its memory, also that which processes of the node share; may be called twice.

        An engine of one process has the sources in this process. The ranks of other engines end, and so does their use
        of shared memory.
        """
        llm = self.__dict__.pop("_llm", None)
        if llm is not None:
            if (ranks := self.options.tensor_parallel_size) > 1:
                log.info(
                    "engine %s ends: it waits for %d processes, each of which ends after its merge", self.name, ranks
                )
            self._close_bank()
            llm.llm_engine.engine_core.shutdown()
        if self._new_tokenizer is not None:
            self._new_tokenizer.cleanup()
            self._new_tokenizer = None

    def _close_bank(self) -> None:
        from workers.engines.vllm.worker_extension import close_bank, family_to_json

        close_bank(family_to_json(self.family))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _result(reading: Reading, output: Any) -> Read:
    """Extract the log-probabilities that `reading`, a prompt, asks for from vLLM's `output` for the prompt.

    With each log-probability, the result says whether the token is the likeliest in its place, that is, whether vLLM
    gives the token rank 1.
    """
    rows: tuple[Scored, ...] = ()
    if reading.num_rows:  # the last ones: vLLM may also give those of other tokens of the prompt
        found = output.prompt_logprobs
        values, ranks = found.logprobs[-reading.num_rows :], found.ranks[-reading.num_rows :]
        rows = tuple((value, rank == 1) for value, rank in zip(values, ranks, strict=True))
    after = output.outputs[0].logprobs
    # The first is the token that was generated, the only one whose rank vLLM computes.
    likeliest = after.token_ids[0] if after.ranks[0] == 1 else None
    logprobs = dict(zip(after.token_ids, after.logprobs, strict=True))
    return Read(rows, {token: (logprobs[token], token == likeliest) for token in reading.choices})
