"""Tokenization of the prompts of completion requests, with BOS, chat template and maximum length as in scoring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.errors import InvalidPrompt
from workers.evaluation.prompts import Generation, Prompts
from workers.serving.completions import CompletionRequest, Message

__all__ = ["generation_of"]


def generation_of(request: CompletionRequest, prompts: Prompts) -> Generation:
    """Tokenize the prompt of a completion request, and determine how many tokens may be generated.

    A chat is rendered with a chat template: the one that the study's option `engine.chat_template` names, or the
    model's default template. The text of the option `engine.system_prompt` is put before a chat that has no system
    message. Without `request.max_tokens`, the number of tokens is limited only by the model's context. `prompts` has
    the model's tokenizer and the study's options.

    Raises:
        InvalidPrompt: The prompt has no tokens or invalid tokens, the model has no chat template, the template refuses
            the messages, or the context is too short.
    """
    tokens, field = _tokens(request, prompts)
    room = prompts.max_length - len(tokens)
    if not tokens:
        raise InvalidPrompt("the prompt has no tokens; give a text", field)
    if room < 1:
        raise InvalidPrompt(
            f"the prompt has {len(tokens)} tokens, but the context has {prompts.max_length}; the prompt and at least "
            "one token must fit into it (option engine.max_model_len of the study)",
            field,
        )
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if max_tokens > room:
        raise InvalidPrompt(
            f"{max_tokens} is too large: the prompt has {len(tokens)} tokens and the context {prompts.max_length}; "
            f"give at most {room}",
            "max_tokens",
        )
    return Generation(tokens, max_tokens, request.stop, request.temperature, request.top_p, request.top_k, request.seed)


def _tokens(request: CompletionRequest, prompts: Prompts) -> tuple[tuple[int, ...], str]:
    """Token ids of the prompt of `request`, and the name of the request's field that has the prompt.

    Raises InvalidPrompt if a given token is not in the vocabulary, or if the messages of a chat cannot be rendered.
    """
    if request.messages is not None:
        return tuple(prompts.encode(_rendered(request.messages, prompts))), "messages"
    if isinstance(request.prompt, str):
        return tuple(prompts.encode(request.prompt)), "prompt"
    vocabulary = int(prompts.config["vocab_size"])
    if wrong := [token for token in request.prompt if not 0 <= token < vocabulary]:
        raise InvalidPrompt(f"{wrong[0]} is no token; the vocabulary has the tokens 0 to {vocabulary - 1}", "prompt")
    return request.prompt, "prompt"


def _rendered(messages: Sequence[Message], prompts: Prompts) -> str:
    import jinja2

    tokenizer: Any = prompts.tokenizer
    name = prompts.options.chat_template
    try:
        template = tokenizer.get_chat_template(name if isinstance(name, str) else None)
    except ValueError as error:
        raise InvalidPrompt(
            "the model has no chat template, which chat completions need; send its prompt to /completions instead",
            "messages",
        ) from error
    system = prompts.options.system_prompt
    given = [dict(message) for message in messages]
    if system and not any(message["role"] == "system" for message in given):
        given = [{"role": "system", "content": system}, *given]
    try:
        text = tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=True, chat_template=template)
    except jinja2.TemplateError as error:
        raise InvalidPrompt(f"the model's chat template refuses these messages: {error}", "messages") from error
    return str(text)
