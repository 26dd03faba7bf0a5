"""Seconds of one engine step: what must be read, computed and launched, and which of them it waits for.

    step = max(max(memory, compute) + PCIe, kernel launches) + host per step + host per sequence

memory: weights that stay on the device and the KV of everybody, over the bandwidth. compute: products of all
tokens, over the arithmetic rate. PCIe: offloaded weights, which every step reads again (unified addressing:
the kernel waits for them, so the term is added). Kernel launches hide behind the device's work unless they
take longer, as they do in eager mode on small models.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.device import Device, DeviceKind
from autotune.core.kv_specs import STATE
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.numeric import Number, greatest, least, where
from autotune.core.rates import Rates
from autotune.errors import BadInput

WEIGHTS_PCIE = "weights over PCIe"
WEIGHTS_MEMORY = "weights from memory"
KV_MEMORY = "KV cache from memory"
COMPUTE = "arithmetic"
HOST = "the host: launching kernels, scheduling"

#: Launches of a layer that remain: with a graph of the whole step none; with piecewise graphs attention and
#: the cache write, 2 of 13; compiled without a graph about half, since norms, rotary embedding and activation
#: are fused into their neighbours.
_FULL_GRAPH, _PIECEWISE, _COMPILED = 0.0, 2 / 13, 0.5
#: A CPU says neither bandwidth nor arithmetic rate. Two channels of DDR4-3200 give 51 GB/s, one core of a
#: shared machine 10; AVX-512 at 2.5 GHz makes 0.16 TFLOP/s a core in fp32. The middle, and a wide spread
#: (rates.START_CPU); the first launches settle it.
_CPU_MEMORY_GB_S, _CPU_TFLOPS = 20.0, 0.2
#: Block tables hold 4-byte block numbers (v1/worker/block_table.py); rows of running sequences are copied to
#: the device whole at every step.
_TABLE_ENTRY_BYTES = 4
_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True)
class Costs:
    """What one launch reads and computes, with the device's nominal figures.

    Attributes:
        dense_bytes: of decoder layers, less the experts.
        expert_bytes: of all experts of all layers; a step reads those its tokens choose.
        head_bytes: the output projection (the embedding, when tied).
        offloaded_share: of the decoder layers' bytes, in host memory.
        kv: (bytes per token over all layers of a kind, window or None).
        token_flops: of all layers, per token; `head_flops` per sequence; `pair_flops` per query and key.
        graph_tokens: the largest batch that CUDA graphs are captured for, 0 for none.
        graph_full: decode batches run as one graph.
        table_bytes: of one sequence's block table.
    """

    dense_bytes: float
    expert_bytes: float
    experts: int
    experts_per_token: int
    head_bytes: float
    offloaded_share: Number
    kv: tuple[tuple[float, int | None], ...]
    token_flops: float
    head_flops: float
    pair_flops: float
    layers: int
    eager: bool
    graph_tokens: Number
    graph_full: bool
    table_bytes: Number
    memory_bytes_s: float
    pcie_bytes_s: float
    flops_s: float


def costs_of(model: ModelSpec, resolved: Resolved, device: Device, offloaded_bytes: float = 0.0) -> Costs:
    """The costs of one launch on the rank that waits longest.

    Args:
        offloaded_bytes: that really moved (`Ledger.offloaded`).

    Raises:
        BadInput: the device's bandwidth or arithmetic rate is not known.
    """
    memory_gb_s, tflops = _nominal(device)
    ranks = resolved.tensor_parallel_size * resolved.pipeline_parallel_size
    decoder = model.parts["decoder_layers"].size_bytes(resolved.dtype_bytes).best
    head_part = model.parts["embedding" if model.tied else "lm_head"].size_bytes(resolved.dtype_bytes)
    head = head_part.best or float(model.vocab * model.hidden * resolved.dtype_bytes)
    attention, dense_mlp, experts = _layer_elements(model)
    expert_share = experts / (attention + dense_mlp + experts)
    chosen = experts * model.experts_per_token / model.experts
    kv = tuple(
        (
            item.layers * item.token_bytes(resolved.kv_dtype_bytes, resolved.tensor_parallel_size)
            / resolved.pipeline_parallel_size,
            item.window,
        )
        for item in model.attention
        if item.kind != STATE
    )  # fmt: skip
    return Costs(
        dense_bytes=decoder * (1 - expert_share) / ranks,
        expert_bytes=decoder * expert_share / ranks,
        experts=model.experts,
        experts_per_token=model.experts_per_token,
        head_bytes=head / resolved.tensor_parallel_size,
        offloaded_share=min(1.0, offloaded_bytes * ranks / decoder) if decoder else 0.0,
        kv=kv,
        token_flops=2 * model.layers * (attention + dense_mlp + chosen) / ranks,
        head_flops=2 * model.vocab * model.hidden / ranks,
        # A product of query and key and one of weight and value, 2 operations each per element.
        pair_flops=4 * model.layers * model.query_width / ranks,
        layers=-(-model.layers // resolved.pipeline_parallel_size),
        eager=resolved.enforce_eager,
        graph_tokens=0 if resolved.enforce_eager else max(resolved.cudagraph_sizes, default=0),
        graph_full="FULL" in resolved.cudagraph_mode,
        table_bytes=_TABLE_ENTRY_BYTES * -(-resolved.max_model_len // resolved.block_size),
        memory_bytes_s=memory_gb_s * _GIGA,
        # Without an offload only block tables cross the link; any common one will do (PCIe 3.0 x16).
        pcie_bytes_s=(device.pcie_gb_s or 15.8) * _GIGA,
        flops_s=tflops * _TERA,
    )


def _nominal(device: Device) -> tuple[float, float]:
    memory, tflops = device.memory_bandwidth_gb_s, device.fp16_tflops
    if device.kind is DeviceKind.CPU:
        return memory or _CPU_MEMORY_GB_S, tflops or _CPU_TFLOPS
    if memory is None:
        raise BadInput(
            f"the memory bandwidth of {device.name} is not known",
            hint="give memory_bandwidth_gb_s and fp16_tflops in the device file",
        )
    # Data sheets of NVIDIA's cards from T4 to B200 have 75 to 400 operations per byte of bandwidth.
    return memory, tflops or memory * 0.15


def _layer_elements(model: ModelSpec) -> tuple[float, float, float]:
    """Weights of one layer: attention, dense MLP, all experts."""
    h, q, kv = model.hidden, model.query_width, model.kv_heads * model.head_dim
    attention = h * (2 * q + 2 * kv)
    if model.experts > 1:
        return float(attention), 0.0, 3.0 * h * model.expert_intermediate * model.experts
    return float(attention), 3.0 * h * model.intermediate, 0.0


@dataclass(frozen=True)
class Parts:
    """Seconds of one step by what they are spent on; each may be an array over steps."""

    weights: Number
    kv: Number
    compute: Number
    pcie: Number
    launch: Number
    host: Number

    @property
    def device_s(self) -> Number:
        return greatest(self.weights + self.kv, self.compute) + self.pcie

    @property
    def total_s(self) -> Number:
        return greatest(self.device_s, self.launch) + self.host

    def shares(self, steps: Number) -> dict[str, float]:
        """Seconds by bottleneck over `steps` steps of each kind: what hides behind another counts nothing."""
        memory = self.weights + self.kv
        reads = where(memory >= self.compute, 1.0, 0.0)
        idle = greatest(self.launch - self.device_s, 0.0 * self.launch)
        seconds = {
            WEIGHTS_PCIE: self.pcie,
            WEIGHTS_MEMORY: self.weights * reads,
            KV_MEMORY: self.kv * reads,
            COMPUTE: self.compute * (1 - reads),
            HOST: idle + self.host,
        }
        return {name: _total(value * steps) for name, value in seconds.items()}


def _total(value: Number) -> float:
    return float(value.sum() if hasattr(value, "sum") else value)


@dataclass(frozen=True)
class StepModel:
    """Step times of one launch under given rates; a `StepTime` for the scheduler."""

    costs: Costs
    rates: Rates

    def parts(
        self, decodes: Number, prefill_tokens: Number, prefill_pairs: Number, context_tokens: Number,
        sequences: Number,
    ) -> Parts:  # fmt: skip
        """Seconds by cause; arguments as in `StepTime.step_s`, numbers or arrays."""
        c, r = self.costs, self.rates
        tokens = decodes + prefill_tokens
        read = c.dense_bytes + c.expert_bytes * _chosen_share(c, tokens)
        bandwidth = r.memory * c.memory_bytes_s
        if len(c.kv) == 1 and c.kv[0][1] is None:
            kv_bytes = c.kv[0][0] * context_tokens
        else:
            mean = context_tokens / greatest(decodes, 1 + 0 * decodes)
            kv_bytes = sum(
                per_token * decodes * (mean if window is None else least(mean, window + 0 * mean))
                for per_token, window in c.kv
            )
        flops = (
            c.token_flops * tokens
            + c.head_flops * sequences
            + c.pair_flops * (prefill_pairs + context_tokens)
        )
        link = r.pcie * c.pcie_bytes_s
        return Parts(
            weights=(read * (1 - c.offloaded_share) + c.head_bytes) / bandwidth,
            kv=kv_bytes / bandwidth,
            compute=flops / (r.compute * c.flops_s),
            pcie=(read * c.offloaded_share + c.table_bytes * sequences) / link,
            launch=c.layers * r.layer_s * self._launched(prefill_tokens, tokens),
            host=r.step_s + r.sequence_s * sequences,
        )

    def _launched(self, prefill_tokens: Number, tokens: Number) -> Number:
        if self.costs.eager:
            return 1.0 + 0 * tokens
        graph = _PIECEWISE
        if self.costs.graph_full:
            graph = where(prefill_tokens > 0, _PIECEWISE, _FULL_GRAPH)
        return where(tokens <= self.costs.graph_tokens, graph, _COMPILED)

    def step_s(
        self, decodes: int, prefill_tokens: int, prefill_pairs: float, context_tokens: int, sequences: int
    ) -> float:
        return float(self.parts(decodes, prefill_tokens, prefill_pairs, context_tokens, sequences).total_s)

    def span_s(self, decodes: int, context_tokens: int, steps: int) -> float:
        # The context grows by `decodes` a step; a step's time is linear in it but for one kink.
        middle = context_tokens + decodes * (steps - 1) // 2
        return steps * self.step_s(decodes, 0, 0, middle, decodes)


def _chosen_share(costs: Costs, tokens: Number) -> Number:
    """Share of the experts that a batch reads, when each token chooses `k` of `E` at random: the others are
    missed by all tokens, (1 - k/E)^tokens.
    """
    if costs.experts <= 1:
        return 1.0
    return 1 - (1 - costs.experts_per_token / costs.experts) ** tokens
