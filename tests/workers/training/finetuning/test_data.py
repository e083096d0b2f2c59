"""Training data: tokens with a loss, rows that keep documents apart, and refused data with their lines."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama, tiny_qwen2
from workers.errors import InvalidTask
from workers.evaluation.prompts import Prompts
from workers.training.finetuning.data import IGNORED, batch_rows, pack, read_documents, tensors_of
from workers.training.finetuning.spec import Data

BOS, EOS = 1, 2
MESSAGES = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
ASKS = {"add_generation_prompt": True}
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def prompts(model_dir: Path) -> Prompts:
    return Prompts(str(model_dir), EngineOptions(max_model_len=64))


def data_of(directory: Path, *lines: Any, **options: Any) -> Data:
    file = directory / "data.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return Data(file=str(file), **options)


def test_the_loss_is_on_the_completion_and_its_end(tmp_path: Path, prompts: Prompts) -> None:
    (document,) = read_documents(data_of(tmp_path, {"prompt": "1+2=", "completion": "34"}), prompts)
    ids = {character: prompts.encode(character)[1] for character in "1+2=34"}
    assert document.tokens == (BOS, *(ids[c] for c in "1+2=34"), EOS)
    assert document.has_loss == (False,) * 5 + (True,) * 3
    batch = tensors_of([(document,)], pad=0)
    assert batch.labels.tolist() == [[IGNORED] * 4 + [ids["3"], ids["4"], EOS, IGNORED]]
    assert batch.num_targets == 3


def test_templates_take_any_keys(tmp_path: Path, prompts: Prompts) -> None:
    data = data_of(tmp_path, {"q": "ab", "a": "c"}, prompt="Q{{q}}", completion="{{a}}!")
    (document,) = read_documents(data, prompts)
    assert prompts.tokenizer.decode(document.tokens) == "<s>Qabc!</s>"


def test_in_a_chat_the_loss_is_on_what_the_assistant_says(tmp_path: Path, prompts: Prompts) -> None:
    prompts.tokenizer.chat_template = TEMPLATE
    chat = [("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", "w")]
    messages = [{"role": role, "content": content} for role, content in chat]
    (document,) = read_documents(data_of(tmp_path, {"messages": messages}), prompts)
    assert prompts.tokenizer.decode(document.tokens) == "<s>u:x\na:y\nu:z\na:w\n"
    learned = [token for token, counts in zip(document.tokens, document.has_loss, strict=True) if counts]
    assert prompts.tokenizer.decode(learned) == "y\nw\n"


@pytest.mark.parametrize("content", [[{"type": "text", "text": "x"}], {"text": "x"}, None, True])
def test_contents_written_as_python_are_refused(tmp_path: Path, prompts: Prompts, content: Any) -> None:
    """Contents that are no text are accepted only if the template writes something else than a Python expression."""
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "y"}]
    data = data_of(tmp_path, {"messages": messages})
    prompts.tokenizer.chat_template = TEMPLATE
    with pytest.raises(
        InvalidTask, match=r"line 1: the chat template of .* in messages as a Python expression"
    ) as refused:
        read_documents(data, prompts)
    assert repr(str(content)) in str(refused.value)
    prompts.tokenizer.chat_template = TEMPLATE.replace("m['content']", "m['content'] | tojson")
    (document,) = read_documents(data, prompts)
    assert any(document.has_loss)


def test_chats_begin_as_prompts_of_tasks_do(tmp_path: Path, prompts: Prompts) -> None:
    """A chat has the tokenizer's BOS once, whether its template writes it or not; earlier versions added none."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for start in ("", "<s>"):
        prompts.tokenizer.chat_template = start + TEMPLATE
        (document,) = read_documents(data_of(tmp_path, {"messages": messages}), prompts)
        asked = prompts.encode(prompts.tokenizer.apply_chat_template(messages[:1], tokenize=False, **ASKS))
        assert list(document.tokens[: len(asked)]) == asked
        assert document.tokens.count(BOS) == 1
        assert document.has_loss == (False,) * len(asked) + (True,) * 2
        (earlier,) = read_documents(data_of(tmp_path, {"messages": messages}, chat_bos=False), prompts)
        assert prompts.tokenizer.decode(earlier.tokens) == f"{start}u:x\na:y\n"


def test_only_bos_is_added_to_chats(tmp_path: Path, prompts: Prompts) -> None:
    """A chat gets no end-of-text token from a tokenizer that appends one, and no BOS from one that adds none."""
    prompts.tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    backend = prompts.tokenizer.backend_tokenizer
    for single, expected in (("<s> $A </s>", "<s>u:x\na:y\n"), ("$A", "u:x\na:y\n")):
        backend.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)])
        (document,) = read_documents(data_of(tmp_path, {"messages": messages}), prompts)
        assert prompts.tokenizer.decode(document.tokens) == expected


def test_a_token_may_cross_the_end_of_a_prompt(tmp_path: Path) -> None:
    """An answer whose first characters would be one token with the end of the prompt has tokens of its own."""
    prompts = Prompts(str(tiny_qwen2(tmp_path / "model")), EngineOptions(max_model_len=64))
    prompts.tokenizer.chat_template = TEMPLATE.replace("a:", "a: ").replace(":{{", ": {{")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "the"}]
    messages += [{"role": "user", "content": "y"}, {"role": "assistant", "content": "the"}]
    (document,) = read_documents(data_of(tmp_path, {"messages": messages}), prompts)
    assert prompts.tokenizer.decode(document.tokens) == "u: x\na: the\nu: y\na: the\n"
    learned = [token for token, counts in zip(document.tokens, document.has_loss, strict=True) if counts]
    assert prompts.tokenizer.decode(learned) == "the\nthe\n"
    asked = prompts.encode("u: x\na: ")
    assert list(document.tokens[: len(asked)]) == asked
    assert prompts.encode("u: x\na: the")[: len(asked)] != asked


def test_templates_that_change_earlier_messages_are_refused(tmp_path: Path, prompts: Prompts) -> None:
    prompts.tokenizer.chat_template = "{{ messages | length }}" + TEMPLATE
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(InvalidTask, match="renders earlier messages differently when later ones follow"):
        read_documents(data_of(tmp_path, {"messages": messages}), prompts)


def test_conversational_prompt_and_completion(tmp_path: Path, prompts: Prompts) -> None:
    """In rows whose prompt and completion are messages, the loss is on the completion, not on earlier answers."""
    prompts.tokenizer.chat_template = TEMPLATE
    prompt = [("user", "x"), ("assistant", "y"), ("user", "z")]
    row = {
        "prompt": [{"role": role, "content": content} for role, content in prompt],
        "completion": [{"role": "assistant", "content": "w"}],
    }
    (document,) = read_documents(data_of(tmp_path, row), prompts)
    assert prompts.tokenizer.decode(document.tokens) == "<s>u:x\na:y\nu:z\na:w\n"
    learned = [token for token, counts in zip(document.tokens, document.has_loss, strict=True) if counts]
    assert prompts.tokenizer.decode(learned) == "w\n"


@pytest.mark.parametrize(
    ("keys", "prompt", "completion"),
    [
        (("prompt", "completion"), "{{ prompt }}", "{{ completion }}"),
        (("question", "answer"), "{{question}}", "{{- answer -}}"),
    ],
)
def test_conversation_under_other_keys(
    tmp_path: Path, prompts: Prompts, keys: tuple[str, str], prompt: str, completion: str
) -> None:
    """Templates that write one key each stand for its messages, however they are written."""
    prompts.tokenizer.chat_template = TEMPLATE
    row = {keys[0]: [{"role": "user", "content": "x"}], keys[1]: [{"role": "assistant", "content": "w"}]}
    (document,) = read_documents(data_of(tmp_path, row, prompt=prompt, completion=completion), prompts)
    assert prompts.tokenizer.decode(document.tokens) == "<s>u:x\na:w\n"


@pytest.mark.parametrize(
    ("row", "templates", "message"),
    [
        ({"q": ["a"], "c": "b"}, {"prompt": "{{q}}", "completion": "{{c}}"}, "prompt is a list"),
        ({"q": "a", "c": {"text": "b"}}, {"prompt": "{{q}}", "completion": "{{ c }}"}, "completion is an object"),
        ({"q": ["a"], "c": "b"}, {"prompt": "Q: {{q}}", "completion": "{{c}}"}, "a value is a list; expected text"),
        ({"q": {"r": {"s": "a"}}, "c": "b"}, {"prompt": "{{q.r}}", "completion": "{{c}}"}, "a value is an object"),
        ({"q": ["a"], "c": "b"}, {"prompt": "{{q | reverse}}", "completion": "{{c}}"}, "of the type list_reverseit"),
        ({"q": {"a": 1}, "c": "b"}, {"prompt": "{{q.keys()}}", "completion": "{{c}}"}, "of the type dict_keys"),
        ({"q": {"a": 1}, "c": "b"}, {"prompt": "{{q.items}}", "completion": "{{c}}"}, "a value is a function"),
    ],
)
def test_lists_and_objects_are_not_written_as_python(
    tmp_path: Path, prompts: Prompts, row: dict[str, Any], templates: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidTask, match=message):
        read_documents(data_of(tmp_path, row, **templates), prompts)


def test_filters_make_text_of_lists(tmp_path: Path, prompts: Prompts) -> None:
    data = data_of(tmp_path, {"q": ["a", "b"], "c": {"d": 1}}, prompt="{{q | join}}", completion="{{c | tojson}}")
    (document,) = read_documents(data, prompts)
    assert prompts.tokenizer.decode(document.tokens) == '<s>ab{"d": 1}</s>'


def test_template_picks_a_key_of_an_object(tmp_path: Path, prompts: Prompts) -> None:
    """A template of its own may read lists and objects, which the default one refuses."""
    row = {"prompt": {"text": "a"}, "completion": "b"}
    (document,) = read_documents(data_of(tmp_path, row, prompt="{{prompt.text}}"), prompts)
    assert prompts.tokenizer.decode(document.tokens) == "<s>ab</s>"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no rows"),
        ([""], "holds no rows"),
        ([{"prompt": "a", "completion": "b"}, "{"], "line 2: not JSON"),
        (["[1]"], "line 1: expected a JSON object, found list"),
        ([{"prompt": "a"}], "line 1: completion template '{{completion}}': 'completion' is undefined"),
        ([{"prompt": "a", "completion": None}], "line 1: completion template '{{completion}}': a value is null"),
        ([{"prompt": "", "completion": "b"}], "line 1: the prompt is empty"),
        ([{"prompt": "a", "completion": ""}], "line 1: the completion is empty"),
        ([{"prompt": "a" * 70, "completion": "b"}], "line 1: 73 tokens; data.max_length is 64"),
        ([{"messages": "a"}], "line 1: messages is not a list of objects with role and content"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "line 1: no message of the assistant"),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], "has no chat template for messages"),
        ([{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}], "line 1: prompt is a list"),
        ([{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}], "line 1: completion is a list"),
        ([{"prompt": {"text": "a"}, "completion": "b"}], "line 1: prompt is an object: \"{'text': 'a'}\"; expected"),
        ([{"prompt": ["a"], "completion": ["b"]}], "line 1: prompt and completion is not a list of objects with role"),
    ],
)
def test_bad_data_is_refused_with_its_line(tmp_path: Path, prompts: Prompts, lines: list[Any], message: str) -> None:
    with pytest.raises(InvalidTask) as refused:
        read_documents(data_of(tmp_path, *lines, max_length=64), prompts)
    assert message in str(refused.value)
    assert str(tmp_path / "data.jsonl") in str(refused.value) or "tokenizer" in str(refused.value)


def test_missing_data_is_refused(tmp_path: Path, prompts: Prompts) -> None:
    with pytest.raises(InvalidTask, match=r"none.jsonl: cannot be read \(No such file"):
        read_documents(Data(file=str(tmp_path / "none.jsonl")), prompts)
    with pytest.raises(InvalidTask, match=r"dataset .*: cannot be loaded"):
        read_documents(Data(dataset=str(tmp_path / "none")), prompts)


def test_a_dataset_is_read(tmp_path: Path, prompts: Prompts) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    (document,) = read_documents(Data(dataset=str(tmp_path / "set")), prompts)
    assert prompts.tokenizer.decode(document.tokens) == "<s>ab</s>"


def test_configuration_of_a_dataset(tmp_path: Path, prompts: Prompts) -> None:
    """A dataset with several configurations is read with the named one, and refused without."""
    for name in ("one", "two"):
        (tmp_path / "set" / name).mkdir(parents=True)
        row = {"prompt": "a", "completion": name}
        (tmp_path / "set" / name / "train.jsonl").write_text(json.dumps(row) + "\n")
    configs = "".join(f"- {{config_name: {name}, data_files: {name}/train.jsonl}}\n" for name in ("one", "two"))
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    (document,) = read_documents(Data(dataset=str(tmp_path / "set"), configuration="two"), prompts)
    assert prompts.tokenizer.decode(document.tokens) == "<s>atwo</s>"
    with pytest.raises(InvalidTask, match=r"cannot be loaded: (?s:.)*one(?s:.)*two"):
        read_documents(Data(dataset=str(tmp_path / "set")), prompts)
    with pytest.raises(InvalidTask, match=r"configuration 'three', split 'train': cannot be loaded"):
        read_documents(Data(dataset=str(tmp_path / "set"), configuration="three"), prompts)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path, prompts: Prompts) -> None:
    prompts.tokenizer.eos_token = None
    with pytest.raises(InvalidTask, match="has no end-of-text token"):
        read_documents(data_of(tmp_path, {"prompt": "a", "completion": "b"}), prompts)


def documents(tmp_path: Path, prompts: Prompts, count: int) -> Any:
    lines = [{"prompt": f"{i}+{i}=", "completion": "x" * (1 + i % 7)} for i in range(count)]
    return read_documents(data_of(tmp_path, *lines), prompts)


def test_packing_keeps_every_document_once_and_rows_short(tmp_path: Path, prompts: Prompts) -> None:
    every = documents(tmp_path, prompts, 200)
    rows = pack(every, length=40, packing=True, seed=3)
    assert Counter(d.origin for row in rows for d in row) == Counter(d.origin for d in every)
    assert max(sum(len(d.tokens) for d in row) for row in rows) <= 40
    assert sum(len(d.tokens) for d in every) / (40 * len(rows)) > 0.9
    assert rows == pack(every, length=40, packing=True, seed=3) != pack(every, length=40, packing=True, seed=4)
    assert all(len(row) == 1 for row in pack(every, length=40, packing=False, seed=3))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(
    tmp_path: Path, prompts: Prompts, model_dir: Path, attention: str
) -> None:
    from transformers import AutoModelForCausalLM

    every = documents(tmp_path, prompts, 9)
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=attention).eval()
    rows = pack(every, length=40, packing=True, seed=0)
    assert len(rows) > 1
    batch = tensors_of(rows, pad=0)
    with torch.no_grad():
        together = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
        for i, row in enumerate(rows):
            start = 0
            for document in row:
                alone = model(input_ids=torch.tensor([document.tokens])).logits[0]
                stop = start + len(document.tokens)
                assert torch.allclose(together[i, start:stop], alone, atol=1e-5)
                start = stop


def test_batches_of_an_epoch_have_every_row_once() -> None:
    found = [number for step in range(5) for number in batch_rows(10, batch=4, step=step, seed=1)]
    assert sorted(found[:10]) == sorted(found[10:]) == list(range(10))
    assert found[:10] != found[10:]
    assert batch_rows(10, batch=4, step=3, seed=1) == found[12:16]
