"""Bytes in the units that vLLM prints (GiB with two decimals) and people read (MiB)."""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def gib_text(count_bytes: float) -> str:
    """`count_bytes` as vLLM prints it: GiB with two decimals."""
    return f"{count_bytes / GIB:.2f} GiB"


def mib_text(count_bytes: float) -> str:
    """`count_bytes` in whole MiB, with a sign only when negative."""
    return f"{count_bytes / MIB:.0f} MiB"
