"""Units of work, and a quota that several servers with one database keep together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from service.api.limits.artifacts import ArtifactQuota
from service.errors import Conflict, NotFound
from service.jobs.serving.request import check_number
from service.store import Store
from service.store.accounts import AccountStore, Actor
from service.store.artifacts import ArtifactStore

ACTOR = Actor("ann", "here")
GIB = 2**30


@pytest.fixture
def stores(database: str) -> Iterator[tuple[Store, Store]]:
    """The stores of two servers with one database."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(Store(database))) for _ in range(2))
        yield first, second


def create(store: Store, *, kind: str = "search", num_bytes: int = 0) -> str:
    accepted = {"artifact_bytes": num_bytes}
    return store.create_job(kind=kind, name="a", document={}, accepted=accepted, team="red").id


def race(stores: tuple[Store, Store], admit: Callable[[Store], object], *, number: int = 4) -> int:
    """Call `admit` with both stores `number` times each, at the same moment; returns how many were admitted."""
    admitted: list[object] = []
    start = threading.Barrier(2 * number)

    def call(store: Store) -> None:
        start.wait()
        with suppress(Conflict):
            admitted.append(admit(store))

    threads = [threading.Thread(target=call, args=(store,)) for store in stores for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(admitted)


def test_servers_admit_served_studies_together(stores: tuple[Store, Store]) -> None:
    """Two servers that check the quota at the same moment serve as many studies as it allows, and no more."""

    def admit(store: Store) -> str:
        with store.admission():
            check_number(store, team="red", limit=3, sender=None)
            time.sleep(0.05)  # the other server checks meanwhile
            return create(store, kind="serving")

    assert race(stores, admit) == 3
    assert len(stores[0].unfinished_jobs()) == 3


def test_servers_admit_artifacts_together(stores: tuple[Store, Store], tmp_path: Path) -> None:
    """Two servers accept the fine-tunings whose experts fit into the quota of bytes, and no more."""

    def admit(store: Store) -> str:
        quota = ArtifactQuota(store, ArtifactStore(store, tmp_path), 3 * GIB)

        def make() -> str:
            time.sleep(0.05)
            return create(store, kind="finetune", num_bytes=GIB)

        return quota.admit(GIB, make)

    assert race(stores, admit) == 3


def test_a_unit_of_work_is_stored_whole_or_not_at_all(stores: tuple[Store, Store]) -> None:
    """Calls of several stores are one transaction, whose reads see its writes; an error undoes all of them."""
    store, other = stores
    accounts = AccountStore(store)

    def fail() -> None:
        with store.unit_of_work():
            job = create(store)
            accounts.record(ACTOR, "job.create", f"job {job}")
            assert store.job(job).team == "red"
            assert len(accounts.audit()) == 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (store.jobs(), accounts.audit()) == ((), ())
    with store.unit_of_work():
        job = create(store)
        accounts.record(ACTOR, "job.create", f"job {job}")
        with pytest.raises(NotFound):
            other.job(job)
    assert other.job(job).id == job
    assert [entry.target for entry in accounts.audit()] == [f"job {job}"]


def test_a_handled_error_undoes_its_call_alone(stores: tuple[Store, Store]) -> None:
    """In a unit of work, a call that fails stores nothing, and what was stored before and after it stays."""
    store, _ = stores

    def fail() -> None:
        with store.unit_of_work():
            create(store)
            raise RuntimeError

    with store.unit_of_work():
        first = create(store)
        with pytest.raises(RuntimeError):
            fail()
        second = create(store)
    assert [job.id for job in store.jobs()] == [first, second]


def test_other_threads_are_not_in_the_unit(stores: tuple[Store, Store]) -> None:
    """A thread beside a unit of work does not see what the unit has not stored yet."""
    store, _ = stores
    seen: list[int] = []
    with store.unit_of_work():
        create(store)
        thread = threading.Thread(target=lambda: seen.append(len(store.jobs())))
        thread.start()
        thread.join()
    assert seen == [0]
    assert len(store.jobs()) == 1
