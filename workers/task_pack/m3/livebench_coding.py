"""Judgement of LiveBench's coding category: a solution is right if it passes all public and private test cases.

LiveBench's tasks "LCB_generation" and "coding_completion" are judged in this way. The functions run in the confined
process of the task; solutions run in the sandbox, each test case in a process of its own.
"""

from __future__ import annotations

import base64
import json
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["passes"]

TEST_S = 6  # seconds of processor time; LiveBench has 6 s of elapsed time
PROGRAM = Path(__file__).with_name("livebench_program.py")

# The only opcodes of a pickled text: the opcodes of the text itself, and those around it.
TEXTS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
FRAMES = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def passes(document: Mapping[str, Any], responses: Sequence[str]) -> dict[str, float]:
    """Execute the program in a model's answer to one document; return {"pass_at_1": 1.0} if it passes all tests.

    `responses` has the answer as its only entry. The value is 0.0 if a test fails. The document has public and private
    tests; the private ones run only if the program passes the public ones. Raises ValueError for a document without
    test cases that can be read.
    """
    import evaluate  # type: ignore[import-untyped]

    name = json.loads(document["original_json"]["metadata"]).get("func_name")
    solution = _solution(document, responses[0])
    code_eval = evaluate.load("code_eval")
    parts = [json.loads(document["public_test_cases"]), _private(document["private_test_cases"])]
    if not any(parts):
        raise ValueError("the document has no test cases")
    for cases in filter(None, parts):
        programs = [[_program(solution, name, case["input"], case["output"])] for case in cases]
        found, _ = code_eval.compute(predictions=programs, references=[""] * len(programs), k=[1], timeout=TEST_S)
        if found["pass@1"] < 1:
            return {"pass_at_1": 0.0}
    return {"pass_at_1": 1.0}


def _program(solution: str, name: str | None, given: str, wanted: str) -> str:
    arguments = (solution, given, wanted) if name is None else (solution, name, given, wanted)
    call = "check_output" if name is None else "check_call"
    return f"{PROGRAM.read_text()}\n{call}({', '.join(map(ascii, arguments))})"


def _solution(document: Mapping[str, Any], completion: str) -> str:
    """The complete program of a model that continued the partial program in a document.

    If the code in `completion` begins with the partial program, the result is this code. Otherwise it is the partial
    program followed by this code.
    """
    code = _code(re.sub(r"<think>.*?</think>", "", completion, flags=re.DOTALL))
    given = document["partial_solution"] or ""
    return code if code.startswith(given) else f"{given}\n{code}"


def _code(completion: str) -> str:
    """The code in a completion: the content of its last fenced block (```), else the whole completion."""
    lines = completion.rstrip().split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    if len(fences) > 1:
        return "\n".join(lines[fences[-2] + 1 : fences[-1]])
    if len(completion) > 1 and completion[0] == completion[-1] == "`":
        return completion[1:-1]
    return "\n".join(lines[:-1] if fences == [len(lines) - 1] else lines)


def _private(text: str) -> list[dict[str, str]]:
    """Decode a document's private test cases, which are stored as `text`.

    The text is JSON, or base 64 of zlib data of a pickled text that is JSON.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = json.loads(_pickled_text(zlib.decompress(base64.b64decode(text))))
    assert isinstance(found, list)
    return found


def _pickled_text(data: bytes) -> str:
    """The text in the pickle `data`, which must have one text and nothing else. The pickle is read, never executed.

    Raises ValueError for any other pickle.
    """
    texts = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in TEXTS:
            texts.append(str(argument))
        elif opcode.name not in FRAMES:
            raise ValueError(f"private_test_cases: a pickle with the operation {opcode.name}; only a text is read")
    if len(texts) != 1:
        raise ValueError(f"private_test_cases: a pickle with {len(texts)} texts; one is read")
    return texts[0]
