"""Exceptions of merging, engines and evaluation. Each class says what the caller does next.

    WorkerError
    ├── InvalidModel      (ValueError)    reject the study or merge: a checkpoint cannot be used; has every problem
    ├── InvalidTask       (ValueError)    reject the study: a task or its data cannot be used
    ├── InvalidPrompt     (ValueError)    reject the request: its prompt or its options cannot be used
    ├── TrialFailed       (RuntimeError)  fail this trial with this reason; the study continues
    │   └── MetricFailed                  fail this trial; if it is the base model, fail the study: its task is unusable
    ├── EngineUnavailable (RuntimeError)  the engine did not start or died; try again on another replica, then stop
    │   ├── EngineCrashed                 the engine died with this chunk; count that, and try again
    │   ├── RequestFailed                 the engine works, the request failed outside it; try again, then stop
    │   ├── EngineBusy                    the engine works for a search; complete the prompt elsewhere, or later
    │   ├── ServeUnavailable              it is unknown whether engines run; wait, and ask again
    │   └── NodeDraining                  the engine's node is about to stop; score on another replica
    ├── TrainingFailed    (RuntimeError)  stop this training: continuing from its last checkpoint would fail again
    └── EvidenceMismatch  (RuntimeError)  stop the study: a result is not that of the requested recipe or prompts
        └── EngineFault                   score on another replica; this one's samples since its last check are void

All of them cross process boundaries: constructor arguments are exactly those passed to `super().__init__`.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "CrashKind",
    "EngineBusy",
    "EngineCrashed",
    "EngineFault",
    "EngineUnavailable",
    "EvidenceMismatch",
    "InvalidModel",
    "InvalidPrompt",
    "InvalidTask",
    "MetricFailed",
    "NodeDraining",
    "RequestFailed",
    "ServeUnavailable",
    "TrainingFailed",
    "TrialFailed",
    "WorkerError",
]


class WorkerError(Exception):
    """Base class of the exceptions of the package `workers`."""


class InvalidModel(WorkerError, ValueError):
    """Raised if checkpoints cannot be merged; `problems` has a line for each reason."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class InvalidTask(WorkerError, ValueError):
    """Raised if a task cannot be evaluated, for example because it is unknown or has malformed data.

    `field` is the field of the objective that is wrong: "metric", "filter", "split", "num_fewshot", "max_tokens",
    "task", or a key inside the task if the task is a mapping.
    """

    def __init__(self, message: str, field: str = "task") -> None:
        super().__init__(message, field)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidPrompt(WorkerError, ValueError):
    """Raised if a prompt cannot be completed, for example because it is longer than the model's context.

    `field` is the field of the request that is wrong.
    """

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message, field)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


class TrialFailed(WorkerError, RuntimeError):
    """Raised if a trial's merge cannot be scored, for example because of NaN or infinite logits.

    The message is stored with the trial as the reason of its failure.
    """


class MetricFailed(TrialFailed):
    """Raised if a task's metric or filter fails on a model's answers, gives no number, or does not end in time.

    The message names task, metric and document.
    """


class EngineUnavailable(WorkerError, RuntimeError):
    """Raised if no engine could be started; the message has the reason and the engine's log file."""


class CrashKind(StrEnum):
    """Ways in which an inference engine crashes.

    ERROR: the engine raised an error, or a fatal signal (SIGSEGV, SIGABRT) ended its process. HANG: the engine made no
    progress. EXIT: the process ended for an unknown cause, for example because it was killed from outside, or by the
    kernel for lack of memory.
    """

    ERROR = "error"
    HANG = "hang"
    EXIT = "exit"


class EngineCrashed(EngineUnavailable):
    """Raised if an engine failed or its process ended during a request; the engine is not used again.

    `kind` is the way in which the engine crashed. `scored_others` says whether the engine's replica had scored a recipe
    other than the requested one since its start.
    """

    def __init__(
        self,
        message: str,
        replica: str = "",
        scored_others: bool = False,
        kind: CrashKind = CrashKind.ERROR,
    ) -> None:
        super().__init__(message, replica, scored_others, kind)
        self.replica = replica
        self.scored_others = scored_others
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class EngineBusy(EngineUnavailable):
    """Raised by a replica that refuses or ends a completion, because a search or another prompt needs its engine."""


class RequestFailed(EngineUnavailable):
    """Raised if a request to a replica failed outside its engine, for example because of a full disk.

    The replica stays in service.
    """


class ServeUnavailable(EngineUnavailable):
    """Raised if Ray Serve's controller does not answer, for example while it restarts; replicas may still work."""


class NodeDraining(EngineUnavailable):
    """Raised by a replica that accepts no more samples, because Ray drains its node before stopping it."""


class TrainingFailed(WorkerError, RuntimeError):
    """Raised if a loss or gradient is NaN or infinite, in a fine-tuning or in a policy update.

    The message names the step, and in a fine-tuning the batch and the last good checkpoint.
    """


class EvidenceMismatch(WorkerError, RuntimeError):
    """Raised if a result does not come from the requested recipe, source models and prompts.

    Engines report with each result the weights and prompts that they used (the evidence), which is compared with the
    request.
    """


class EngineFault(EvidenceMismatch):
    """Raised if an engine fails a check of its weights or results; the engine is not used again.

    `replica` names the engine's replica. `canaries` is the number of comparisons with transformers that the engine
    passed before. All samples that the engine scored after the last passed comparison, or since its start if it passed
    none, are void: they must be scored again.
    """

    def __init__(self, message: str, replica: str = "", canaries: int = 0) -> None:
        super().__init__(message, replica, canaries)
        self.replica = replica
        self.canaries = canaries

    def __str__(self) -> str:
        return str(self.args[0])
