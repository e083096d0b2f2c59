"""Metrics of single samples, for tasks without a metric, or with a metric computed over all samples at once.

A search estimates a metric from a part of the samples. Only means over samples can be estimated in this way. Therefore
corpus metrics such as BLEU, chrF, F1 and Matthews' correlation cannot be searched. The metrics here are the per-sample
forms that papers report, with values from 0 to 1, and `length`:

- `sentence_chrf`: chrF of one sentence (Popović, 2015), by sacrebleu
- `rouge_l`: ROUGE-L, the F-measure of the longest common subsequence (Lin, 2004), by rouge-score
- `sari`: SARI (Xu et al., "Optimizing Statistical Machine Translation for Text Simplification", 2016)
- `contains`: whether the answer contains a right answer, as LiveBench judges corrected typing errors
- `edit_similarity`: similarity of lines of code, as CodeXGLUE judges py150
- `length`: the number of characters of the answer, which may exceed 1
- `acc`: accuracy of a multiple choice, for tasks that list only F1 or the correlation
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from types import MappingProxyType
from typing import Any

__all__ = ["ACCURACY", "LENGTH", "METRICS", "PER_SAMPLE_FORMS", "SampleMetric", "names_for", "sari"]

# A metric's value for (prompt, right answers, answer).
SampleMetric = Callable[[str, Sequence[str], str], float]

ACCURACY = "acc"
LENGTH = "length"
MAX_NGRAM = 4  # of SARI

# lm-eval's metrics of all answers at once, and what to use instead.
PER_SAMPLE_FORMS: Mapping[str, str] = MappingProxyType(
    {
        "bleu": "sentence_chrf",
        "chrf": "sentence_chrf",
        "chrf++": "sentence_chrf",
        "ter": "sentence_chrf",
        "f1": ACCURACY,
        "mcc": ACCURACY,
        "brier_score": ACCURACY,
        "likelihood": ACCURACY,
    }
)


def names_for(output_type: str) -> tuple[str, ...]:
    """Names of the metrics of every task of type `output_type`, in addition to those that the task lists.

    `output_type` is lm-eval's name for the kind of requests, such as "generate_until".
    """
    return {"generate_until": tuple(METRICS), "multiple_choice": (ACCURACY,)}.get(output_type, ())


def _sentence_chrf(_: str, references: Sequence[str], answer: str) -> float:
    from sacrebleu import sentence_chrf

    return float(sentence_chrf(answer, list(references)).score) / 100


def _rouge_l(_: str, references: Sequence[str], answer: str) -> float:
    return float(max(_rouge_scorer().score(reference, answer)["rougeL"].fmeasure for reference in references))


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"])


def sari(source: str, references: Sequence[str], answer: str) -> float:
    """SARI of one simplified text, from 0 to 1, a metric for simplifications.

    `source` is the text before simplification, `answer` is the simplified text, and `references` are right
    simplifications. SARI is the mean of three scores over n-grams of one to four tokens: the F-measure of kept n-grams,
    the F-measure of added n-grams, and the precision of deleted n-grams. Each score is computed by comparison with the
    references. Texts are in lower case and tokenized as sacrebleu does ("13a"). A score without n-grams is 1, as in the
    metric of Hugging Face.
    """
    texts = [source, answer, *references]
    source_tokens, answer_tokens, *reference_tokens = ([*_tokenize(text.lower()).split()] for text in texts)
    scores = [
        _sari_of(
            _ngrams(source_tokens, n), _ngrams(answer_tokens, n), [_ngrams(tokens, n) for tokens in reference_tokens]
        )
        for n in range(1, MAX_NGRAM + 1)
    ]
    return sum(map(sum, scores)) / (3 * MAX_NGRAM)


def _sari_of(
    source: Counter[str], answer: Counter[str], references: Sequence[Counter[str]]
) -> tuple[float, float, float]:
    """The three scores of SARI for n-grams of one length: (kept, deleted, added).

    The arguments are the counts of n-grams in each text. Counts of the source and of the answer are multiplied by the
    number of references, and compared with the sum of the references' counts. For example, keeping an n-gram that half
    of the references keep is half right.
    """
    total = sum(references, Counter[str]())
    source_total = Counter({gram: count * len(references) for gram, count in source.items()})
    answer_total = Counter({gram: count * len(references) for gram, count in answer.items()})

    kept, keepable = source_total & answer_total, source_total & total
    rightly_kept = kept & total
    keep = _f_measure(_share(rightly_kept, kept), _ratio(rightly_kept.total(), keepable.total()))

    deleted = source_total - answer_total
    delete = _share(deleted - total, deleted)

    added, addable = answer.keys() - source.keys(), total.keys() - source.keys()
    rightly_added = len(added & total.keys())
    add = _f_measure(_ratio(rightly_added, len(added)), _ratio(rightly_added, len(addable)))
    return keep, delete, add


def _share(right: Counter[str], made: Counter[str]) -> float:
    """Precision of the n-grams that a text has kept or deleted, from 0 to 1, as SARI defines it.

    `made` has the number of times that each n-gram was kept (or deleted), and `right` has the part of this number that
    agrees with the references. The result is the mean of right / made over the distinct n-grams, and 1 if there are
    none.
    """
    return _ratio(sum(right[gram] / count for gram, count in made.items()), len(made))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1.0


def _f_measure(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _ngrams(tokens: Sequence[str], n: int) -> Counter[str]:
    return Counter(" ".join(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def _tokenize(text: str) -> str:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    return str(Tokenizer13a()(text))


def _contains(_: str, references: Sequence[str], answer: str) -> float:
    return float(any(reference in answer for reference in references))


def _edit_similarity(_: str, references: Sequence[str], answer: str) -> float:
    """The similarity, from 0 to 1, of the line of code `answer` and the most similar of the `references`.

    The metric is that of CodeXGLUE for the data set py150: the similarity by the class `difflib.SequenceMatcher`,
    rounded to 0.01, after the data set's placeholders for literals are replaced.
    """
    text = _without_marks(answer)
    return max(round(100 * SequenceMatcher(None, text, _without_marks(each)).ratio()) for each in references) / 100


def _length(_: str, __: Sequence[str], answer: str) -> float:
    return float(len(answer.strip()))


def _without_marks(code: str) -> str:
    code = code.replace("<NUM_LIT>", "0").replace("<STR_LIT>", "").replace("<CHAR_LIT>", "")
    return re.sub(r"<(?:STR|NUM|CHAR)_LIT:(.*?)>", r"\1", code, flags=re.DOTALL)


METRICS: Mapping[str, SampleMetric] = MappingProxyType(
    {
        "sentence_chrf": _sentence_chrf,
        "rouge_l": _rouge_l,
        "sari": sari,
        "contains": _contains,
        "edit_similarity": _edit_similarity,
        LENGTH: _length,
    }
)
