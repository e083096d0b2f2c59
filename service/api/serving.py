"""Rules for creating served studies; every route that creates a served study follows them.

A served study has the team and sharing of its study. A quota of the team limits how many studies it serves, and a team
that has used up its GPU-hours serves no further studies.
"""

from __future__ import annotations

from service.api.dependencies import Services
from service.api.problems import Refusal
from service.api.protocols import Principal
from service.cluster.queue import TeamState
from service.jobs.registry import kind_of
from service.jobs.serving.request import check_number
from service.store import Store
from service.types import JobRecord, TeamLimits, TeamUsage

__all__ = ["check_move", "check_resume", "check_serving", "served_jobs", "usable_served"]


def served_jobs(store: Store, study_id: str) -> list[JobRecord]:
    """List the unfinished jobs that serve the study with the id `study_id`, oldest first."""
    found = []
    for job in store.unfinished_jobs():
        study_of = kind_of(job.kind).study_of
        if study_of is not None and study_of(job.document) == study_id:
            found.append(job)
    return found


def usable_served(services: Services, sender: Principal, study: JobRecord) -> JobRecord | None:
    """Find an unfinished job that serves a study and that `sender` may use; None if there is no such job.

    A paused job is found only if there is no other such job, and if the sender may resume it.
    """
    account = sender.account
    for job in sorted(served_jobs(services.store, study.id), key=lambda job: job.is_paused):
        if account is None or (account.may_change(job) if job.is_paused else account.may_use(job)):
            return job
    return None


def check_serving(services: Services, sender: Principal, study: JobRecord) -> None:
    """Check that one more job may serve a study, by the limits of the study's team.

    Call this function in the unit of work that stores the job (`Store.admission`).

    Raises Conflict if the team already serves the largest allowed number of studies. Raises Refusal (403) if the team
    has used up its quota of GPU-hours; users outside the team are not told the quota and its use.
    """
    limits = _check_number(services, sender, study.team)
    if study.team is None:
        return
    shortage = TeamState(limits, services.store.team_usage().get(study.team, TeamUsage())).used_up()
    if shortage is not None:
        account = sender.account
        is_insider = account is None or account.is_admin or study.team in account.roles
        text = shortage.text(study.team) if is_insider else f"quota gpu_hours of team {study.team}: it is used up"
        raise Refusal(403, f"{text}; an administrator of the server may raise it")


def check_resume(services: Services, sender: Principal, job: JobRecord) -> None:
    """Check that a served study that has ended may be resumed within its team's quota of served studies.

    Call this function in the unit of work that resumes the job (`Store.admission`). Raises Conflict if the job's team
    already serves the largest allowed number of studies.
    """
    if kind_of(job.kind).belongs_to_study and services.store.job(job.id).state.is_finished:
        _check_number(services, sender, job.team)


def check_move(services: Services, sender: Principal, study: JobRecord, team: str) -> None:
    """Check that a study may move to another team together with the jobs that serve it.

    Call this function in the unit of work that moves the study (`Store.admission`). Raises Conflict if the team would
    serve more studies than are allowed.
    """
    _check_number(services, sender, team, number=len(served_jobs(services.store, study.id)))


def _check_number(services: Services, sender: Principal, team: str | None, *, number: int = 1) -> TeamLimits:
    """Check that `team`, or the sender if `team` is None, may serve `number` more studies; return the team's limits.

    Raises Conflict if the limit does not allow this.
    """
    limits = TeamLimits() if team is None else services.accounts.team(team).limits
    check_number(services.store, team=team, limit=limits.max_served, sender=sender.account, number=number)
    return limits
