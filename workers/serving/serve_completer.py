"""Client of the replicas in a Ray Serve application that complete prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from workers.errors import EngineUnavailable, WorkerError
from workers.serving.completions import CompletionPart, CompletionRequest
from workers.serving.serve_scorer import DEPLOYMENT

__all__ = ["ServeCompleter"]


@dataclass(frozen=True)
class ServeCompleter:
    """Client that completes prompts with the replicas of the Ray Serve application `app_name`.

    The client sends each request only once. It does not repeat the request if the replica dies, because the replica may
    already have sent a part of the completion.
    """

    app_name: str

    async def complete(self, request: CompletionRequest) -> AsyncGenerator[CompletionPart]:
        """Yield the parts of the completion that `request` asks for, as the replica generates them.

        If the iterator is closed, the replica ends the completion.

        Raises:
            WorkerError: The replica raised one of the errors of the method `ScoringReplica.complete`.
            EngineUnavailable: The replica died, or Ray Serve does not answer.
        """
        from ray import serve
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import RayServeException

        # `_check_exists=False`: Serve's controller would be asked without a time limit.
        handle: Any = serve.get_deployment_handle(DEPLOYMENT, app_name=self.app_name, _check_exists=False)
        response = handle.options(
            method_name="complete", stream=True, multiplexed_model_id=request.recipe.digest
        ).remote(request)
        try:
            async for part in response:
                yield part
        except RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                raise error.cause from error
            raise EngineUnavailable(f"{self.app_name}: {error.cause}") from error
        except (RayError, RayServeException) as error:
            raise EngineUnavailable(f"{self.app_name}: {type(error).__name__}: {error}".splitlines()[0]) from error
        finally:
            response.cancel()
