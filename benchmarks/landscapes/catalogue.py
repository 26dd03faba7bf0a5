"""The landscapes, each with the space that everybody searches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.core.launch import LaunchConfig
from autotune.models import load_model
from autotune.search.pool import candidates_of
from autotune.spaces import Space
from autotune.vllm.predict import Predictor
from benchmarks.landscapes.ground import Place
from benchmarks.landscapes.recorded import recorded_grids
from benchmarks.landscapes.simulated import SimulatedCard
from benchmarks.landscapes.truth import Card, Net, Options, Trap, Truth

_MODELS = Path(__file__).parents[2] / "tests/data/models"

LAPTOP = Card("NVIDIA GeForce RTX 3050 Ti Laptop GPU", 4096, 3287, 192, 14, 7)
RTX3060 = Card("NVIDIA GeForce RTX 3060", 11930, 11400, 360, 25.5, 31.5)
T4 = Card("Tesla T4", 14930, 14700, 320, 65, 15.8)
RTX4090 = Card("NVIDIA GeForce RTX 4090", 24095, 23500, 1008, 165, 31.5)
A100 = Card("NVIDIA A100 80GB", 81152, 80640, 2039, 312, 31.5)
H200 = Card("NVIDIA H200", 143156, 142629, 4800, 989, 63)

QWEN_VL_3B_AWQ = Net("qwen25-vl-3b-awq", 36, 2048, 11008, 2, 128, 151936, 3383, 1375, 3.1, encoder_mib=40)
QWEN_3B = Net("qwen25-3b", 36, 2048, 11008, 2, 128, 151936, 5930, 5293, 3.1)
LLAMA_8B = Net("llama31-8b", 32, 4096, 14336, 8, 128, 128256, 15365, 13312, 8.0)
LLAMA_8B_AWQ = Net("llama31-8b-awq-int4", 32, 4096, 14336, 8, 128, 128256, 5519, 3466, 8.0)
QWEN_7B_GPTQ = Net("qwen25-7b-gptq-int4", 28, 3584, 18944, 4, 128, 152064, 5417, 3300, 7.6)
QWEN_8B = Net("qwen3-8b", 36, 4096, 12288, 8, 128, 151936, 15635, 13230, 8.2)
QWEN_30B = Net("qwen3-30b-a3b", 48, 2048, 768 * 8, 4, 128, 151936, 58246, 57000, 30.5, experts=128, chosen=8)

# All six options of the mission, the length being the target. vLLM's defaults are among the values.
_GMU = (0.70, 0.80, 0.85, 0.90, 0.92, 0.94, 0.95, 0.96, 0.98)
_OFFLOADS = (None, 2.0, 4.0)
_SEQS = (None, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512)
_TOKENS = (None, 512, 1024, 2048, 4096, 8192, 16384)
_BLOCKS = (None, 32, 64)


def _space(name: str, target: int, **changed: tuple[Any, ...]) -> Space:
    values: dict[str, tuple[Any, ...]] = {
        "gpu_memory_utilization": _GMU,
        "cpu_offload_gb": _OFFLOADS,
        "max_model_len": (target,),
        "max_num_seqs": _SEQS,
        "max_num_batched_tokens": _TOKENS,
        "block_size": _BLOCKS,
        **changed,
    }
    return Space(name, values)


@dataclass(frozen=True)
class Landscape:
    """A simulated card, a model, a target, a load, and the published space (`ground.Place`).

    Attributes:
        defaults: vLLM's (gmu, S, T) on this card.
    """

    name: str
    card: Card
    net: Net
    target: int
    clients: int
    shapes: tuple[tuple[int, int], ...]
    space: Space
    version: str = "0.32.0"
    defaults: tuple[float, int, int] = (0.92, 256, 2048)
    tight: bool = False
    misleading: bool = False
    trap: Trap = field(default_factory=Trap)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    launch_s: float = 120.0

    def engine(self, seed: int) -> SimulatedCard:
        truth = Truth(self.card, self.net, (self.clients, self.shapes), self.trap, seed)
        return SimulatedCard(self.card, self.version, truth, self.options, seed)

    def predictor(self) -> Predictor:
        return Predictor(load_model(str(_MODELS / self.net.folder)).spec, self.version)

    def published(self) -> list[LaunchConfig]:
        space = self.space.with_fixed(self.fixed)
        return list(candidates_of(space, 0, space.size()))

    def holds(self, config: LaunchConfig) -> bool:
        return True

    def values(self) -> Mapping[str, tuple[Any, ...]]:
        return self.space.values

    def options(self, params: Mapping[str, Any]) -> Options:
        """What vLLM would make of the options, in the words of its documentation."""
        gmu, seqs, tokens = self.defaults
        length = params.get("max_model_len") or self.target
        asked_seqs, asked_tokens = params.get("max_num_seqs"), params.get("max_num_batched_tokens")
        tokens = asked_tokens or min(tokens, (asked_seqs or seqs) * length)
        return Options(
            gmu=params.get("gpu_memory_utilization") or gmu,
            offload_gb=params.get("cpu_offload_gb") or 0.0,
            length=length,
            seqs=asked_seqs or min(seqs, tokens),
            tokens=tokens,
            block=params.get("block_size") or 16,
        )


def _mixed(target: int) -> tuple[tuple[int, int], ...]:
    """design.md's default load."""
    given = target * 3 // 4
    return ((given, target - given), (given // 4, (target - given) // 4))


SIMULATED = (
    Landscape(
        "laptop-4gb", LAPTOP, QWEN_VL_3B_AWQ, 1024, 16, _mixed(1024),
        _space(
            "laptop", 1024,
            gpu_memory_utilization=(0.60, 0.625, 0.65, 0.675, 0.70, 0.725, 0.75, 0.775, 0.80),
            cpu_offload_gb=(None, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5),
            max_num_seqs=(1, 2, 4, 8, 12, 16),
            max_num_batched_tokens=(None, 128, 256, 512, 1024, 2048),
            block_size=(None, 32, 64),
        ),
        version="0.28.0", tight=True, fixed={"limit_mm_per_prompt": '{"image": 1}'}, launch_s=90,
    ),
    Landscape("roomy-12gb", RTX3060, QWEN_3B, 4096, 64, _mixed(4096), _space("3060", 4096)),
    Landscape(
        "tight-12gb", RTX3060, LLAMA_8B_AWQ, 32768, 32, _mixed(8192),
        # Without offload: 4 GB of it would pay by up to 15 % in four of ten seeds here, which the product
        # would not find: it offloads only what else does not fit.
        _space("3060", 32768, cpu_offload_gb=(None,)), tight=True,
    ),
    Landscape("t4-16gb", T4, QWEN_7B_GPTQ, 8192, 64, _mixed(4096), _space("t4", 8192)),
    Landscape(
        "tight-24gb", RTX4090, QWEN_8B, 32768, 48, _mixed(8192), _space("4090", 32768), tight=True
    ),
    Landscape("roomy-24gb", RTX4090, LLAMA_8B_AWQ, 4096, 128, _mixed(4096), _space("4090", 4096)),
    Landscape("roomy-80gb", A100, LLAMA_8B, 8192, 256, _mixed(4096), _space("a100", 8192)),
    Landscape(
        "roomy-141gb", H200, QWEN_30B, 8192, 256, _mixed(4096),
        _space("h200", 8192, max_num_seqs=(*_SEQS, 1024)),
        defaults=(0.92, 1024, 8192),
    ),
    Landscape(
        "misleading-slow-path", RTX4090, LLAMA_8B_AWQ, 4096, 128, _mixed(4096), _space("4090", 4096),
        misleading=True,
        trap=Trap(slow_block=64, slow_factor=6.0, slow_chunk=1024, chunk_factor=2.5),
    ),
    Landscape(
        "misleading-rates", A100, LLAMA_8B, 8192, 256, _mixed(4096), _space("a100", 8192),
        misleading=True, trap=Trap(memory=0.33, compute=0.45, host=3.0),
    ),
)  # fmt: skip


def landscapes() -> Sequence[Place]:
    """All of them; the recorded one where its file is."""
    return [*SIMULATED, *recorded_grids()]
