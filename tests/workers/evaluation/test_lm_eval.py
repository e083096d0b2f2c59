import json
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_llama, tiny_qwen2
from tests.conftest import write_choices
from workers.engines.transformers.backend import Reference
from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.built_tasks import BuiltTask
from workers.evaluation.lm_eval import BackendLM, TaskEvaluator, describe
from workers.evaluation.prompts import Completion, Continuation, Generation, Prompts
from workers.evaluation.sample_texts import sample_texts
from workers.evaluation.tasks import build_task
from workers.models.tokenizers import load_tokenizer
from workers.types import Span, TaskSpec

OPTIONS = EngineOptions(max_model_len=128)


class Recorder:
    """A backend that answers every request with the request's length, and records requests batch by batch."""

    def __init__(self) -> None:
        self.batches: list[Sequence[Generation | Continuation]] = []

    def generate(
        self, requests: Sequence[Generation], *, finished: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        self.batches.append(requests)
        completions = [Completion(str(len(request.tokens)), (len(request.tokens), 2)) for request in requests]
        for index in reversed(range(len(requests))):  # a short one overtakes a long one
            if finished is not None:
                finished(index, completions[index])
        return completions

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        self.batches.append(requests)
        return [(-float(len(request.tokens)), False) for request in requests]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("llama"), 3))


def one(file: Path, prompt: str, **task: object) -> TaskSpec:
    file.write_text(json.dumps({"prompt": prompt, "answer": "x"}) + "\n")
    return TaskSpec({"file": str(file), **task}, "exact_match")


def test_prompt_begins_with_one_bos_whatever_writes_it(llama: str, tmp_path: Path) -> None:
    def tokens(text: str, **options: object) -> list[int]:
        return Prompts(llama, OPTIONS.model_copy(update=options)).encode(text)

    plain = tokens("ab", add_bos_token=False)
    bos = Prompts(llama, OPTIONS).tokenizer.bos_token_id
    assert tokens("ab") == [bos, *plain]
    assert tokens("<s>ab") == [bos, *plain]
    assert tokens("ab", add_bos_token=True) == [bos, *plain]
    assert tokens("<s>ab", add_bos_token=True) == [bos, *plain]
    assert tokens("<s>ab", add_bos_token=False) == [bos, *plain]

    qwen = str(tiny_qwen2(tmp_path / "qwen"))
    assert Prompts(qwen, OPTIONS).encode("ab") == load_tokenizer(qwen)("ab", add_special_tokens=False)["input_ids"]


def test_tokenizer_is_read_as_its_file_says(tmp_path: Path) -> None:
    """A tokenizer that transformers reads differently is read as its file says."""
    from tests.builders import character_tokenizer

    directory = tiny_qwen2(tmp_path / "qwen")
    for file in (*directory.glob("tokenizer*"), *directory.glob("vocab*"), *directory.glob("merges*")):
        file.unlink()
    character_tokenizer().save_pretrained(directory)
    text = "a b\n1 2"
    prompts = Prompts(str(directory), OPTIONS)
    assert prompts.decode([], prompts.encode(text, special_tokens=False)) == text
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModel, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(directory))


def test_chat_template_adds_no_second_bos(tmp_path: Path) -> None:
    """Chat template and system prompt are applied and add no second BOS."""
    from transformers import AutoTokenizer

    directory = str(tiny_llama(tmp_path / "chat"))
    options = OPTIONS.model_copy(update={"chat_template": True, "system_prompt": "Be brief."})
    with pytest.raises(InvalidTask, match="has no chat template"):
        TaskEvaluator(None, Prompts(directory, options))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = (
        "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    evaluation = TaskEvaluator(None, Prompts(directory, options))
    spec = one(tmp_path / "a.jsonl", "1+1=")
    (request,) = evaluation.requests(spec, 0)
    text = "<s>[system]Be brief.[user]1+1=[assistant]"
    assert tokenizer.decode(request.tokens) == text
    assert [prompt for prompt, _ in evaluation.sample_texts(spec, 0, 5)] == [text]


def test_texts_of_scored_tasks_are_at_hand(llama: str, sums: TaskSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and answers of a task that was scored are read without building the task again."""
    evaluation = TaskEvaluator(Recorder(), Prompts(llama, OPTIONS))
    evaluation.score([Span("a", sums, 0, 4)])
    expected = sample_texts(sums, 2, 6)
    monkeypatch.setattr("workers.evaluation.lm_eval.build_task", lambda spec: pytest.fail("the task was built again"))
    assert evaluation.sample_texts(sums, 2, 6) == expected
    assert len(expected) == 4


def test_truncated_prompts_keep_their_end_and_are_counted(llama: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [{"prompt": "ab" * 100 + "=", "answer": "x"}, {"prompt": "short=", "answer": "x"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    spec = TaskSpec({"file": str(file), "max_tokens": 28}, "exact_match")
    assert describe([spec], directory=llama, options=OPTIONS)[0].num_truncated == 1
    evaluation = TaskEvaluator(Recorder(), Prompts(llama, OPTIONS))
    samples = {sample.document: sample for sample in evaluation.score([Span("x", spec, 0, 2)]).samples}
    assert (samples["0"].is_truncated, samples["0"].response) == (True, "100")
    assert (samples["1"].is_truncated, samples["1"].response) == (False, "7")


def test_completion_that_leaves_no_room_for_a_prompt_is_refused(llama: str, tmp_path: Path) -> None:
    spec = one(tmp_path / "a.jsonl", "1+1=", max_tokens=128)
    with pytest.raises(
        InvalidTask, match="128 new tokens leave no room for a prompt in the 128 tokens that are read; lower"
    ):
        TaskEvaluator(None, Prompts(llama, OPTIONS)).describe(spec)


def test_spans_are_one_batch(llama: str, sums: TaskSpec, choices: TaskSpec) -> None:
    """Spans are one batch, and their prompts are hashed in order."""
    recorder = Recorder()
    evaluation = TaskEvaluator(recorder, Prompts(llama, OPTIONS))
    scored = evaluation.score([Span("a", sums, 0, 10), Span("b", sums, 10, 30), Span("c", choices, 0, 4)])
    assert [len(batch) for batch in recorder.batches] == [30, 12]
    assert [sample.position for sample in scored.samples] == [*range(30), *range(4)]
    completions, options = scored.samples[:30], scored.samples[30:]
    assert [sample.tokens for sample in completions] == [((int(sample.response), 2),) for sample in completions]
    assert {sample.tokens for sample in options} == {None}
    again = TaskEvaluator(Recorder(), Prompts(llama, OPTIONS))
    assert again.score([Span("a", sums, 0, 10)]).prompts["a"] == scored.prompts["a"]
    assert len(set(scored.prompts.values())) == 3
    with pytest.raises(InvalidTask, match="objective a: samples 390-401 requested of a task with 400 samples"):
        evaluation.score([Span("a", sums, 390, 401)])


def test_recent_tasks_stay_prepared(llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most recently used tasks stay prepared, up to a limit."""
    built: list[weakref.ref[BuiltTask]] = []
    names: list[int] = []
    specs = [one(tmp_path / f"{number}.jsonl", "x" * 39, max_tokens=8) for number in range(5)]  # 40 tokens each

    def counted(spec: TaskSpec) -> BuiltTask:
        task = build_task(spec)
        names.append(specs.index(spec))
        built.append(weakref.ref(task))
        return task

    monkeypatch.setattr("workers.evaluation.lm_eval.build_task", counted)
    monkeypatch.setattr("workers.evaluation.lm_eval.MAX_KEPT_TOKENS", 100, raising=False)
    evaluation = TaskEvaluator(Recorder(), Prompts(llama, OPTIONS))

    def kept_after(*tasks: int) -> int:
        evaluation.score([Span(str(number), specs[number], 0, 1) for number in tasks])
        return sum(reference() is not None for reference in built)

    assert [kept_after(0), kept_after(1), kept_after(0), kept_after(2)] == [1, 2, 2, 2]
    assert kept_after(0) == 2
    assert names == [0, 1, 2], "task 1 was used longest ago"
    assert kept_after(1, 3, 4) == 3, "all tasks of one request stay"
    assert kept_after(4) == 2
    assert names == [0, 1, 2, 1, 3, 4]


def test_metrics_in_this_process_need_its_main_thread(llama: str, sums: TaskSpec) -> None:
    evaluation = TaskEvaluator(Recorder(), Prompts(llama, OPTIONS))
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="which only a main thread can"):
        pool.submit(evaluation.score, [Span("x", sums, 0, 1)]).result()


def test_generation_arguments(llama: str, tmp_path: Path) -> None:
    """A task's generation arguments are used, and unknown ones are refused."""

    def request(name: str, **arguments: object) -> Generation:
        file = write_choices(
            tmp_path,
            name=name,
            output_type="generate_until",
            doc_to_target="{{options[gold]}}",
            doc_to_choice=None,
            generation_kwargs=arguments,
            metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        )
        evaluation = TaskEvaluator(None, Prompts(llama, OPTIONS))
        found = evaluation.requests(TaskSpec(str(file), "exact_match"), 3)[0]
        assert isinstance(found, Generation)
        return found

    greedy = request("greedy", until=["\n", "."], max_gen_toks=9)
    assert (greedy.stop, greedy.max_tokens, greedy.temperature) == (("\n", "."), 9, 0.0)
    sampled = request("sampled", until=[], do_sample=True, temperature=0.5, top_p=0.9, max_gen_toks=9)
    assert (sampled.temperature, sampled.top_p, sampled.stop) == (0.5, 0.9, ())
    ignored = request("ignored", until=[], do_sample=False, temperature=0.5, max_gen_toks=9)
    assert ignored.temperature == 0.0
    with pytest.raises(InvalidTask, match="generation argument 'repetition_penalty' is not supported"):
        request("penalty", until=[], repetition_penalty=1.2)


@pytest.mark.parametrize("num_fewshot", [0, 2])
def test_samples_have_the_values_of_lm_evals_own_evaluator(llama: str, choices: TaskSpec, num_fewshot: int) -> None:
    from lm_eval.evaluator import evaluate

    reference = Reference(llama, OPTIONS)
    spec = replace(choices, num_fewshot=num_fewshot)
    ours = TaskEvaluator(reference, Prompts(llama, OPTIONS)).score([Span("x", spec, 0, 12)]).samples
    task = build_task(spec).subtasks[0].task
    theirs = evaluate(BackendLM(reference, Prompts(llama, OPTIONS)), {"choices": task}, bootstrap_iters=0)
    by_document = {str(sample["doc_id"]): sample for sample in theirs["samples"]["choices"]}
    assert len(by_document) == 12
    for sample in ours:
        expected = by_document[sample.document]
        assert sample.value == expected["acc"]
        options = [logprob for ((logprob, _),) in expected["resps"]]
        assert json.loads(sample.response) == pytest.approx(options, abs=1e-4)
    assert 0 < theirs["results"]["choices"]["acc,none"] < 1


def test_completions_have_the_values_of_lm_evals_own_evaluator(llama: str, tmp_path: Path) -> None:
    from lm_eval.evaluator import evaluate

    reference = Reference(llama, OPTIONS)
    prompts = [f"{i}+{i}=" for i in range(8)]
    evaluation = TaskEvaluator(reference, Prompts(llama, OPTIONS))
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": prompt, "answer": "?"}) for prompt in prompts))
    spec = TaskSpec({"file": str(file), "max_tokens": 4}, "exact_match")
    said = {s.document: s.response for s in evaluation.score([Span("x", spec, 0, 8)]).samples}
    # Every other answer is what the model says, so that both values occur.
    rows = [
        {"prompt": prompt, "answer": said[str(i)] if i % 2 else said[str(i)] + "?"} for i, prompt in enumerate(prompts)
    ]
    spec = TaskSpec({"file": str(tmp_path / "b.jsonl"), "max_tokens": 4}, "exact_match")
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ours = evaluation.score([Span("x", spec, 0, 8)]).samples
    task = build_task(spec).subtasks[0].task
    theirs = evaluate(BackendLM(reference, Prompts(llama, OPTIONS)), {"b": task}, bootstrap_iters=0)
    expected = {str(sample["doc_id"]): sample["exact_match"] for sample in theirs["samples"]["b"]}
    assert {sample.document: sample.value for sample in ours} == expected
    assert set(expected.values()) == {0.0, 1.0}
