"""Checks that a result belongs to the requested recipe, weights, source models and prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from service.store import EvidenceRecord
from service.tune.evaluation import Evaluation
from workers.errors import EvidenceMismatch
from workers.types import ScoreResult

__all__ = ["ProvenanceCheck"]


class ProvenanceCheck:
    """The check that a result's hashes of weights and prompts agree with the request and with earlier results.

    These hashes are the evidence of the result. `bank_fingerprint` is the fingerprint of the study's source models.
    `stored` is the evidence that earlier drivers have stored. Results of one recipe must have the same checksum of
    weights, and results on the same samples must have the same hash of prompts.

    Earlier versions could score two ranges of one objective together: the hash was that of the second range, and its
    key named all positions from the first range to the second. The hashes of such evidence are ignored.
    """

    def __init__(self, bank_fingerprint: str, stored: Iterable[EvidenceRecord]) -> None:
        self._bank_fingerprint = bank_fingerprint
        self._checksums: dict[str, str] = {}
        self._prompts: dict[str, str] = {}
        for row in stored:
            self._checksums[row.recipe_digest] = row.weights_checksum
            if _names_all_samples(row):
                self._prompts.update(row.prompts)

    def check(self, evaluation: Evaluation, result: ScoreResult) -> ScoreResult:
        """Check that the result of `evaluation` comes from the requested merge and prompts, and return it.

        An engine reports one hash of prompts for each objective. In the returned result, the key of a hash also names
        the kind of data and the positions of the samples: "search math[0:512]".

        Raises EvidenceMismatch if the result's hashes (its evidence) differ from the request or from earlier results:
        the digest of the recipe, the fingerprint of the source models, the checksum of the weights, or the hash of the
        prompts.
        """
        evidence, digest = result.evidence, evaluation.recipe.digest
        where = f"trial {evaluation.trial}, replica {evidence.replica}"
        if evidence.recipe_digest != digest:
            raise EvidenceMismatch(f"{where}: the engine held recipe {evidence.recipe_digest}, not {digest}")
        if evidence.bank_fingerprint != self._bank_fingerprint:
            raise EvidenceMismatch(
                f"{where}: its bank holds sources {evidence.bank_fingerprint}, the study's are "
                f"{self._bank_fingerprint}: a model directory has changed"
            )
        known = self._checksums.setdefault(digest, evidence.weights_checksum)
        if known != evidence.weights_checksum:
            raise EvidenceMismatch(
                f"{where}: recipe {digest} was scored with weights of checksum {known} before, now "
                f"{evidence.weights_checksum}"
            )
        prompts = {}
        for objective, at in result.values.items():
            key = f"{evaluation.split} {objective}[{min(at)}:{max(at) + 1}]"
            prompts[key] = evidence.prompts[objective]
            if self._prompts.setdefault(key, prompts[key]) != prompts[key]:
                raise EvidenceMismatch(
                    f"{where}: the prompts of {key} have hash {prompts[key]}, earlier {self._prompts[key]}: "
                    "task data or tokenizer have changed"
                )
        return replace(result, evidence=replace(evidence, prompts=prompts))


def _names_all_samples(row: EvidenceRecord) -> bool:
    """Whether the ranges of positions in the keys of the hashes of prompts have as many samples as the evidence."""
    ranges = (key[key.rindex("[") + 1 : -1].split(":") for key in row.prompts)
    return sum(int(stop) - int(start) for start, stop in ranges) == row.num_samples
