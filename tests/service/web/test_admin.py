"""Users, teams, queue and audit log on the web page: the view of each user, and changes by administrators."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, Route

from service.auth.sessions import COOKIE
from service.cluster.queue import Choice, Reason, Waiting
from service.cluster.reconciler import QueueState
from service.types import JobRecord, Role, Sharing
from tests.service.api.accounts import OPERATOR, Company
from tests.service.api.harness import ApiServer, stored_study
from tests.service.api.ray_dashboard.upstream import upstream
from tests.service.api.test_cluster import node
from tests.service.web.driving import Visit, check_shown, expect, press, visit, wait_until


@pytest.fixture(scope="module")
def company(server: ApiServer) -> Company:
    return Company.on(server)


@contextmanager
def visit_as(user: str, browser: Browser, company: Company) -> Iterator[Visit]:
    """A window in which `user` is logged in."""
    cookie = {"name": COOKIE, "value": company.add_session(user), "url": company.server.url}
    with visit(browser, company.server.url) as opened:
        opened.context.add_cookies([cookie])  # type: ignore[list-item]
        yield opened


@pytest.fixture
def root(browser: Browser, company: Company) -> Iterator[Visit]:
    with visit_as("root", browser, company) as opened:
        yield opened


@pytest.fixture
def member(browser: Browser, company: Company) -> Iterator[Visit]:
    with visit_as("member", browser, company) as opened:
        yield opened


@pytest.fixture(scope="module")
def queued(company: Company) -> dict[str, JobRecord]:
    """Jobs of two teams, of which all but the first wait: one that others may not read, and one of a high priority."""
    names = ("runs", "urgent", "first", "second", "secret")
    jobs = {name: company.own(stored_study(company.server.store, name=name)) for name in names}
    jobs["secret"] = company.own(jobs["secret"], owner="stranger", team="blue", sharing=Sharing.PRIVATE)
    with company.http("root") as http:
        http.patch(
            f"/v1/studies/{jobs['urgent'].id}", json={"priority": 5}, headers={"If-Match": "*"}
        ).raise_for_status()
    waiting = [jobs[name].id for name in names[1:]]
    choice = Choice(waiting={job: Waiting(number, Reason.PLACE) for number, job in enumerate(waiting, start=1)})
    company.server.cluster.state = QueueState(1, (jobs["runs"].id,), choice, {jobs["urgent"].id: 4.0e9})
    company.server.cluster.reason = "a place"
    return jobs


def links(page: Page) -> list[str]:
    navigation = page.get_by_role("navigation", name="Main")
    expect(navigation).to_be_visible()
    return navigation.get_by_role("link").all_inner_texts()


@pytest.mark.parametrize(
    ("user", "more"),
    [("root", ["Teams", "Users", "Audit log", "Cluster"]), ("member", ["Teams"]), ("loner", [])],
)
def test_views_that_a_user_may_not_use_are_absent(
    browser: Browser, company: Company, user: str, more: list[str]
) -> None:
    """Each user's navigation has the views that the user may use; others say who may use them."""
    with visit_as(user, browser, company) as opened:
        page = opened.goto("/admin/users")
        assert links(page) == ["Studies", "Fine-tunings", "Queue", *more]
        if user != "root":
            expect(page.get_by_text("Only administrators of the server see its users.")).to_be_visible()
            opened.goto("/admin/audit")
            expect(page.get_by_text("Only administrators of the server read its audit log.")).to_be_visible()
            opened.goto("/admin/cluster")
            expect(page.get_by_text("Only administrators of the server see its cluster.")).to_be_visible()


# -- users -------------------------------------------------------------------------------------------------------------


def test_a_user_is_added_and_gets_a_token(root: Visit, company: Company) -> None:
    """An administrator adds a user, gives it a token, disables it and enables it again; each is in the audit log."""
    page = root.goto("/admin/users")
    table = page.get_by_role("region", name="Table of users")
    expect(table.get_by_role("row")).to_have_count(len(company.accounts.users()) + 1)
    page.get_by_label("Name", exact=True).fill("newcomer")
    press(page.get_by_role("button", name="Add user"))
    row = table.get_by_role("row").filter(has_text="newcomer")
    expect(row).to_contain_text("enabled")
    row.get_by_role("button", name="New token: newcomer").click()
    page.get_by_label("Name of the new token").fill("first")
    page.get_by_role("button", name="Create token").click()
    expect(page.get_by_label("Token first of newcomer, which is shown once")).to_be_visible()
    assert [token.name for token in company.accounts.tokens("newcomer")] == ["first"]
    press(row.get_by_role("button", name="Disable: newcomer"))
    expect(row).to_contain_text("disabled")
    expect(row.get_by_role("button", name="Enable: newcomer")).to_be_focused()
    page.keyboard.press("Enter")
    expect(row).to_contain_text("enabled")
    expect(row.get_by_role("button", name="Disable: newcomer")).to_be_focused()
    actions = [(entry.action, entry.user) for entry in company.accounts.audit(target="user newcomer")]
    assert actions == [("user.add", "root"), ("user.change", "root"), ("user.change", "root")]


def test_the_last_administrator_stays(root: Visit, company: Company) -> None:
    """The server refuses to disable or demote the last administrator, and the page shows its words."""
    root.expected = ("409",)
    for verb, body in (("Disable", {"is_disabled": True}), ("Demote", {"is_admin": False})):
        page = root.goto("/admin/users")  # anew, without the words of an earlier refusal
        with page.expect_response("**/v1/users/root") as answered:
            page.get_by_role("button", name=f"{verb}: root").click()
        assert answered.value.request.post_data_json == body
        assert answered.value.status == 409
        expect(page.get_by_role("alert")).to_contain_text(answered.value.json()["detail"])
        assert "user 'root': is the last administrator" in answered.value.json()["detail"]
    user = company.accounts.user("root")
    assert (user.is_admin, user.is_disabled) == (True, False)


# -- teams -------------------------------------------------------------------------------------------------------------


def test_a_team_shows_its_members_and_quotas(member: Visit, company: Company) -> None:
    """A member sees the own team only: its members, its weight, and what is used of its quotas; nothing to change."""
    company.accounts.set_limits("red", {"weight": 2.5, "gpu_hours": 100.0, "artifact_bytes": 10**10}, actor=OPERATOR)
    with company.http("member") as http:
        usage = http.get("/v1/teams/red/usage").json()
        team = http.get("/v1/teams/red").json()
    page = member.goto("/teams")
    red = page.get_by_role("region", name="Team red")
    expect(red).to_contain_text(f"Weight {usage['limits']['weight']}")
    quotas = red.get_by_role("region", name="Quotas of red")
    expect(quotas.get_by_role("row").filter(has_text="GPU-hours this month")).to_contain_text("100")
    expect(quotas.get_by_role("row").filter(has_text="artifacts")).to_contain_text("10.0 GB")
    expect(quotas.get_by_role("progressbar")).to_have_count(2)
    for user, role in team["members"].items():
        expect(red.get_by_role("row").filter(has=page.get_by_role("rowheader", name=user))).to_contain_text(role)
    expect(page.get_by_role("region", name="Team blue")).to_have_count(0)
    expect(red.get_by_role("button")).to_have_count(0)
    expect(red.get_by_role("combobox")).to_have_count(0)


def test_long_names_of_members_fit(root: Visit, company: Company) -> None:
    """In a narrow window the table of members scrolls by itself, and the page does not."""
    name = "an.engineer.with.a.very.long.name.that.has.no.place.to.break"
    company.accounts.add_user(name, is_admin=False, actor=OPERATOR)
    company.accounts.set_role("blue", name, Role.VIEWER, actor=OPERATOR)
    page = root.goto("/teams")
    members = page.get_by_role("region", name="Members of blue")
    expect(members.get_by_role("rowheader", name=name)).to_be_visible()
    page.set_viewport_size({"width": 320, "height": 800})
    wait_until(page, "document.documentElement.scrollWidth <= window.innerWidth")
    assert members.evaluate("element => element.scrollWidth > element.clientWidth")
    company.accounts.set_role("blue", name, None, actor=OPERATOR)


def test_administrators_change_a_team(root: Visit, company: Company) -> None:
    """An administrator adds a team and a member, changes the role and the quotas, lifts one, and removes the team."""
    page = root.goto("/teams")
    page.get_by_label("Name", exact=True).fill("green")
    page.get_by_role("button", name="Add team").click()
    green = page.get_by_role("region", name="Team green")
    member = green.get_by_label("New member of green", exact=True)
    root.expected = ("404",)
    member.fill("lonr")
    green.get_by_role("button", name="Add member").click()
    expect(green.get_by_role("alert")).to_contain_text("lonr")
    expect(member).to_have_value("lonr")  # to be corrected
    member.fill("loner")
    green.get_by_role("button", name="Add member").click()
    expect(member).to_have_value("")
    green.get_by_label("Role of loner in green").select_option("admin")
    expect(green.get_by_label("Role of loner in green")).to_have_value("admin")
    for text in ("3", ""):
        green.get_by_role("button", name="Change quotas of green").click()
        green.get_by_role("spinbutton", name="running jobs").fill(text)
        green.get_by_role("button", name="Save").click()
        row = green.get_by_role("row").filter(has_text="running jobs")
        expect(row.get_by_role("cell").nth(1)).to_have_text(text or "none")
        assert company.accounts.team("green").limits.max_running == (3 if text else None)
    green.get_by_role("button", name="Remove loner from green").click()
    expect(green.get_by_text("The team has no members.")).to_be_visible()
    green.get_by_role("button", name="Remove team green").click()
    remove = page.get_by_role("dialog").get_by_role("button", name="Remove")
    expect(remove).to_be_disabled()
    page.get_by_role("dialog").get_by_role("textbox").fill("green")
    remove.click()
    expect(green).to_have_count(0)
    assert [team.name for team in company.accounts.teams()] == ["blue", "red"]


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_the_queue_says_what_jobs_wait_for(member: Visit, company: Company, queued: dict[str, JobRecord]) -> None:
    """Every job that the user may read has its place, reason and start; others are positions, and nothing moves."""
    with company.http("member") as http:
        told = http.get("/v1/queue").json()
    page = member.goto("/queue")
    expect(page.get_by_text(f"1 of {told['places']} places")).to_be_visible()
    rows = page.get_by_role("region", name="Waiting jobs").get_by_role("row")
    expect(rows).to_have_count(len(told["waiting"]) + 1)
    for row, entry in zip(rows.all()[1:], told["waiting"], strict=True):
        expect(row.get_by_role("cell").first).to_have_text(str(entry["position"]))
        name = "a job that you may not read" if entry["job"] is None else entry["job"]["name"]
        expect(row.get_by_role("rowheader")).to_have_text(name)
        expect(row).to_contain_text(entry["waiting_for"] or "")
    expect(page.get_by_role("row").filter(has_text="urgent")).to_contain_text("2096")
    expect(page.get_by_role("button", name="Earlier")).to_have_count(0)
    expect(page.get_by_role("link", name="Ray’s dashboard")).to_have_count(0)


def test_administrators_move_jobs_by_keyboard(root: Visit, company: Company, queued: dict[str, JobRecord]) -> None:
    """Buttons move a job among those of its priority; the page says it, and the audit log has it."""
    page = root.goto("/queue")
    expect(page.get_by_role("link", name="Ray’s dashboard")).to_have_attribute("href", "/ray/")
    table = page.get_by_role("region", name="Waiting jobs")
    expect(table.get_by_role("row").filter(has_text="urgent").get_by_role("button")).to_have_count(0)
    earlier = table.get_by_role("button", name="Earlier: second")
    earlier.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("second is before first.")).to_be_visible()
    expect(earlier).to_be_focused()
    moved = company.accounts.audit(target=f"job {queued['second'].id}")[-1]
    assert (moved.action, moved.user, moved.after) == ("job.move", "root", {"before": queued["first"].id})
    press(table.get_by_role("button", name="First: secret"))
    expect(page.get_by_text("secret is the first of its priority.")).to_be_visible()
    assert company.accounts.audit(target=f"job {queued['secret'].id}")[-1].after == {"before": ""}


def test_a_moved_job_keeps_the_focus(root: Visit, queued: dict[str, JobRecord]) -> None:
    """A job that is moved to the front keeps the focus among its buttons, and the page is not scrolled."""
    page = root.page
    is_moved = False

    def answer(route: Route) -> None:
        nonlocal is_moved
        is_moved = is_moved or route.request.method == "POST"
        told = route.fetch(method="GET", url=f"{root.url}/v1/queue").json()
        if is_moved:
            urgent, *peers, secret = told["waiting"]
            told["waiting"] = [urgent, secret, *peers]
        route.fulfill(json=told)

    page.route(re.compile("/v1/queue(:move)?$"), answer)
    root.goto("/queue")
    table = page.get_by_role("region", name="Waiting jobs")
    press(table.get_by_role("button", name="First: secret"))
    expect(page.get_by_text("secret is the first of its priority.")).to_be_visible()
    expect(table.get_by_role("row").nth(2)).to_contain_text("secret")
    expect(table.get_by_role("button", name="First: secret")).to_have_count(0)
    expect(table.get_by_role("button", name="Later: secret")).to_be_focused()


# -- the audit log -----------------------------------------------------------------------------------------------------


def test_the_audit_log_is_filtered_and_paged(root: Visit, company: Company) -> None:
    """The newest entries are first, with what they changed; filters and pages are in the address."""
    for weight in range(1, 61):
        company.accounts.set_limits("blue", {"weight": float(weight)}, actor=OPERATOR)
    company.accounts.set_limits("blue", {"weight": 7.0, "max_running": 2}, actor=OPERATOR)
    page = root.goto("/admin/audit")
    table = page.get_by_role("region", name="Entries of the audit log")
    target = page.get_by_role("textbox", name="Target")
    target.fill("team blue")
    first = table.get_by_role("row").nth(1)
    expect(first.get_by_role("listitem")).to_have_text(["limits.weight: 60 7", "limits.max_running: 2"])
    expect(page).to_have_url(re.compile(r"[?]target=team[+]blue$"))
    expect(target).to_be_focused()
    entries = company.accounts.audit(target="team blue", newest_first=True)
    expect(table.get_by_role("row")).to_have_count(51)
    page.get_by_role("link", name="Older entries").click()
    expect(table.get_by_role("row")).to_have_count(len(entries) - 50 + 1)
    expect(page).to_have_url(re.compile(f"before={entries[49].id}$"))
    page.get_by_role("link", name="Newest entries").click()
    expect(table.get_by_role("row")).to_have_count(51)
    page.get_by_role("textbox", name="User").fill("nobody")
    expect(page.get_by_text("No entry matches.")).to_be_visible()
    page.get_by_role("link", name="All entries").click()
    expect(target).to_have_value("")
    expect(page).to_have_url(re.compile("/admin/audit$"))
    expect(table.get_by_role("row")).to_have_count(51)


# -- the cluster -------------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes(company: Company) -> Iterator[None]:
    """Let Ray's dashboard list a head with a GPU and a dead node."""
    told = [node("head", is_head=True), node("gone", state="DEAD", gpus=None)]
    with upstream({"/nodes": {"data": {"summary": told}}}) as ray:
        before, company.server.cluster.ray = company.server.cluster.ray, ray.dashboard
        yield
        company.server.cluster.ray = before


@pytest.mark.usefixtures("nodes")
def test_the_cluster_is_that_of_the_api(root: Visit, company: Company) -> None:
    """Each node has its processors, memory, disk and GPUs; the server its disk, database and versions."""
    with company.http("root") as http:
        found = http.get("/v1/cluster").json()
    page = root.goto("/admin/cluster")
    rows = page.get_by_role("region", name="Table of nodes").get_by_role("row")
    expect(rows).to_have_count(3)
    expect(page.get_by_text("1 of 2 nodes alive, with 1 GPU.")).to_be_visible()
    memory = found["nodes"][0]["memory"]
    for text in (f"{memory['used'] / 1e9:.1f} GB of {memory['total'] / 1e9:.1f} GB", "10.0.0.4, head", "71 % busy"):
        expect(rows.nth(1)).to_contain_text(text)
    expect(rows.nth(1)).to_contain_text(found["nodes"][0]["gpus"][0]["name"])
    expect(rows.nth(2)).to_contain_text("dead")
    expect(page.get_by_role("main")).to_contain_text(f"schema {found['database']['revision']}")
    for name, number in found["versions"].items():
        row = page.locator("dl.facts > div").filter(has=page.get_by_text(name, exact=True))
        expect(row.get_by_role("definition")).to_have_text(number)


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["/admin/users", "/admin/audit?target=team+red", "/teams", "/queue", "/settings", "/admin/cluster"]
)
def test_views_of_administrators_are_accessible(root: Visit, queued: dict[str, JobRecord], address: str) -> None:
    """Each view of an administrator, light and dark, violates no rule of axe, and does not scroll sideways."""
    page = root.goto(address)
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_text("Loading", exact=True)).to_have_count(0)
    page.locator("summary").first.click()
    check_shown(page)
