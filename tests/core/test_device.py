"""What a card's name says."""

import pytest

from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval

TOTAL = Interval.exact(1e9)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA RTX A6000", (8, 6)),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9)),
        ("NVIDIA GeForce RTX 3050 Ti Laptop GPU", (8, 6)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA GeForce RTX 5090", (12, 0)),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB300", (10, 3)),
        ("NVIDIA GB10", (12, 1)),
        ("Tesla T4", (7, 5)),
        ("Quadro RTX 6000", (7, 5)),
        ("Tesla V100-SXM2-32GB", (7, 0)),
        ("Tesla P40", (6, 1)),
        ("AMD Instinct MI300X", None),
        ("card", None),
    ],
)
def test_compute_capability_by_name(name: str, capability: tuple[int, int] | None) -> None:
    assert Device(name, DeviceKind.CUDA, TOTAL, TOTAL).capability == capability


def test_what_is_given_wins_and_a_cpu_has_none() -> None:
    assert Device("NVIDIA H100", DeviceKind.CUDA, TOTAL, TOTAL, compute_capability=(8, 6)).capability == (
        8,
        6,
    )
    assert Device("h100 host", DeviceKind.CPU, TOTAL, TOTAL).capability is None
