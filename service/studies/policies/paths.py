"""Layer paths that a trained policy proposes without further training, for other preferences or other models.

A layer path is the sequence of source models' layers of which a merge consists. A policy that is conditioned on the
preference vector (weights of the objectives) proposes paths for any vector. A policy whose input describes models only
by statistics of their layers proposes paths through other models with the same number of layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.preferences import preference_vector
from search_spaces.recipe import Recipe
from search_spaces.study.file import Study
from service.errors import Conflict
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.studies.policies.stored import stored_policies
from service.studies.preflight.files import check_files
from service.studies.preflight.models import searched_models, with_revisions
from service.tune.searchers.hm3 import SEARCHER, paths_of
from service.types import JobRecord
from workers.models.family import resolve_family

__all__ = ["PolicyPath", "policy_paths"]


@dataclass(frozen=True)
class PolicyPath:
    """A layer path that a policy (a trained network) proposes, and the recipe of its merge.

    A layer path is the sequence of source models' layers of which a merge consists. Each of `steps` is the alias of a
    model and the number of one of its layers.
    """

    steps: tuple[tuple[str, int], ...]
    recipe: Recipe


def policy_paths(
    store: Store,
    record: JobRecord,
    artifacts: ArtifactStore,
    *,
    preference: Mapping[str, float],
    count: int = 1,
    experts: Mapping[str, str] | None = None,
) -> tuple[PolicyPath, ...]:
    """Propose at most `count` layer paths with the trained policy of a study, for a preference vector.

    `record` is the study's job in `store`, and `artifacts` has its policy (a trained network). A layer path is the
    sequence of source models' layers of which a merged model consists. Paths are ordered by the policy's own estimate
    of their outcome, the best first. `preference` contains the weight of each objective, keyed by name. `experts` maps
    aliases to the models that replace the study's experts; None keeps the study's experts. If the study's paths may use
    merged layers (layers that are merged from the layers of all models), the merged layers are computed with
    `preference` as the weights.

    Raises:
        InvalidPreference: The preference is not a preference vector of the study's objectives.
        Conflict: The study has no such policy, or its models have changed.
        InvalidModel: A model cannot be used.
        InvalidStudy: No search space can be built over the models.
    """
    resolved = ResolvedStudy.of(record)
    study = with_revisions(Study.model_validate(record.document), resolved)
    check_files(study, resolved.access)
    if resolved.algorithm != "hm3":
        searcher = resolved.algorithm
        raise Conflict(
            f"study {record.name!r}: its searcher is {searcher}; only hm3 trains a policy that proposes paths"
        )
    if not study.search.hm3.learns:
        raise Conflict(
            f"study {record.name!r}: learns no policy of its own (search.hm3.learns: false); give the study "
            "whose policies it begins with"
        )
    alignment = getattr(study.search_space, "alignment", "none")
    if alignment != "none":
        raise Conflict(
            f"study {record.name!r}: its paths have alignments ({alignment}), which are not learned for proposals; "
            "only policies of studies with alignment: none propose paths"
        )
    if getattr(study.search_space, "scales", None) is not None:
        raise Conflict(
            f"study {record.name!r}: its paths have scales of layers, which proposals do not have; only policies of "
            "studies without search_space.scales propose paths"
        )
    objectives = tuple(spec.name for spec in study.scored_objectives.values())
    vector = preference_vector(preference, objectives=objectives)
    models = study.models
    named = models.named if experts is None else experts
    sources = resolve_family(models.base, named, tokenizer=models.tokenizer).fetched()
    _check_models(record, study, sources.fingerprints, sources.layout.num_layers)
    space = study.search_space.build(
        searched_models(
            sources,
            sources.fingerprints,
            max_layers=study.limits.max_layers,
            preferences=(dict(zip(objectives, vector, strict=True)),),
        )
    )
    setting, checkpoints = stored_policies(store, record, study, artifacts, family=sources.family)
    try:
        found = SEARCHER.proposals(
            space.parameters,
            preference=vector,
            count=count,
            seed=study.search.seed,
            setting=setting,
            checkpoints=checkpoints,
        )
    except ValueError as error:
        raise Conflict(f"study {record.name!r}: {error}") from error
    paths = paths_of(space.parameters)
    return tuple(
        PolicyPath(
            tuple((paths.models[paths.model_of(step)], paths.layer_of(step)) for step in paths.path(configuration)),
            space.to_recipe(configuration),
        )
        for configuration in found
    )


def _check_models(record: JobRecord, study: Study, fingerprints: Mapping[str, str], num_layers: int) -> None:
    """Check that the trained policy of the study `record` can build sequences of the given models' layers.

    The models have the content fingerprints `fingerprints` and `num_layers` layers each. `study` is the study file.
    Raises Conflict if the models of the study have another number of layers. Also raises Conflict if the policy has a
    learned embedding of each model (option `search.hm3.knows_models`) and was trained for other models.
    """
    before = ResolvedStudy.of(record)
    if num_layers != before.num_layers:
        raise Conflict(
            f"study {record.name!r}: its policy knows models of {before.num_layers} layers; these have {num_layers}"
        )
    if study.search.hm3.knows_models and dict(fingerprints) != dict(before.fingerprints):
        raise Conflict(
            f"study {record.name!r}: its policy knows its own models ({', '.join(before.fingerprints)}) and no others; "
            "train one with search.hm3.knows_models: false"
        )
