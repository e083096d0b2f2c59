"""The main job over HTTP with real engines: two studies, one of them steered; all their processes are killed once."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from playwright.sync_api import Page

from search_spaces.study.engine import EngineOptions
from search_spaces.study.file import parse_study
from service.client import Client
from service.disk import DATABASE
from service.jobs.search.local_run import read_run
from service.store import Store
from service.studies.preflight.examine import examine
from tests.conftest import record_engine_start
from tests.end_to_end import page as web
from tests.end_to_end.processes import mergesearch
from tests.end_to_end.server import Server, drivers, processes_of_ray, replicas, serving
from tests.end_to_end.studies import SHIPPED_SAMPLES, shipped_study
from tests.judge_server import JudgeServer, judge_server
from tests.otlp_receiver import OtlpReceiver, otlp_receiver
from tests.service.stored_values import stored_values
from tests.service.tune.harness import trial_list
from workers.engines.transformers.verification import verify
from workers.evaluation.prompts import Prompts
from workers.types import Span, Split

ATTACKED = "@"  # begins the names of samples with attacked templates

# A mergekit configuration over the shipped models, which no searcher proposes.
BY_HAND = {
    "merge_method": "linear",
    "models": [{"model": name, "parameters": {"weight": weight}} for name, weight in (("math", 0.8), ("text", 0.2))],
}
CHAT_PROMPTS = ("12+34=", "sort skkwvi=", "b37 c59 f52 g17>g")
CHAT_TOKENS = 12
START_S = 240.0  # Ray, a job, Serve and an engine, on two busy cores


@pytest.mark.timeout(1200)
def test_studies_survive_kills_of_all_parts(shipped: Path, tmp_path: Path) -> None:
    """Two studies survive kills of replica, driver, Ray and server; the download scores as reported.

    The second one is submitted from the web page, paused meanwhile, and stopped early after that. The page shows the
    end of the first one, and a trial that its sliders pick is downloaded from there.
    """
    documents = [shipped_study(tmp_path, name=f"shipped-{seed}", seed=seed) for seed in (1, 2)]
    file = tmp_path / "first.json"
    file.write_text(json.dumps(documents[0]))
    with (
        judge_server() as judge,
        otlp_receiver() as receiver,
        serving(
            ["service.cli.main", "serve", "--allow-judge", judge.url],
            tmp_path / "data",
            environment={"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "500"},
        ) as server,
        Client(server.url) as client,
    ):
        command = [str(argument) for argument in mergesearch("submit", file, "--watch", "--server", server.url)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as watcher:
            first = until_submitted(client, "shipped-1")
            with web.tab(server.url) as page:
                second = web.submit(page, server.url, documents[1], timeout_s=START_S)
            server.wait_for_events(second, 1, "attempt", timeout_s=START_S)
            pause(server, client, second)
            of_ray = kill_all(server, first)
            resume(server, client, second)
            server.wait_for_events(second, 3, "rung", timeout_s=START_S)
            pause(server, client, second)
            client.enqueue_trial(second, "by hand", recipe=BY_HAND)
            client.stop(second, reason="good enough")
            with web.tab(server.url) as page:
                page.goto(f"{server.url}/studies/{first}")
                web.watch(page, timeout_s=2 * START_S)
                check_taken(client, page, first, tmp_path / "taken")
            ended = server.wait_until_ended(second, timeout_s=2 * START_S)
            assert ended["state"] == "COMPLETE", server.story(second)
            _, told = watcher.communicate(timeout=60)
            assert watcher.returncode == 0, told
        check_traces(receiver, first)
        check_stopped(server, client, second)
        best = client.summary(first)["best"]
        assert best is not None
        assert best["trial"] in [entry["trial"] for entry in client.pareto(first)["front"]]
        reasons = [event["payload"]["because"] for event in server.events(first) if event["kind"] == "attempt"]
        out = client.export(first, "best", tmp_path / "model")
        check_benchmarks(client, first)
        with chatting(server, client, first, best["trial"], out):
            check_added(server, client, first, documents[0]["benchmarks"], judge)
        assert server.stop() == 0
        names = {process.pid: shown(process) for process in of_ray}
        left = psutil.wait_procs(of_ray, timeout=30)[1]
        assert left == [], [names[process.pid] for process in left]
    assert reasons[0] is None
    assert "its driver ended" in reasons[1]
    assert "Ray was restarted" in reasons[2]
    store = Store(f"sqlite:///{server.data_dir / DATABASE}")
    with read_run(shipped) as (undisturbed, run):
        assert trial_list(store, first) == trial_list(undisturbed, run.id)
        check_same_values(store, first, undisturbed, run.id)
    for study in (first, second):
        assert chunks_scored_twice(store, study) == []
    held = {study: {row.replica for row in store.evidence(study)} for study in (first, second)}
    # Two were killed. Serve starts a second engine where both studies have waited for it for half a minute.
    assert 3 <= len(held[first]) <= len(held[first] | held[second]) <= 4, "engines are shared"
    preflight = examine(parse_study(documents[0]))
    recipe = store.trial(first, best["trial"]).recipe
    report = verify(
        recipe.digest,
        str(out),
        preflight.engine_options,
        samples=store.samples(first, recipe.digest, Split.SEARCH),
        spans=tuple(Span(name, task, 0, SHIPPED_SAMPLES) for name, task in preflight.tasks.search.items()),
        dtype="float32",
        engine_logprobs={},
    )
    store.close()
    assert report.num_samples == SHIPPED_SAMPLES * len(preflight.tasks.search)
    assert report.num_beyond == 0, report.differences


def check_taken(client: Client, page: Page, study: str, directory: Path) -> None:
    """Check that the page's sliders pick the trial that the server picks, and that its download has its recipe."""
    weights = {"math": 0, "text": 100, "lookup": 0}
    trial = web.pick(page, weights)
    preferred = client.pareto(study, prefer={name: weight / 100 for name, weight in weights.items()})["preferred"]
    assert trial == preferred["trial"]
    taken = web.download(page, trial, directory, timeout_s=START_S)
    assert taken["digest"] == client.trial(study, trial)["recipe_digest"]


def check_traces(receiver: OtlpReceiver, study: str) -> None:
    """Check that spans of merges, swaps and scoring lead to the study's request, across drivers and their kills."""
    drivers = set()
    for name in ("materialise", "swap", "generate and score"):
        found = [receiver.parents(span, 3) for span in receiver.named(name) if span.seconds > 0]
        complete = [spans for spans in found if len(spans) == 3 and spans[-1].attributes["mergesearch.job"] == study]
        assert complete, name
        for score, chunk, trial in complete:
            assert [score.name, chunk.name, trial.name] == ["score", "chunk", "trial"]
            assert score.attributes["mergesearch.recipe"] == trial.attributes["mergesearch.recipe"]
            drivers.add(receiver.linked_by(trial))
    (request,) = (span for span in receiver.named("POST /v1/studies") if span.attributes["mergesearch.job"] == study)
    assert {receiver.parent_of(driver) for driver in drivers} == {request}
    assert len(drivers) >= 2


def shown(process: psutil.Process) -> str:
    """Command line of a process; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until_submitted(client: Client, name: str) -> str:
    """Wait until another process has submitted the study, and return the study's id."""
    deadline = time.monotonic() + START_S
    while not (found := [study["id"] for study in client.studies() if study["name"] == name]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found[0]


def pause(server: Server, client: Client, study: str) -> None:
    """Pause a study, and wait until its driver has ended."""
    client.pause(study, reason="the engine is needed")
    deadline = time.monotonic() + START_S
    while client.job(study)["state"] != "PAUSED" or drivers(study):
        assert time.monotonic() < deadline, server.story(study)
        time.sleep(0.2)


def resume(server: Server, client: Client, study: str) -> None:
    """Resume a study that was paused while everything was killed."""
    paused = client.job(study)
    assert (paused["state"], paused["waiting_for"]) == ("PAUSED", "a request to resume it")
    assert [event["kind"] for event in server.events(study)].count("attempt") == 1
    client.edit(study, {"notes": "paused meanwhile"})
    client.resume(study)


def check_stopped(server: Server, client: Client, study: str) -> None:
    """Check that the study is COMPLETE with the scored and the enqueued trials, and says that it was steered."""
    summary = client.summary(study)
    assert summary["reason"] == "stopped by request: good enough"
    actions = [each["action"] for each in summary["steering"]]
    assert actions == ["pause", "edit", "resume", "pause", "enqueue", "stop"]
    (enqueued,) = [trial for trial in client.trials(study) if trial["origin"] == "user"]
    assert (enqueued["label"], enqueued["state"]) == ("by hand", "COMPLETE"), "the stop prunes what was proposed"
    assert summary["best"] is not None
    assert summary["holdout"], "finalists are scored on held-out data"
    pruned = [trial for trial in client.trials(study) if trial["reason"] == summary["reason"]]
    assert pruned, server.story(study)


def kill_all(server: Server, study: str) -> list[psutil.Process]:
    """Kill a replica, the study's driver, the head of Ray and the server; return the processes of the last Ray.

    Each is killed after the study has recovered from the kill before.
    """
    started_at = time.monotonic()
    server.wait_for_events(study, 2, "rung", timeout_s=START_S)
    record_engine_start("shipped family, over HTTP", time.monotonic() - started_at)

    (replica,) = replicas(server)
    started_at = time.monotonic()
    replica.kill()
    server.wait_for_events(study, 2, "replica", timeout_s=START_S)
    record_engine_start("replacement of the killed replica", time.monotonic() - started_at)

    killed = drivers(study)
    assert killed, "no driver of the study is running"
    for driver in killed:
        driver.kill()
    server.wait_for_events(study, 2, "attempt", timeout_s=START_S)
    num_rungs = Counter(event["kind"] for event in server.events(study))["rung"]
    server.wait_for_events(study, num_rungs + 1, "rung", timeout_s=START_S)

    (gcs,) = processes_of_ray(server, "gcs_server")
    started_at = time.monotonic()
    gcs.kill()
    server.wait_for_events(study, 3, "attempt", timeout_s=START_S)
    server.kill()
    server.start()
    server.wait_for_events(study, 3, "replica", timeout_s=START_S)
    record_engine_start("on the Ray that was started anew", time.monotonic() - started_at)
    return processes_of_ray(server)


def check_benchmarks(client: Client, study: str) -> None:
    """Check the results of six benchmarks: values, the mean of a group, what was attacked and what was executed."""
    summary = client.summary(study)
    assert summary["best"] is not None
    found = summary["benchmarks"]
    assert found["failures"] == []
    assert found["groups"] == {"skills": ["sums", "words"]}
    rows = {row["trial"]: row for row in found["rows"]}
    best = rows[summary["best"]["trial"]]
    values = {name: estimate["value"] for name, estimate in best["values"].items()}
    assert values.keys() == {"sums", "words", "attacked", "executed", "options", "lookups"}
    assert values["executed"] >= values["sums"] > 0, "a program that ends has the right sum"
    assert best["averages"]["skills"]["value"] == pytest.approx((values["sums"] + values["words"]) / 2)
    attacked = best["attacks"]["attacked"]
    assert attacked["value"]["value"] <= values["attacked"]
    assert attacked["template"] != "find {{prompt}}"
    assert len(rows) == 5, "the best trial, base and experts"
    assert [number for number, row in rows.items() if "lookups" in row["values"]] == [best["trial"]]


def check_added(
    server: Server, client: Client, study: str, given: Sequence[dict[str, Any]], judge: JudgeServer
) -> None:
    """Add benchmarks to an ended study that already has the benchmarks `given`: only samples not stored are scored.

    One of the added benchmarks has a judge, which compares completions of the best trial.
    """
    of_study = {each["name"]: each for each in given}
    more = [
        {**of_study["sums"], "name": "more", "trials": ["best"]},
        {**of_study["lookups"], "trials": ["best", "sources"]},
        {
            **of_study["words"],
            "name": "judged",
            "metric": "win_rate",
            "trials": ["best"],
            "judge": {"url": judge.url, "model": "longest"},
        },
    ]
    store = Store(f"sqlite:///{server.data_dir / DATABASE}")
    before = set(map(str, store.evidence(study)))
    client.add_benchmarks(study, {"benchmarks": more})
    ended = server.wait_until_ended(study, timeout_s=2 * START_S)
    assert ended["state"] == "COMPLETE", server.story(study)
    new = [row for row in store.evidence(study) if str(row) not in before]
    store.close()
    assert {name.partition("[")[0] for row in new for name in row.prompts} == {
        "bench more",
        "bench lookups",
        "bench judged",
    }
    assert sum(row.num_samples for row in new) == 2 * 20 + 4 * 20, "twice the best trial, then base and experts"
    found = client.summary(study)["benchmarks"]
    assert found["failures"] == []
    rows = found["rows"]
    (judged,) = [row for row in rows if "judged" in row["values"]]
    assert judged["judged"]["judged"]["models"] == ["longest-0613"]
    assert judged["judged"]["judged"]["agreement"] == 1
    assert judged["values"]["judged"]["samples"] == 20
    assert len(judge.requests) == 2 * 20
    assert sum("lookups" in row["values"] for row in rows) == 5


@contextmanager
def chatting(server: Server, client: Client, study: str, trial: int, out: Path) -> Iterator[None]:
    """Let a trial complete prompts, by the engines that a search uses in the context.

    Greedy completions of the trial are those that plain transformers generates with its exported weights in `out`.
    """
    served = client.serve(study, trial, shares_engines=True)
    api = openai.OpenAI(base_url=f"{client.url}{served['links']['openai']}", api_key="none", max_retries=0)
    expected = [generated(out, prompt) for prompt in CHAT_PROMPTS]
    digests = {name: client.trial(study, int(name))["recipe_digest"] for name in (str(trial), "0")}

    def completed(model: str) -> list[str]:
        answers = [
            api.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=CHAT_TOKENS)
            for prompt in CHAT_PROMPTS
        ]
        assert {answer.system_fingerprint for answer in answers} == {digests[model]}
        return [answer.choices[0].text for answer in answers]

    deadline = time.monotonic() + START_S
    while (found := answered(lambda: completed(str(trial)))) is None:
        assert time.monotonic() < deadline, (client.job(served), client.log(served))
        time.sleep(1.0)
    assert found == expected
    chunks = list(
        api.completions.create(
            model=str(trial), prompt=CHAT_PROMPTS[0], temperature=0, max_tokens=CHAT_TOKENS, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected[0]
    assert len(chunks) > 1
    with pytest.raises(openai.BadRequestError, match="send its prompt to /completions"):
        api.chat.completions.create(model=str(trial), messages=[{"role": "user", "content": "1+2="}])
    has_ended = threading.Event()

    def chat() -> int:
        num_answers = 0
        while not has_ended.is_set():
            assert completed(str(trial)) == expected, "also between the chunks of a search"
            completed("0")
            num_answers += 1
        return num_answers

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(chat)
        try:
            yield
        finally:
            has_ended.set()
        assert answers.result() > 0
    client.cancel(served)


def answered(ask: Callable[[], list[str]]) -> list[str] | None:
    """The answer of `ask`; None while there is no engine."""
    try:
        return ask()
    except openai.InternalServerError:
        return None


def generated(model_dir: Path, prompt: str) -> str:
    """Greedy completion of a prompt by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    prompts = Prompts(str(model_dir), EngineOptions())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = prompts.encode(prompt)
    tokens = model.generate(
        torch.tensor([ids]), max_new_tokens=CHAT_TOKENS, do_sample=False, eos_token_id=list(prompts.stop_token_ids)
    )[0].tolist()
    return str(prompts.tokenizer.decode(tokens[len(ids) :], skip_special_tokens=True))


def check_same_values(store: Store, study: str, undisturbed: Store, run: str) -> None:
    """Check that benchmarks have the values of an undisturbed run.

    The names of samples with attacked templates contain a digest of the data's place, which differs.
    """
    found, expected = stored_values(store, study, Split.BENCHMARK), stored_values(undisturbed, run, Split.BENCHMARK)
    assert len(expected) == 5
    for digest, values in expected.items():
        given = {name: each for name, each in values.items() if not name.startswith(ATTACKED)}
        assert {name: found[digest][name] for name in given} == given
        attacks, others = (
            sorted(tuple(each.items()) for name, each in of_digest.items() if name.startswith(ATTACKED))
            for of_digest in (found[digest], values)
        )
        assert attacks == others
        assert len(attacks) == 4


def chunks_scored_twice(store: Store, study: str) -> list[Any]:
    """Recipes with more scored samples in evidence than stored samples."""
    stored = {split: stored_values(store, study, split) for split in Split}
    scored: Counter[tuple[str, Split]] = Counter()
    for row in store.evidence(study):
        split = Split(next(iter(row.prompts)).split()[0])
        scored[row.recipe_digest, split] += row.num_samples
    return [
        (digest, split)
        for (digest, split), count in scored.items()
        if count != sum(len(values) for values in stored[split][digest].values())
    ]
