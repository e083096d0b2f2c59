"""Turns generators of HTTP requests into methods of a client, with the generator's signature and docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from service.client.requests import Flow

__all__ = ["awaited", "blocking", "named"]

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")


class BlockingRunner(Protocol):
    """Interface of a client that sends HTTP requests and blocks until it has the responses.

    Its only method sends the requests that the generator `flow` yields, and returns the generator's result.
    """

    def _run(self, flow: Flow[T], /) -> T: ...


class AwaitedRunner(Protocol):
    """Interface of a client that sends HTTP requests with asyncio.

    Its only method sends the requests that the generator `flow` yields, and returns the generator's result.
    """

    async def _run(self, flow: Flow[T], /) -> T: ...


def blocking(flow: Callable[P, Flow[T]]) -> Callable[Concatenate[BlockingRunner, P], T]:
    """Make a method of a blocking client from `flow`, a function that returns a generator of HTTP requests.

    The method sends the requests that the generator yields, and returns the generator's result.
    """

    def method(client: BlockingRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(flow(*args, **kwargs))

    return _described(method, flow)


def awaited(flow: Callable[P, Flow[T]]) -> Callable[Concatenate[AwaitedRunner, P], Coroutine[Any, Any, T]]:
    """Make a coroutine method of an asyncio client from `flow`, a function that returns a generator of HTTP requests.

    The method sends the requests that the generator yields, and returns the generator's result.
    """

    async def method(client: AwaitedRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._run(flow(*args, **kwargs))

    return _described(method, flow)


def named(client: type[C]) -> type[C]:
    """Class decorator that makes the generated methods of a client look as if they were written in its class.

    The functions `blocking` and `awaited` of this module generate methods. The decorator changes the module and the
    qualified name of each generated method to names in the class `client`, because the API pages show these names. The
    result is `client` itself.
    """
    for name, method in vars(client).items():
        if inspect.isfunction(method) and method.__module__ == __name__:
            method.__module__, method.__qualname__ = client.__module__, f"{client.__qualname__}.{name}"
    return client


def _described(method: T, flow: Callable[..., Any]) -> T:
    """Give a generated client method the name, signature and docstring of its original function.

    `method` is the generated method, and is returned. `flow` is the function. `help` and the API pages then show the
    method as they would show the function.
    """
    signature = inspect.signature(flow)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *signature.parameters.values()]
    result = str(signature.return_annotation).removeprefix("Flow[").removesuffix("]")
    described: Any = method
    described.__name__ = flow.__name__
    described.__doc__ = flow.__doc__
    described.__annotations__ = {**flow.__annotations__, "return": result}
    described.__signature__ = signature.replace(parameters=parameters, return_annotation=result)
    return method
