"""Routes of users, teams and tokens, of the sender's own account, and of the audit log."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from service.api.dependencies import MAX_ID, MAX_NUMBER, Context, Reader, Services
from service.api.permissions import Right, Rule, Sender, check_admin, declares, needs, sender_with
from service.api.presenters import audit_document, limits_document, team_document, token_document, user_document
from service.api.problems import Json, Refusal, refusals
from service.api.protocols import Principal
from service.api.requests import body_of, read_object
from service.auth.tokens import new_token
from service.errors import NotFound
from service.jobs.registry import kind_of
from service.schemas.api import (
    AuditDocument,
    DeletedDocument,
    MeDocument,
    NewTokenDocument,
    RoleName,
    ScopeName,
    TeamDocument,
    TeamsDocument,
    TeamUsageDocument,
    TokenDocument,
    TokensDocument,
    UserDocument,
    UsersDocument,
)
from service.store.accounts import NAME_PATTERN
from service.threads import Work, in_thread, in_threads_of
from service.types import Account, Role, Scope, TeamRecord, TeamUsage, TokenRecord, UserRecord

__all__ = ["router"]

router = APIRouter(tags=["accounts"])

MAX_ENTRIES = 1000
DAY_S = 86_400.0

# Senders who may manage all accounts of the server (Admin), or the accounts that their own rights allow (Manager).
Manager = Annotated[Principal, needs(Scope.ADMIN)]
Admin = Annotated[Principal, needs(Scope.ADMIN, is_for_admins=True)]

# The sender, for routes whose access rule another dependency declares.
Checked = Annotated[Principal, sender_with(Scope.ADMIN)]
Seeing = Annotated[Principal, sender_with(Scope.READ)]

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
UserName = Annotated[str, Path(description="The name of the user.", pattern=NAME_PATTERN)]
TeamName = Annotated[str, Path(description="The name of the team.", pattern=NAME_PATTERN)]
TokenId = Annotated[str, Path(description="The `id` of the token.", pattern="^[0-9a-f]{32}$")]


# Values of quotas: the largest are those of the database's columns.
Count = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Bytes = Annotated[int, Field(ge=1, le=MAX_ID)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewUser(_Body):
    name: Name
    is_admin: bool = False


class ChangedUser(_Body):
    is_admin: bool | None = None
    is_disabled: bool | None = None
    identity: Annotated[
        None, Field(description="null: the next identity that logs in as the user is the user's; its sessions end.")
    ] = None


class NewTeam(_Body):
    name: Name


class ChangedTeam(_Body):
    """Body of the request that changes a team's weight and quotas; null (None) lifts a quota."""

    weight: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    max_running: Count | None = None
    max_replicas: Count | None = None
    max_served: Count | None = None
    gpu_hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    artifact_bytes: Bytes | None = None
    export_bytes: Bytes | None = None
    requests_per_minute: Count | None = None


class Member(_Body):
    role: RoleName


class NewToken(_Body):
    name: Name
    scope: ScopeName = "submit"
    expires_in_days: Annotated[float, Field(gt=0, le=36_500, allow_inf_nan=False)] | None = None
    user: Name | None = None


# -- the sender --------------------------------------------------------------------------------------------------------


@router.get("/me", response_model=None, responses={200: {"model": MeDocument}})
def get_me(services: Context, sender: Reader) -> Response:
    """Show who sends this request: the user with its teams, and the token."""
    if sender.account is None:
        return Json(MeDocument(user=None, token=None))
    user = services.accounts.user(sender.account.user)
    token = None if sender.token is None else token_document(sender.token)
    return Json(MeDocument(user=user_document(user), token=token))


# -- users -------------------------------------------------------------------------------------------------------------


@router.get("/users", response_model=None, responses={200: {"model": UsersDocument}})
def list_users(services: Context, _: Admin) -> Response:
    """List all users. Only administrators of the server may do this."""
    return Json(UsersDocument(users=[user_document(user) for user in services.accounts.users()]))


@router.post(
    "/users",
    status_code=201,
    response_model=None,
    responses={201: {"model": UserDocument, "description": "The user was added."}, **refusals(409, 413, 415, 422)},
    openapi_extra=body_of(NewUser),
)
async def add_user(request: Request, services: Context, sender: Admin) -> Response:
    """Add a user. Only administrators of the server may do this.

    The first user is added by a command on the server's machine, and is an administrator; requests need a token from
    then on.
    """
    body = await read_object(request, NewUser)
    user = await in_thread(
        Work.WRITE, services.accounts.add_user, body.name, is_admin=body.is_admin, actor=sender.actor
    )
    services.authenticator.forget()
    return Json(user_document(user), status_code=201)


@router.patch(
    "/users/{user:segment}",
    response_model=None,
    responses={200: {"model": UserDocument}, **refusals(404, 409, 413, 415, 422)},
    openapi_extra=body_of(ChangedUser),
)
async def change_user(request: Request, user: UserName, services: Context, sender: Admin) -> Response:
    """Disable or enable a user, or change whether the user administers the server.

    The last administrator can be neither disabled nor demoted (409). If the body has `identity`, which must be null,
    the user is unbound from the present identity at the identity provider. The next identity that logs in under the
    user's name is bound to the user. A user of programs, as whom nobody can log in, stays so (409).
    """
    body = await read_object(request, ChangedUser)

    def change() -> UserRecord:
        with services.store.unit_of_work():  # a request that is refused changes nothing
            if "identity" in body.model_fields_set:
                services.accounts.unbind_identity(user, actor=sender.actor)
            return services.accounts.change_user(
                user, is_admin=body.is_admin, is_disabled=body.is_disabled, actor=sender.actor
            )

    changed = await in_thread(Work.WRITE, change)
    services.authenticator.forget()
    return Json(user_document(changed))


# -- teams -------------------------------------------------------------------------------------------------------------


@router.get("/teams", response_model=None, responses={200: {"model": TeamsDocument}})
def list_teams(services: Context, sender: Reader) -> Response:
    """List the sender's teams with all members; for administrators of the server, all teams."""
    teams = [team for team in services.accounts.teams() if _may_see(sender.account, team.name)]
    return Json(TeamsDocument(teams=[team_document(team) for team in teams]))


@router.post(
    "/teams",
    status_code=201,
    response_model=None,
    responses={201: {"model": TeamDocument, "description": "The team was added."}, **refusals(409, 413, 415, 422)},
    openapi_extra=body_of(NewTeam),
)
async def add_team(request: Request, services: Context, sender: Admin) -> Response:
    """Add a team without members. Only administrators of the server may do this."""
    body = await read_object(request, NewTeam)
    team = await in_thread(Work.WRITE, services.accounts.add_team, body.name, actor=sender.actor)
    return Json(team_document(team), status_code=201)


@router.patch(
    "/teams/{team:segment}",
    response_model=None,
    responses={200: {"model": TeamDocument}, **refusals(404, 413, 415, 422)},
    openapi_extra=body_of(ChangedTeam),
)
async def change_team(request: Request, team: TeamName, services: Context, sender: Admin) -> Response:
    """Change the weight and quotas of a team. Only administrators of the server may do this.

    A field that is left out keeps its value; null lifts a quota. Running jobs continue, unless the team has used up its
    GPU-hours.
    """
    body = await read_object(request, ChangedTeam)
    changes = {name: getattr(body, name) for name in body.model_fields_set}
    changed = await in_thread(Work.WRITE, services.accounts.set_limits, team, changes, actor=sender.actor)
    services.authenticator.forget()
    services.cluster.wake()
    return Json(team_document(changed))


@router.delete(
    "/teams/{team:segment}",
    response_model=None,
    responses={200: {"model": DeletedDocument}, **refusals(404, 409)},
)
@in_threads_of(Work.WRITE)
def remove_team(team: TeamName, services: Context, sender: Admin) -> Response:
    """Remove a team. A team that has jobs is not removed (409)."""
    services.accounts.remove_team(team, actor=sender.actor)
    services.authenticator.forget()
    return Json(DeletedDocument(deleted=team))


def _found_team(team: str, services: Services, sender: Principal) -> TeamRecord:
    """Return a team. Raises Refusal with status 404 if it does not exist or the sender may not see it."""
    try:
        record = services.accounts.team(team)
    except NotFound:
        record = None
    if record is None or not _may_see(sender.account, team):
        raise Refusal(404, f"team {team!r}: there is no such team")
    return record


def _seen(team: TeamName, services: Context, sender: Seeing) -> TeamRecord:
    """Read the team in a request's path, after checking that the sender may see this team.

    Raises Refusal with status 404 if there is no such team, or the sender may not see it.
    """
    return _found_team(team, services, sender)


Seen = Annotated[TeamRecord, declares(Rule(Scope.READ, Right.SEE), _seen)]


@router.get(
    "/teams/{team:segment}",
    response_model=None,
    responses={200: {"model": TeamDocument}, **refusals(404)},
)
def get_team(team: Seen) -> Response:
    """Show a team: its members, its weight and its quotas. Members of the team may do this."""
    return Json(team_document(team))


@router.get(
    "/teams/{team:segment}/usage",
    response_model=None,
    responses={200: {"model": TeamUsageDocument}, **refusals(404)},
)
def get_team_usage(team: Seen, services: Context) -> Response:
    """Show how much the jobs of a team use of its quotas, and its GPU-hours that count for the fair share.

    The fair share decides the order in which jobs of different teams start. Only members of the team and administrators
    of the server may read this.
    """
    queue, usage = services.cluster.queue(), services.store.team_usage().get(team.name, TeamUsage())
    jobs = [job for job in services.store.unfinished_jobs() if job.team == team.name]
    running = [job for job in jobs if job.id in queue.running]
    used: TeamUsageDocument = {
        "team": team.name,
        "limits": limits_document(team.limits),
        "running": len(running),
        "waiting": sum(job.id in queue.choice.waiting for job in jobs),
        "replicas": sum(kind_of(job.kind).demand(job).replicas for job in running),
        "served": sum(kind_of(job.kind).belongs_to_study for job in jobs),
        "gpu_hours": round(usage.month, 3),
        "recent_gpu_hours": round(usage.recent, 3),
        "artifact_bytes": services.team_bytes.artifacts(team.name),
        "export_bytes": services.team_bytes.exports(team.name),
    }
    return Json(used)


def _managed(team: TeamName, services: Context, sender: Checked) -> TeamRecord:
    """Return the team in a request's path, after checking that the sender administers this team or the server.

    Raises Refusal with status 404 if there is no such team or the sender may not see it, and Refusal with status 403 if
    the sender may see the team but not administer it.
    """
    record = _found_team(team, services, sender)
    account = sender.account
    if account is not None and not account.is_admin and account.roles.get(team) is not Role.ADMIN:
        raise Refusal(403, f"team {team!r}: only its administrators may change its members")
    return record


Managed = Annotated[TeamRecord, declares(Rule(Scope.ADMIN, Right.MANAGE), _managed)]


@router.put(
    "/teams/{team:segment}/members/{user:segment}",
    response_model=None,
    responses={200: {"model": TeamDocument}, **refusals(404, 413, 415, 422)},
    openapi_extra=body_of(Member),
)
async def set_role(request: Request, team: Managed, user: UserName, services: Context, sender: Sender) -> Response:
    """Give a user a role in a team; the user becomes a member if the user is not a member yet.

    Administrators of the team and of the server may do this.
    """
    role = Role((await read_object(request, Member)).role)
    changed = await in_thread(Work.WRITE, _set_role, services, team.name, user, role, sender)
    return Json(team_document(changed))


@router.delete(
    "/teams/{team:segment}/members/{user:segment}",
    response_model=None,
    responses={200: {"model": TeamDocument}, **refusals(404)},
)
@in_threads_of(Work.WRITE)
def remove_member(team: Managed, user: UserName, services: Context, sender: Sender) -> Response:
    """Remove a user from a team. Administrators of the team and of the server may do this."""
    return Json(team_document(_set_role(services, team.name, user, None, sender)))


def _set_role(services: Services, team: str, user: str, role: Role | None, sender: Principal) -> TeamRecord:
    changed = services.accounts.set_role(team, user, role, actor=sender.actor)
    services.authenticator.forget()
    return changed


def _may_see(account: Account | None, team: str) -> bool:
    return account is None or account.is_admin or team in account.roles


# -- tokens ------------------------------------------------------------------------------------------------------------


@router.get("/tokens", response_model=None, responses={200: {"model": TokensDocument}, **refusals(422)})
def list_tokens(
    services: Context,
    sender: Reader,
    user: Annotated[
        str | None, Query(description="Only tokens of this user; others' need an administrator.", pattern=NAME_PATTERN)
    ] = None,
) -> Response:
    """List the sender's tokens, without their secrets; for administrators of the server, the tokens of all users.

    With the parameter `user`, only the tokens of this user are listed.
    """
    account = sender.account
    own = None if account is None or account.is_admin else account.user
    if own is not None and user not in (None, own):
        check_admin(sender)
    tokens = services.accounts.tokens(user or own)
    return Json(TokensDocument(tokens=[token_document(token) for token in tokens]))


@router.post(
    "/tokens",
    status_code=201,
    response_model=None,
    responses={
        201: {"model": NewTokenDocument, "description": "The token; no later response has its secret."},
        **refusals(404, 409, 413, 415, 422),
    },
    openapi_extra=body_of(NewToken),
)
async def create_token(request: Request, services: Context, sender: Manager) -> Response:
    """Create a token for the user who sends the request or, for administrators of the server, for another user.

    The token is in the response to this request only: the server stores just a hash of it.
    """
    body = await read_object(request, NewToken)
    account = sender.account
    user = body.user or (None if account is None else account.user)
    assert user is not None, "only users send this request"
    if account is not None and user != account.user:
        check_admin(sender)
    token = new_token()
    record = await in_thread(
        Work.WRITE,
        services.accounts.add_token,
        user,
        name=body.name,
        digest=token.digest,
        prefix=token.prefix,
        scope=Scope(body.scope),
        lifetime_s=None if body.expires_in_days is None else body.expires_in_days * DAY_S,
        actor=sender.actor,
    )
    document: NewTokenDocument = {**token_document(record), "token": token.secret}
    return Json(document, status_code=201)


def _own_token(token_id: TokenId, services: Context, sender: Checked) -> TokenRecord:
    """Return the token in a request's path, after checking that the sender may revoke this token.

    Only the token's user and administrators of the server may revoke it. Raises Refusal with status 404 if the token
    does not exist, or if it belongs to another user and the sender is no administrator.
    """
    try:
        record = services.accounts.token(token_id)
    except NotFound:
        record = None
    account = sender.account
    assert account is not None, "only users send this request"
    if record is None or not (account.is_admin or account.user == record.user):
        raise Refusal(404, f"token {token_id!r}: there is no such token")
    return record


OwnToken = Annotated[TokenRecord, declares(Rule(Scope.ADMIN, Right.OWN), _own_token)]


@router.delete(
    "/tokens/{token_id:segment}", response_model=None, responses={200: {"model": TokenDocument}, **refusals(404)}
)
@in_threads_of(Work.WRITE)
def revoke_token(token: OwnToken, services: Context, sender: Sender) -> Response:
    """Revoke a token of the user who sends the request or, for administrators of the server, of another user.

    All servers that share the database refuse the token within a second.
    """
    revoked = services.accounts.revoke_token(token.id, actor=sender.actor)
    services.authenticator.forget()
    return Json(token_document(revoked))


# -- the audit log -----------------------------------------------------------------------------------------------------


@router.get("/audit", response_model=None, responses={200: {"model": AuditDocument}, **refusals(422)})
def list_audit(
    services: Context,
    _: Admin,
    after: Annotated[int, Query(description="Only entries with a larger id.", ge=0, le=MAX_ID)] = 0,
    before: Annotated[int | None, Query(description="Only entries with a smaller id.", ge=0, le=MAX_ID)] = None,
    sort: Annotated[Literal["id", "-id"], Query(description="-id: newest entries first.")] = "id",
    limit: Annotated[int, Query(description="Maximum number of entries.", ge=1, le=MAX_ENTRIES)] = MAX_ENTRIES,
    user: Annotated[str | None, Query(description="Only entries of this user.", pattern=NAME_PATTERN)] = None,
    target: Annotated[
        str | None, Query(description='Only entries about this, such as "job 5f0c...".', max_length=128)
    ] = None,
) -> Response:
    """List who changed what: the audit log, oldest entries first. Only administrators of the server may do this.

    With `sort=-id`, newest entries are first. Then the next page is requested with the smallest id so far as `before`.
    """
    entries = services.accounts.audit(
        after=after, before=before, limit=limit, user=user, target=target, newest_first=sort == "-id"
    )
    return Json(AuditDocument(entries=[audit_document(entry) for entry in entries]))
