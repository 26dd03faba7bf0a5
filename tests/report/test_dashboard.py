"""A run's study opens in optuna-dashboard."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

from tests.report.run_folder import BASE


def test_the_dashboard_lists_the_study_and_its_trials(tmp_path: Path) -> None:
    import optuna_dashboard as dashboard
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from autotune.search.study import Study

    journal = tmp_path / "study.journal"
    study = Study({"max_num_seqs": [None, 8, 16]}, seed=0, journal=journal, storage=None, name="20260102-run")
    study.open({**BASE, "max_num_seqs": 8})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        application = dashboard.wsgi(JournalStorage(JournalFileBackend(str(journal))))
        listed = _get(application, "/api/studies")
        (found,) = listed["study_summaries"] if "study_summaries" in listed else listed["studies"]
        assert found["study_name"] == "20260102-run"
        shown = _get(application, f"/api/studies/{found['study_id']}")
    (trial,) = shown["trials"]
    assert {p["name"]: p["param_external_value"] for p in trial["params"]} == {"max_num_seqs": "8"}


def _get(application: Any, path: str) -> dict[str, Any]:
    """One request, without a server."""
    status: list[str] = []
    environment = {
        "REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": "", "SERVER_NAME": "localhost",
        "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1", "wsgi.version": (1, 0), "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(), "wsgi.multithread": False,
        "wsgi.multiprocess": False, "wsgi.run_once": True,
    }  # fmt: skip
    body = b"".join(application(environment, lambda line, headers, *rest: status.append(line)))
    assert status[0].startswith("200"), (status, body)
    answer: dict[str, Any] = json.loads(body)
    return answer
