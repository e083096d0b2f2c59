"""lm-eval tasks with Python metrics over documents of tests, and backends with known answers to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from workers.evaluation.prompts import Completion, Continuation, Generation, Prompts
from workers.types import TaskSpec

__all__ = ["MATH_ANSWERS", "MATH_CODE", "MATH_DOCUMENTS", "MATH_VALUES", "KnownAnswers", "write_task"]

# Problem, solution, what the model says, and whether that is right.
MATH = (
    ("Write one half.", r"It is $\boxed{\frac{1}{2}}$.", "0.5", True),
    ("What is the root of eight?", r"That is $\boxed{2\sqrt{2}}$.", r"\sqrt{8}", True),
    ("Add x to itself.", r"We get $\boxed{2x}$.", "x+x", True),
    ("Divide six by three.", r"So $\boxed{2}$.", r"\frac{6}{3}", True),
    ("What is three squared?", r"So $\boxed{9}$.", "6", False),
    ("Expand (a + b)(a - b).", r"Therefore $\boxed{a^2-b^2}$.", "(a-b)(b+a)", True),
)
MATH_DOCUMENTS = [{"problem": problem, "solution": solution} for problem, solution, _, _ in MATH]
MATH_ANSWERS = {
    problem: f"Final Answer: The final answer is ${said}$. I hope it is correct." for problem, _, said, _ in MATH
}
MATH_VALUES = {str(index): float(is_right) for index, (_, _, _, is_right) in enumerate(MATH)}
MATH_CODE = "from lm_eval.tasks.minerva_math.utils import process_docs, process_results\n"

YAML = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {name}.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{problem}}}}"
doc_to_target: "{{{{solution}}}}"
process_docs: !function {name}_code.process_docs
process_results: !function {name}_code.process_results
generation_kwargs: {{until: ["Problem:"], do_sample: false, max_gen_toks: 64}}
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true}}
"""


def write_task(
    directory: Path, name: str, code: str, documents: Sequence[Mapping[str, str]], *, metric: str = "exact_match"
) -> TaskSpec:
    """Write a task whose `code` defines process_docs(dataset) and process_results(doc, results)."""
    (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n")
    (directory / f"{name}_code.py").write_text(code)
    (directory / f"{name}.yaml").write_text(YAML.format(name=name, metric=metric))
    return TaskSpec(str(directory / f"{name}.yaml"), metric)


class KnownAnswers:
    """A backend with an answer for each document's text; a prompt that contains the text gets that answer."""

    def __init__(self, prompts: Prompts, answers: Mapping[str, str]) -> None:
        self.prompts = prompts
        self.answers = dict(answers)

    def generate(
        self, requests: Sequence[Generation], *, finished: Callable[[int, Completion], None] | None = None
    ) -> list[Completion]:
        prompts = [self.prompts.tokenizer.decode(request.tokens) for request in requests]
        said = [next(said for text, said in self.answers.items() if text in prompt) for prompt in prompts]
        completions = [Completion(text, tuple(self.prompts.encode(text))) for text in said]
        for index, completion in enumerate(completions):
            if finished is not None:
                finished(index, completion)
        return completions

    def loglikelihoods(self, requests: Sequence[Continuation]) -> list[tuple[float, bool]]:
        raise AssertionError(f"these tasks generate; {len(requests)} options were sent to be scored")
