"""The Optuna study: what to launch next, when to stop, what to claim.

The package is also the function `autotune.search(...)` (api.py): one name stands for both.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class _Search(types.ModuleType):
    """A module that can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        # By name: nothing in this room may lean on the rooms above it.
        return importlib.import_module("autotune.api").search(*args, **options)


# Not a function in autotune/__init__.py alone: importing any module of this package would put the package
# in its place.
sys.modules[__name__].__class__ = _Search
