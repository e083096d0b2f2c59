"""Possible secrets are removed from answers of Ray's dashboard, and everything else stays."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.api.ray_dashboard.redaction import REDACTED, redacted, shown_logs

OWN = "/opt/venv/bin/python -m service.jobs.driver --data /data --job 0123 --because 'its driver ended'"


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        # api/jobs/, snake case
        (
            {"runtime_env": {"env_vars": {"API_KEY": "s3cret"}, "pip": ["x"]}},
            {"runtime_env": {"env_vars": {"API_KEY": REDACTED}, "pip": ["x"]}},
        ),
        # nodes, camel case
        ({"runtimeEnv": {"envVars": {"API_KEY": "s3cret"}}}, {"runtimeEnv": {"envVars": {"API_KEY": REDACTED}}}),
        ({"env_vars": "API_KEY=s3cret"}, {"env_vars": REDACTED}),
        ({"env_vars": {}}, {"env_vars": {}}),
        ({"serialized_runtime_env": "API_KEY=s3cret"}, {"serialized_runtime_env": REDACTED}),
        ({"serialized_runtime_env": ""}, {"serialized_runtime_env": ""}),
        ({"entrypoint": "python train.py --password s3cret"}, {"entrypoint": f"python {REDACTED}"}),
        ({"entrypoint": OWN}, {"entrypoint": OWN}),
        ({"entrypoint": f"sh -c '{OWN}' s3cret"}, {"entrypoint": f"sh {REDACTED}"}),
        ({"entrypoint": "python"}, {"entrypoint": "python"}),
        ({"cmdline": ["python", "-c", "s3cret", ""]}, {"cmdline": ["python", REDACTED]}),
        ({"cmdline": ["ray::Replica s3cret", "", ""]}, {"cmdline": ["ray::Replica", REDACTED]}),
        ({"cmdline": ["ray::IDLE", "", ""]}, {"cmdline": ["ray::IDLE"]}),
        ({"cmdline": OWN.split()}, {"cmdline": OWN.split()}),
        ({"cmdline": []}, {"cmdline": []}),
        # api/serve/applications/
        ({"deployed_app_config": {"args": {"key": "s3cret"}}}, {"deployed_app_config": {"args": REDACTED}}),
        ({"user_config": {"a": "s3cret"}, "init_kwargs": {"b": 1}}, {"user_config": REDACTED, "init_kwargs": REDACTED}),
        ([{"deep": [{"redisPassword": "s3cret"}]}], [{"deep": [{"redisPassword": REDACTED}]}]),
        ({"metadata": {"wandb_api_key": "s3cret"}}, {"metadata": {"wandb_api_key": REDACTED}}),
        (
            {"message": "cannot connect to postgresql://user:s3cret@host/name"},
            {"message": f"cannot connect to postgresql://user:{REDACTED}@host/name"},
        ),
        (
            {"message": "exit code 1, last available logs (truncated): python x.py --key s3cret"},
            {"message": "exit code 1"},
        ),
        # what the page needs
        (
            {"num_tokens": 3, "name": "a@b", "url": "http://10.0.0.1:8265/x", "gpus": None, "ok": True},
            {"num_tokens": 3, "name": "a@b", "url": "http://10.0.0.1:8265/x", "gpus": None, "ok": True},
        ),
    ],
)
def test_secrets_are_removed(document: Any, shown: Any) -> None:
    assert redacted(document) == shown
    assert "s3cret" not in json.dumps(redacted(document))


def test_a_serialized_environment_stays_one() -> None:
    """A runtime environment that Ray sends as text is still that text, with the names of its variables alone."""
    text = json.dumps({"env_vars": {"API_KEY": "s3cret"}, "working_dir": "gcs://x"})
    for name in ("serialized_runtime_env", "serializedRuntimeEnv"):
        found = json.loads(redacted({"info": {name: text}})["info"][name])
        assert found == {"env_vars": {"API_KEY": REDACTED}, "working_dir": "gcs://x"}


def test_lists_of_logs_name_what_may_be_read() -> None:
    names = {"raylet": ["raylet.out", "raylet.err"], "job": ["job-driver-a-0123abcd-1.log"], "dirs": ["serve/", "old/"]}
    shown = {"raylet": [], "job": ["job-driver-a-0123abcd-1.log"], "dirs": ["serve/"]}
    assert shown_logs({"data": {"result": names}}) == {"data": {"result": shown}}
