"""Seconds of the phases of a study by a roofline model, which takes the slower of arithmetic and memory.

The model computes the seconds of a pass of a language model over tokens in two ways: from the pass's operations, and
from the bytes of weights and KV cache that the pass reads. The device reaches only a share of its speed or bandwidth.
The longer time counts. Fixed costs of each layer, sample and evaluation are added. The shares and fixed costs (class
`Calibration`) of CPUs were fitted to models of 1M and 75M parameters (`make bench ONLY=plan`). The values for GPUs are
assumptions, because no engine has run on a GPU yet.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from service.studies.planning.facts import ModelFacts
from workers.engines.canaries import CANARY_TOKENS, NUM_PROMPTS
from workers.engines.transformers.batches import BATCH

__all__ = [
    "CPU",
    "GPU",
    "PATHS_ON_GPU",
    "PYTHON_LOOPS",
    "SORTED_PER_S",
    "TRANSFORMERS_ON_GPU",
    "Calibration",
    "Device",
    "SampleTokens",
    "Speeds",
    "Work",
    "statistics_s",
]


@dataclass(frozen=True)
class Calibration:
    """Shares of a device's speeds that programs reach, and fixed seconds of passes, samples, starts and other steps.

    Attributes:
        products: Share of the speed of matrix products that an engine's passes over many tokens reach.
        transformers_products: Share of the speed of matrix products that passes of transformers reach.
        decoding: Share of the bandwidth at which weights and KV cache are read for each generated token.
        layer_s: Seconds for each layer in each pass, for launches and dispatch.
        pass_s: Seconds for each pass, for the scheduler and sampling.
        sample_s: Seconds for each sample, for requests, detokenization and metrics.
        evaluation_s: Seconds for each evaluation, for the proposal, storing, and requests to the replica.
        merging: Share of the bandwidth at which sources are read and a merge is written.
        tensor_s: Seconds for each tensor of a swap, which writes a merge into a running engine.
        packing: Number of times that a swap reads or writes the whole merge after merging, for packing and checksums.
        start_s: Seconds of an engine's start that do not depend on the model: imports, processes, compiling.
        start_reads: Number of times that a start, without its canary, reads or writes the whole merge: loading,
            packing.
        start_tokens: Tokens of the passes of a start without its canary: the engine's trial pass.
        canary_reads: Number of times that a canary, a comparison with transformers, reads or writes a merge in float32
            to build it on the CPU, beside merging.
        step_products: Share of the speed of matrix products that a gradient step reaches.
        step_s: Seconds of a gradient step that do not depend on the model.
        verify_s: Seconds of a verification that do not depend on the model.
        verify_reads: Number of times that a verification reads or writes the whole merge: export, loading.
    """

    products: float
    transformers_products: float
    decoding: float
    layer_s: float
    pass_s: float
    sample_s: float
    evaluation_s: float
    merging: float
    tensor_s: float
    packing: float
    start_s: float
    start_reads: float
    start_tokens: float
    canary_reads: float
    step_products: float
    step_s: float
    verify_s: float
    verify_reads: float

    def on_core(self, loops: float) -> Calibration:
        """The same on a core that runs `loops` iterations per second of a short loop in Python.

        Fixed seconds are those of programs in Python, so they scale with this speed.
        """
        slower = PYTHON_LOOPS / loops
        return replace(self, **{name: getattr(self, name) * slower for name in FIXED})


# Fixed seconds of programs in Python.
FIXED = ("layer_s", "pass_s", "sample_s", "evaluation_s", "tensor_s", "start_s", "step_s", "verify_s")
# Iterations per second of a short loop in Python on the core to which the fixed seconds of `CPU` were fitted.
PYTHON_LOOPS = 3.3e7

# Fitted to the first runs of two families of docs/how-to/plan.md. A start does not include its first canary.
CPU = Calibration(
    products=0.85,
    transformers_products=0.5,
    decoding=0.6,
    layer_s=6.5e-5,
    pass_s=9e-4,
    sample_s=4.5e-4,
    evaluation_s=0.045,
    merging=0.4,
    tensor_s=3.5e-4,
    packing=8.5,
    start_s=7.2,
    start_reads=8.0,
    start_tokens=300.0,
    canary_reads=45.0,
    step_products=0.8,
    step_s=0.065,
    verify_s=0.2,
    verify_reads=20.0,
)
# Assumptions: products and bandwidth as published rooflines of vLLM; merging as measured on an H100 with sources in the
# GPU's memory (docs/measurements.md); the start with compilation and captured graphs.
GPU = Calibration(
    products=0.5,
    transformers_products=0.5,
    decoding=0.7,
    layer_s=5e-6,
    pass_s=3e-3,
    sample_s=1e-3,
    evaluation_s=0.1,
    merging=0.6,
    tensor_s=5e-5,
    packing=1.0,
    start_s=120.0,
    start_reads=3.0,
    start_tokens=0.0,
    canary_reads=15.0,
    step_products=0.35,
    step_s=0.1,
    verify_s=5.0,
    verify_reads=10.0,
)
# Assumptions for passes without CUDA graphs, where each of a layer's kernels is launched by Python: vLLM's engines for
# layer paths, and transformers, which verifies merges.
PATHS_ON_GPU = replace(GPU, layer_s=2e-4)
TRANSFORMERS_ON_GPU = replace(GPU, layer_s=7e-4)

# Bytes per second of one core, as measured on the machine of docs/measurements.md: sha256, and the search for NaN and
# infinity in bfloat16.
HASHED_PER_S, SCANNED_PER_S = 1.4e9, 7e9
# Elements per second for which one core of that machine sorts statistics of sources in bfloat16: tables of the
# magnitudes of a task vector, of the variances of three, and ranks within rows (38, 64 and 47 s for 10^9 elements).
SORTED_PER_S = {"magnitudes": 2.6e7, "variances": 1.6e7, "ranks": 2.1e7}


@dataclass(frozen=True)
class Device:
    """Speeds of the device that computes passes: all GPUs of one engine together, or threads of a CPU.

    `products` is the speed of matrix products in operations per second, and `bandwidth` is the speed of memory in bytes
    per second. `source_bandwidth` is the rate, in bytes per second, at which merging reads the sources from where they
    are kept. `calibration` has the shares of these speeds that programs reach.
    """

    products: float
    bandwidth: float
    source_bandwidth: float
    calibration: Calibration


@dataclass(frozen=True)
class SampleTokens:
    """Mean numbers of tokens of a sample: of the prompt (`read`), and of the generated answer (`answered`)."""

    read: float
    answered: float


@dataclass(frozen=True)
class Work:
    """Samples to score: their number, and their mean numbers of tokens."""

    samples: float
    tokens: SampleTokens


@dataclass(frozen=True)
class Speeds:
    """One family of models on one device, with methods that compute the seconds of the work in a study.

    Attributes:
        facts: Sizes of the models.
        device: Speeds of the device.
        value_bytes: Bytes of a value in the engine's dtype.
        kv_bytes: Bytes of the keys and values of one token, over all of an engine's GPUs.
        texts: Number of texts that an engine serves at the same time.
        disk_bandwidth: Bytes per second at which models are read from disk.
    """

    facts: ModelFacts
    device: Device
    value_bytes: int
    kv_bytes: int
    texts: int
    disk_bandwidth: float

    @property
    def model_bytes(self) -> int:
        return self.facts.parameters * self.value_bytes

    def pass_s(
        self, tokens: float, *, context: float, logits: float, read_bytes: float, in_transformers: bool = False
    ) -> float:
        """Seconds of one forward pass over `tokens` tokens, whose mean context is `context` tokens.

        Logits are computed for `logits` of the tokens. `read_bytes` are the bytes of weights and KV cache that the pass
        reads. `in_transformers` says that transformers computes the pass, and not an engine.
        """
        facts, device, own = self.facts, self.device, self.device.calibration
        share = own.transformers_products if in_transformers else own.products
        operations = tokens * (2 * facts.active + facts.attention * context) + 2 * logits * facts.head
        arithmetic = operations / (device.products * share)
        memory = read_bytes / (device.bandwidth * own.decoding)
        return max(arithmetic, memory) + facts.layers * own.layer_s + own.pass_s

    def evaluation_s(self, work: Work) -> float:
        """Seconds to score the samples in `work` on a merge that the engine already has.

        The engine reads the prompts in passes of at most 4,096 tokens. It then generates the answers, in batches of at
        most `self.texts` samples; each pass adds one token to every answer of the batch.
        """
        if not work.samples:
            return 0.0
        own, tokens = self.device.calibration, work.tokens
        prompts = work.samples * tokens.read
        passes = max(1, math.ceil(prompts / 4096))
        reading = passes * self.pass_s(
            prompts / passes,
            context=tokens.read / 2,
            logits=work.samples / passes,
            read_bytes=self.facts.parameters * self.value_bytes,
        )
        together = min(work.samples, self.texts)
        steps = max(0.0, tokens.answered - 1) * work.samples / together
        context = tokens.read + tokens.answered / 2
        step_s = self.pass_s(
            together,
            context=context,
            logits=together,
            read_bytes=(self.facts.multiplied + self.facts.head) * self.value_bytes
            + together * context * self.kv_bytes,
        )
        return own.evaluation_s + reading + steps * step_s + work.samples * own.sample_s

    @property
    def merge_s(self) -> float:
        """Seconds to compute a merge: every source is read once, and the result is written."""
        own, device = self.device.calibration, self.device
        reading = self.facts.bank_bytes / (device.source_bandwidth * own.merging)
        writing = self.model_bytes / (device.bandwidth * own.merging)
        return reading + writing + self.facts.tensors * own.tensor_s

    @property
    def swap_s(self) -> float:
        """Seconds to compute a merge and to write it into an engine, with its checksum."""
        own = self.device.calibration
        return self.merge_s + own.packing * self.model_bytes / self.device.bandwidth

    @property
    def check_s(self) -> float:
        """Seconds to read all sources twice before the first engine starts: for fingerprints, and for NaN and infinity.

        Results are kept, so that a later study of the same files need not read them.
        """
        return sum(self.facts.bank_bytes / min(self.disk_bandwidth, speed) for speed in (HASHED_PER_S, SCANNED_PER_S))

    @property
    def start_s(self) -> float:
        """Seconds from the start of an engine's process to its first request."""
        own = self.device.calibration
        loading = self.facts.bank_bytes / self.disk_bandwidth  # an engine begins with random weights
        moving = own.start_reads * self.model_bytes / self.device.bandwidth
        passes = (
            own.start_tokens * 2 * (self.facts.parameters - self.facts.idle) / (self.device.products * own.products)
        )
        return own.start_s + loading + moving + passes + self.swap_s

    @property
    def canary_s(self) -> float:
        """Seconds of a canary: a merge is built with transformers in float32, and reads a few prompts.

        The CPU of the host does this, so the seconds hold for a `Speeds` whose field `device` is that CPU.
        """
        full = self.facts.parameters * 4
        building = self.device.calibration.canary_reads * full / self.device.bandwidth
        reading = self.pass_s(
            CANARY_TOKENS, context=CANARY_TOKENS / 2, logits=CANARY_TOKENS, read_bytes=full, in_transformers=True
        )
        return self.merge_s + building + NUM_PROMPTS * reading

    def step_s(self, work: Work, *, recomputes: bool, num_passes: int = 1) -> float:
        """Seconds of a gradient step: merging, a forward and a backward pass, and the derivatives of the coefficients.

        `work` has the samples. A backward pass takes twice as long as a forward pass. If `recomputes` is True,
        activations are recomputed, which takes another forward pass. For the derivatives with respect to the
        coefficients, each of the step's `num_passes` passes reads the sources once more.
        """
        own, facts = self.device.calibration, self.facts
        tokens = work.samples * (work.tokens.read + work.tokens.answered)
        operations = tokens * (2 * facts.active + facts.attention * (work.tokens.read + work.tokens.answered) / 2)
        operations += 2 * work.samples * work.tokens.answered * facts.head
        passes = 4 if recomputes else 3
        return (
            own.step_s
            + passes * operations / (self.device.products * own.step_products)
            + (1 + num_passes) * self.merge_s
        )

    def verification_s(self, work: Work, *, compared: float, together: int = BATCH, on: Speeds | None = None) -> float:
        """Estimate the seconds of a verification: a merge is exported, loaded with transformers in float32, and scored.

        `work` has the number of samples that are scored and their lengths in tokens. Transformers reads the prompts of
        at most `together` samples in one pass, and then generates their answers together. The texts of `compared`
        samples are read once more, one after the other. The host's CPU exports the merge, so the estimate holds for a
        `Speeds` whose field `device` is that CPU. `on` has the speeds of the device that scores the samples; None means
        the same CPU.
        """
        own, facts, passes, tokens = self.device.calibration, self.facts, on or self, work.tokens
        full = facts.parameters * 4
        batches = math.ceil(work.samples / together)
        texts = work.samples / max(1, batches)
        pass_s = partial(passes.pass_s, in_transformers=True)
        reading = pass_s(texts * tokens.read, context=tokens.read / 2, logits=texts, read_bytes=full)
        context = tokens.read + tokens.answered / 2
        # Keys and values are copied for each token, as the cache grows, then repeated for each query head, and read.
        repeated = 2 * facts.attention
        cached = texts * context * (3 * passes.kv_bytes + 2 * repeated)
        step = pass_s(texts, context=context, logits=texts, read_bytes=full + cached)
        whole = tokens.read + tokens.answered
        again = pass_s(whole, context=whole / 2, logits=whole, read_bytes=full)
        scored = batches * (reading + max(0.0, tokens.answered - 1) * step) + compared * again
        written = own.verify_reads * full / self.device.bandwidth + 2 * self.model_bytes / self.disk_bandwidth
        return passes.device.calibration.verify_s + self.swap_s + self.merge_s + written + scored


def statistics_s(facts: ModelFacts, statistics: Collection[str], *, experts: int, threads: int) -> float:
    """Seconds in which the CPU of a machine sorts the sources for statistics that its engines then keep.

    `facts` are the sizes of the models, and `statistics` are names in SORTED_PER_S. Each of the `experts` experts has
    magnitudes and ranks of its own; variances are those of all experts together. `threads` threads share the work.
    """
    seconds = (facts.parameters * (1 if name == "variances" else experts) / SORTED_PER_S[name] for name in statistics)
    return sum(seconds) / threads
