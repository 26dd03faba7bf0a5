"""autotune: the fastest vLLM launch configuration for one model on one card.

    found = autotune.search("examples/tiny-llama", target_len=512)
    checked = autotune.check("Qwen/Qwen3-8B", device="4090", max_model_len=32768)
    why = autotune.explain("vllm.log")

Importing it loads nothing else; errors are in `autotune.errors`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.api import check, explain, scan, search
    from autotune.results import Bounds, CheckResult, Explanation, Figure, ScanResult, SearchResult
    from autotune.search.events import Listener

__version__ = "0.1.0"

#: Public name -> the module it is loaded from when it is first used.
_PUBLIC = {
    "Bounds": "autotune.results",
    "CheckResult": "autotune.results",
    "Explanation": "autotune.results",
    "Figure": "autotune.results",
    "Listener": "autotune.search.events",
    "ScanResult": "autotune.results",
    "SearchResult": "autotune.results",
    "check": "autotune.api",
    "explain": "autotune.api",
    "scan": "autotune.api",
}

__all__ = [
    "Bounds",
    "CheckResult",
    "Explanation",
    "Figure",
    "Listener",
    "ScanResult",
    "SearchResult",
    "__version__",
    "check",
    "explain",
    "scan",
    "search",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in ("errors", "search"):  # `autotune.search` is a package that can be called
        return importlib.import_module(f"autotune.{name}")
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "errors"})
