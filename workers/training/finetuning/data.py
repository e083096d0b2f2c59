"""Training data: entries of a JSONL file or dataset as tokenized documents, packed into rows of one length.

The training loss includes the losses of the tokens of completions, and of the tokens that end completions. The order of
rows depends only on the seed. Therefore every rank has the same rows, and takes its own part of each batch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workers.errors import InvalidTask
from workers.evaluation.inline_files import RowTemplates, parse_line
from workers.evaluation.prompts import Prompts
from workers.models.remote import local_file
from workers.training.finetuning.modality import IGNORED
from workers.training.finetuning.spec import Data, FinetuneSpec

__all__ = ["IGNORED", "Batch", "Document", "batch_rows", "pack", "read_documents", "tensors_of", "writes_chats"]

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"

# A template that writes the value of one key of a row.
SINGLE_KEY = re.compile(r"\{\{-?\s*([A-Za-z_]\w*)\s*-?\}\}")


@dataclass(frozen=True)
class Document:
    """A training text as token ids, with a flag for each token: whether the training loss includes the token's loss.

    The flags are in `has_loss`. `origin` names the source of the text, such as a line of a file, for error messages.
    """

    tokens: tuple[int, ...]
    has_loss: tuple[bool, ...]
    origin: str


@dataclass(frozen=True)
class Batch:
    """Batch of training rows: token ids, positions and labels, each as a tensor [rows, length].

    `tokens` are the token ids. `positions` restart at 0 with each document in a row. `labels` are the next tokens, or
    IGNORED where the next token's loss does not count.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor

    @property
    def num_targets(self) -> int:
        return int((self.labels != IGNORED).sum())


def read_documents(data: Data, prompts: Prompts) -> list[Document]:
    """Read all training texts (documents) in the order of the data, and convert them to token ids.

    `data` names a JSONL file or dataset. `prompts` has the tokenizer.

    Raises:
        InvalidTask: Data are missing, malformed or empty (with the line), there is no completion to learn from, a
            document is longer than a row, or the tokenizer has no end-of-text token.
    """
    eos = prompts.tokenizer.eos_token_id
    if eos is None:
        raise InvalidTask(f"data: the tokenizer of {prompts.directory} has no end-of-text token; completions need one")
    source = data.file or data.dataset
    templates = RowTemplates(
        {"prompt": data.prompt, "answer": data.completion},
        where=str(source),
        answer_name="completion",
        only_text=True,
    )
    documents = []
    for origin, fields in _rows(data):
        if MESSAGES in fields:
            document = _chat(fields[MESSAGES], prompts, origin, has_bos=data.chat_bos)
        elif (messages := _conversation(data, fields, origin)) is not None:
            before, after = messages
            keys, first = f"{PROMPT} and {COMPLETION}", len(before)
            document = _chat([*before, *after], prompts, origin, name=keys, first=first, has_bos=data.chat_bos)
        else:
            row = templates.row(fields, where=origin)
            document = _completion(row.prompt, row.answer, int(eos), prompts, origin)
        if len(document.tokens) > data.max_length:
            raise InvalidTask(
                f"{origin}: {len(document.tokens)} tokens; data.max_length is {data.max_length}: raise it or shorten "
                "the text"
            )
        documents.append(document)
    if not documents:
        raise InvalidTask(f"{source}: holds no rows; expected one JSON object per line")
    return documents


def writes_chats(spec: FinetuneSpec) -> bool:
    """Whether prompts of a fine-tuning's evaluation tasks are formatted with the model's chat template.

    The option `evaluation.chat_template` of `spec` decides. Without this option, the result says whether the first row
    of the training data is a conversation. Raises InvalidTask if this row cannot be read.
    """
    if spec.evaluation is not None and spec.evaluation.chat_template is not None:
        return spec.evaluation.chat_template
    first = next(_rows(spec.data), None)
    return first is not None and (MESSAGES in first[1] or _conversation(spec.data, first[1], first[0]) is not None)


def pack(documents: Sequence[Document], *, length: int, packing: bool, seed: int) -> list[tuple[Document, ...]]:
    """Distribute documents over rows of at most `length` tokens; the rows are in an order given by `seed`.

    A row is one line of tokens of a batch. With `packing` a row has as many documents as fit; otherwise it has one
    document. A document goes into the fullest row that has enough space for it; only the newest rows are considered.
    """
    order = list(documents)
    random.Random(f"documents {seed}").shuffle(order)
    if not packing:
        return [(document,) for document in order]
    rows: list[list[Document]] = []
    room: list[int] = []
    open_rows: list[int] = []
    for document in order:
        size = len(document.tokens)
        fitting = [row for row in open_rows if room[row] >= size]
        if fitting:
            row = min(fitting, key=lambda index: room[index])
        else:
            row = len(rows)
            rows.append([])
            room.append(length)
            open_rows = [*open_rows[-MAX_OPEN:], row]
        rows[row].append(document)
        room[row] -= size
    return [tuple(row) for row in rows]


# The largest number of open rows: searching all rows would take quadratic time.
MAX_OPEN = 63


def batch_rows(num_rows: int, *, batch: int, step: int, seed: int) -> list[int]:
    """Indices of the rows that make up the batch of update number `step` (counted from 0).

    `num_rows` is the number of all rows, and `batch` is the number of rows in a batch. Each pass over all rows has its
    own order, which `seed` determines.
    """
    found = []
    for position in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(position, num_rows)
        found.append(_order(num_rows, epoch, seed)[index])
    return found


def tensors_of(rows: Sequence[Sequence[Document]], *, pad: int) -> Batch:
    """Convert rows of documents to tensors for one forward pass of the model.

    A row consists of the tokens of one or several documents, and is padded with the token id `pad` to the longest row.
    """
    width = max(1, *(sum(len(document.tokens) for document in row) for row in rows))
    tokens = torch.full((len(rows), width), pad)
    positions = torch.zeros_like(tokens)
    labels = torch.full_like(tokens, IGNORED)
    for i, row in enumerate(rows):
        start = 0
        for document in row:
            size = len(document.tokens)
            ids = torch.tensor(document.tokens)
            tokens[i, start : start + size] = ids
            positions[i, start : start + size] = torch.arange(size)
            # A token's label is at the position before it, where it is predicted.
            counted = torch.tensor(document.has_loss[1:])
            labels[i, start : start + size - 1] = torch.where(counted, ids[1:], IGNORED)
            start += size
        positions[i, start:] = torch.arange(width - start)
    return Batch(tokens, positions, labels)


_orders: dict[tuple[int, int, int], list[int]] = {}


def _order(num_rows: int, epoch: int, seed: int) -> list[int]:
    key = (num_rows, epoch, seed)
    if key not in _orders:
        order = list(range(num_rows))
        random.Random(f"rows {seed} {epoch}").shuffle(order)
        while len(_orders) > 1:
            _orders.pop(next(iter(_orders)))
        _orders[key] = order
    return _orders[key]


def _conversation(data: Data, fields: Mapping[str, Any], origin: str) -> tuple[list[Any], list[Any]] | None:
    """The messages of a row's prompt and of its completion, if both are lists of messages (TRL's format).

    `fields` maps the row's keys to their values. Returns None for plain text, if neither value is a list or an object.
    Other values are errors, because they would be written into the text as Python expressions: then InvalidTask is
    raised, and `origin` names the row. A template in `data` that writes a single key, such as `{{prompt}}`, stands for
    the value of this key; every other template writes text, and refuses lists and objects itself.
    """
    given = {name: _single_value(template, fields) for name, template in _templates(data).items()}
    nested = [name for name, value in given.items() if isinstance(value, list | Mapping)]
    if not nested:
        return None
    prompt, completion = given.values()
    if isinstance(prompt, list) and isinstance(completion, list):
        return prompt, completion
    name = nested[0]
    kind = "a list" if isinstance(given[name], list) else "an object"
    raise InvalidTask(
        f"{origin}: {name} is {kind}: {str(given[name])[:60]!r}; expected {PROMPT} and {COMPLETION} as text, or both "
        f"as lists of messages; a template (data.{name}) picks a key of it"
    )


def _templates(data: Data) -> dict[str, str]:
    return {PROMPT: data.prompt, COMPLETION: data.completion}


def _single_value(template: str, fields: Mapping[str, Any]) -> Any:
    """The value of the key in `fields` that `template` writes, if it writes one key and nothing else; else None."""
    found = SINGLE_KEY.fullmatch(template.strip())
    return None if found is None else fields.get(found[1])


def _rows(data: Data) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows of the training data, each after a text that names its source in error messages.

    A row is a mapping from keys to values.
    """
    return _lines(data) if data.file is not None else _dataset_rows(data)


def _lines(data: Data) -> Iterator[tuple[str, Mapping[str, Any]]]:
    assert data.file is not None
    try:
        with local_file(data.file).open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    origin = f"{data.file}, line {number}"
                    yield origin, parse_line(line, where=origin)
    except OSError as error:
        raise InvalidTask(f"{data.file}: cannot be read ({error.strerror})") from error


def _dataset_rows(data: Data) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    name = f", configuration {data.configuration!r}" if data.configuration is not None else ""
    try:
        rows = datasets.load_dataset(data.dataset, data.configuration, split=data.split)
    except Exception as error:  # a data set can raise any class
        raise InvalidTask(f"dataset {data.dataset!r}{name}, split {data.split!r}: cannot be loaded: {error}") from error
    for number, row in enumerate(rows):
        yield f"dataset {data.dataset!r}, row {number}", row


def _completion(prompt: str, completion: str, eos: int, prompts: Prompts, origin: str) -> Document:
    """Make a document from a prompt, its completion and an end-of-text token (id `eos`).

    The training loss includes the completion and the end-of-text token, but not the prompt. The two texts are tokenized
    together, unless this would change the prompt's tokens. `prompts` has the tokenizer. `origin` names the source of
    the texts in messages. Raises InvalidTask for an empty completion.
    """
    if not completion:
        raise InvalidTask(f"{origin}: the completion is empty")
    context, whole = prompts.encode(prompt), prompts.encode(prompt + completion)
    if whole[: len(context)] != context or len(whole) == len(context):
        whole = [*context, *prompts.encode(completion, special_tokens=False)]
    if whole[-1] != eos:
        whole = [*whole, eos]
    return Document(tuple(whole), (False,) * len(context) + (True,) * (len(whole) - len(context)), origin)


def _chat(
    messages: Any, prompts: Prompts, origin: str, *, name: str = MESSAGES, first: int = 0, has_bos: bool
) -> Document:
    """Make a document from a conversation with the tokenizer's chat template.

    `messages` should be a list of objects with role and content. The training loss includes the assistant's messages
    from message number `first` (counted from 0) on, and the tokens that end their turns. `prompts` has the tokenizer.
    With `has_bos`, the document begins with BOS if the prompts of evaluation tasks do. In error messages, `origin`
    names the row, and `name` names the keys of the row that have the conversation. Raises InvalidTask if the
    conversation is malformed, has no message of the assistant, or cannot be rendered turn by turn, or if the template
    writes a message's content as a Python expression.
    """
    if not isinstance(messages, list) or not all(
        isinstance(each, Mapping) and {"role", "content"} <= each.keys() for each in messages
    ):
        raise InvalidTask(f"{origin}: {name} is not a list of objects with role and content")
    turns = [index for index, each in enumerate(messages) if each["role"] == "assistant" and index >= first]
    if not turns:
        raise InvalidTask(f"{origin}: no message of the assistant to learn from")
    if not prompts.tokenizer.chat_template:
        raise InvalidTask(f"{origin}: the tokenizer of {prompts.directory} has no chat template for {name}")

    def rendered(count: int, *, asks: bool) -> str:
        return str(prompts.tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=asks))

    if (written := _written_as_python(messages, prompts)) is not None:
        raise InvalidTask(
            f"{origin}: the chat template of {prompts.directory} writes the content {written[:60]!r} of a message "
            f"in {name} as a Python expression; expected content as text"
        )
    bos = _added_bos(rendered(turns[0] + 1, asks=False), prompts) if has_bos else []
    text, tokens = "", bos
    has_loss = [False] * len(bos)
    for index in turns:
        for longer, counts in ((rendered(index, asks=True), False), (rendered(index + 1, asks=False), True)):
            extended = _extended(longer, tokens=tokens, text=text, bos=bos, prompts=prompts)
            if extended is None:
                raise InvalidTask(
                    f"{origin}: the chat template of {prompts.directory} renders earlier messages differently when "
                    "later ones follow, so the loss cannot be placed"
                )
            has_loss += [counts] * (len(extended) - len(tokens))
            text, tokens = longer, extended
    return Document(tuple(tokens), tuple(has_loss), origin)


def _written_as_python(messages: Sequence[Mapping[str, Any]], prompts: Prompts) -> str | None:
    """The first content in `messages` that the chat template writes as a Python expression, such as a list of parts.

    Contents that are no text (lists, objects, null and truth values) are compared with an empty text in their place.
    Returns the expression, or None if there is none.
    """

    def rendered(contents: Sequence[Any]) -> str:
        changed = [{**each, "content": content} for each, content in zip(messages, contents, strict=True)]
        return str(prompts.tokenizer.apply_chat_template(changed, tokenize=False))

    contents = [each["content"] for each in messages]
    odd = [each for each in contents if each is None or isinstance(each, list | Mapping | bool)]
    if not odd:
        return None
    text = rendered(contents)
    plain = rendered(["" if any(each is one for one in odd) else each for each in contents])
    return next((str(each) for each in odd if text.count(str(each)) > plain.count(str(each))), None)


def _added_bos(text: str, prompts: Prompts) -> list[int]:
    """BOS as a list, if the tokenizer adds BOS to `text` as the text of a prompt; else an empty list.

    A text that begins with BOS itself, as chat templates write it, gets no other.
    """
    bos = prompts.tokenizer.bos_token_id
    is_added = prompts.encode(text)[:1] == [bos] != prompts.encode(text, special_tokens=False)[:1]
    return [bos] if is_added else []


def _extended(longer: str, *, tokens: list[int], text: str, bos: list[int], prompts: Prompts) -> list[int] | None:
    """Tokenize the text `longer` so that its first tokens are `tokens`, the tokens of `bos` and the text `text`.

    Where the tokens of the two texts differ although `longer` begins with `text`, for example because a token of
    `longer` crosses the end of `text`, the rest of `longer` is tokenized separately. Returns None if `longer` does not
    begin with `text`.
    """
    whole = [*bos, *prompts.encode(longer, special_tokens=False)]
    if whole[: len(tokens)] == tokens:
        return whole
    if not longer.startswith(text):
        return None
    return [*tokens, *prompts.encode(longer[len(text) :], special_tokens=False)]
