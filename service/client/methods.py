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
    """Interface of a client that sends the requests of a generator `flow`, and blocks until it returns."""

    def _run(self, flow: Flow[T], /) -> T: ...


class AwaitedRunner(Protocol):
    """Interface of a client that sends the requests of a generator `flow` with asyncio."""

    async def _run(self, flow: Flow[T], /) -> T: ...


def blocking(flow: Callable[P, Flow[T]]) -> Callable[Concatenate[BlockingRunner, P], T]:
    """Make a method of a blocking client that runs `flow`, a generator of requests, and returns its result."""

    def method(client: BlockingRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(flow(*args, **kwargs))

    return _described(method, flow)


def awaited(flow: Callable[P, Flow[T]]) -> Callable[Concatenate[AwaitedRunner, P], Coroutine[Any, Any, T]]:
    """Make a coroutine method of a client that runs `flow`, a generator of requests, and returns its result."""

    async def method(client: AwaitedRunner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client._run(flow(*args, **kwargs))

    return _described(method, flow)


def named(client: type[C]) -> type[C]:
    """Class decorator for clients that gives generated methods the names that methods written in the class have.

    `blocking` and `awaited` generate methods from flows, which are generators of HTTP requests. The decorator changes
    the module and the qualified name of each generated method, which otherwise name this module, to those of the class
    `client`. The API pages show these names. The result is `client` itself.
    """
    for name, method in vars(client).items():
        if inspect.isfunction(method) and method.__module__ == __name__:
            method.__module__, method.__qualname__ = client.__module__, f"{client.__qualname__}.{name}"
    return client


def _described(method: T, flow: Callable[..., Any]) -> T:
    """Give `method` the name, signature and docstring of the function `flow`, and return `method`.

    `help` and the API pages show them.
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
