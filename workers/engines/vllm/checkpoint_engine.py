"""Engine for one checkpoint, which may be quantised, as vLLM itself loads it; and scores of tasks with this engine.

This engine has no source models and merges nothing. A process can have only one engine. Therefore the caller starts
`python -m workers.engines.vllm.checkpoint_engine JOB RESULT` as a separate process to score spans (ranges of samples).
JOB and RESULT are the files of the pickled request and of the pickled result.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from search_spaces.study.engine import EngineOptions
from workers.engines.vllm.engine import Engine
from workers.engines.vllm.environment import engine_environment, let_llvmlite_be_inspected
from workers.engines.vllm.memory import MAX_NUM_SEQS, batched_tokens
from workers.engines.vllm.startup.cpus import cpu_options
from workers.errors import EngineUnavailable
from workers.evaluation.prompts import Prompts
from workers.evaluation.system_calls import PR_SET_PDEATHSIG
from workers.types import SampleResult, Span

__all__ = ["CheckpointEngine", "scores_of"]

# The share of a GPU's memory that vLLM may use for weights and cache. Nothing else uses the GPU.
GPU_SHARE = 0.9

# Seconds that the process may take to start, and for each sample: much more than it needs, a hanging one is to end.
START_S = 3600.0
SAMPLE_S = 120.0

# Lines of the end of a failed process's output that a message has.
SHOWN = 5


class CheckpointEngine(Engine):
    """vLLM engine with the weights of the checkpoint in `directory`; the weights are never replaced.

    `options` are the options of a study's engines; `dtype: auto` is float32 on CPU and bfloat16 on a GPU. Unlike
    engines of merges, this engine does not refuse completions with NaN logits.
    """

    def __init__(self, directory: str, options: EngineOptions, *, name: str = "checkpoint") -> None:
        self.options = options
        self.name = name
        self.prompts = Prompts(directory, options)
        self.max_length = self.prompts.max_length
        self._is_checked = False
        self._num_streams = 0
        self._fault = None
        self._new_tokenizer = None
        os.environ.update(engine_environment(options, os.environ))
        from vllm import LLM
        from vllm.platforms import current_platform

        let_llvmlite_be_inspected()
        is_cpu = bool(current_platform.is_cpu())
        self.dtype = options.dtype if options.dtype != "auto" else "float32" if is_cpu else "bfloat16"
        memory: dict[str, Any] = {"gpu_memory_utilization": GPU_SHARE}
        if is_cpu:
            memory = cpu_options(self.prompts, self.prompts.config, self.dtype)
        self._llm = LLM(
            model=directory,
            tokenizer=self._tokenizer_directory(),
            dtype=self.dtype,
            max_model_len=self.max_length,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=batched_tokens(self.max_length, is_cpu=is_cpu),
            tensor_parallel_size=options.tensor_parallel_size,
            distributed_executor_backend="mp" if options.tensor_parallel_size > 1 else None,
            generation_config="vllm",
            seed=options.seed,
            enforce_eager=is_cpu,
            disable_log_stats=True,
            trust_remote_code=False,
            **memory,
        )

    def _close_bank(self) -> None:
        """Do nothing: the engine has no source models."""

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Answer a call of the method `mergesearch_bad_rows` with [0, 0], no rows of logits with NaN or infinity.

        An engine without merges has no worker extension that could count them. Raises NotImplementedError for any other
        method.
        """
        if method == "mergesearch_bad_rows":
            return [0, 0]
        raise NotImplementedError(method)


def scores_of(
    directory: str | Path, options: EngineOptions, spans: Sequence[Span], *, limit_s: float | None = None
) -> tuple[SampleResult, ...]:
    """Score samples of tasks with the checkpoint in `directory`, in a separate process, and return the samples.

    `options` are the options of the engine, and `spans` are the ranges of samples. Raises EngineUnavailable, with the
    end of its output, if the process fails, or if it runs for more than `limit_s` seconds: by default an hour, and two
    minutes more for each sample.
    """
    if limit_s is None:
        limit_s = START_S + SAMPLE_S * sum(span.stop - span.start for span in spans)
    with tempfile.TemporaryDirectory(prefix="mergesearch-scores-") as place:
        job, result, log = (Path(place) / name for name in ("job", "result", "log"))
        job.write_bytes(pickle.dumps((str(directory), options, tuple(spans))))
        command = [sys.executable, "-m", "workers.engines.vllm.checkpoint_engine", str(job), str(result)]
        status = _run(command, log, limit_s)
        if status != 0:
            why = f"stopped after {limit_s:g} s" if status is None else f"exit status {status}"
            end = "\n".join(log.read_text(errors="replace").strip().splitlines()[-SHOWN:])
            raise EngineUnavailable(f"vLLM cannot score {directory} ({why}):\n{end}")
        samples: tuple[SampleResult, ...] = pickle.loads(result.read_bytes())
        return samples


def _run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """Run a command, and write its output to the file `log`; return its exit status, or None if it took too long.

    After `limit_s` seconds, or if this process is interrupted, the command is killed, together with the processes that
    it has started.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _main(job: Path, result: Path) -> None:
    from workers.evaluation.lm_eval import TaskEvaluator

    directory, options, spans = pickle.loads(job.read_bytes())
    with CheckpointEngine(directory, options) as engine:
        samples = TaskEvaluator(engine, engine.prompts).score(spans).samples
    result.write_bytes(pickle.dumps(samples))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL
    )  # it is not in the session of the process that waits for it
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
