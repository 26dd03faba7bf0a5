"""YAML documents with the comment above them."""

from __future__ import annotations

from typing import Any

import yaml

from autotune.report.export.about import commented
from autotune.report.export.deployment import Deployment

#: Asks the server in the container itself; the image has Python for certain, curl not.
HEALTH_CHECK = (
    "python3",
    "-c",
    "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)",
)


def document(given: Deployment, *contents: Any) -> str:
    """The documents as one file; the launch's story is the comment at its top."""
    # Wide: a folded argument is legal YAML and unreadable.
    text = yaml.safe_dump_all(
        contents, sort_keys=False, allow_unicode=True, default_flow_style=False, width=4096
    )
    return commented(given.header) + text
