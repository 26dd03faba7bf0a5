"""The bytes of each cause before any launch is known.

Sources: sections 3, 7, 7.1 and 11 of vLLM's memory notes; figures marked "measured" come from the H200
rows (tests/data/recordings) or from launches of examples/tiny-llama on vLLM's CPU backend 0.32.0.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.core.components import Components, runner_of
from autotune.core.device import Device, DeviceKind
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.rules import Rules
from autotune.units import GIB, MIB

_NONE = Interval.exact(0.0)
_ALL = Interval.exact(1.0)

#: Loading AWQ/GPTQ through Marlin leaves a repacking peak in the load figure (section 7.1: about 65
#: MiB).
_REPACKING = Interval(0.0, 65 * MIB, 96 * MIB)
#: Non-torch memory: CUDA modules and library handles. Measured 0.22 GiB on the H200, 0.18 on the 4 GB
#: card (2611 MiB less weights and activation); 0.02 is the least that public 0.11 logs show; 0.6 leaves
#: room for FlashInfer's 0.39 GiB workspace.
_NON_TORCH = Interval(0.02 * GIB, 0.22 * GIB, 0.6 * GIB)
#: Several ranks add communication buffers (section 2: part of them counts before the snapshot).
_NON_TORCH_PARALLEL = Interval(0.02 * GIB, 0.6 * GIB, 3.0 * GIB)
#: 0.28+ also charges torch segments that stay reserved (section 7: up to 0.02 W + 1 GiB in all).
_FRAGMENTS_HIGH_BYTES, _FRAGMENTS_SHARE = 0.4 * GIB, 0.02
#: cuBLAS keeps a workspace inside the torch peak: 32 MiB on Hopper when GEMMs are unquantised, about
#: 6 MiB otherwise (section 7.1; rows a1, a2, v5: the logged peak less T x (3I + 3h) x 2).
_CUBLAS_HOPPER = Interval(0.0, 32 * MIB, 48 * MIB)
_CUBLAS = Interval(0.0, 6 * MIB, 48 * MIB)
#: Only datacentre cards from Hopper on have this much, and A100-80G, whose workspace is in the bounds.
_HOPPER_BYTES = 70 * GIB
#: Compiled, cold cache: the peak is one embedding table and 10 to 15 MiB per 1024 tokens (section 7.1,
#: rows a13 and l6: h = 2048 and 4096, so it is not known what it scales with).
_COMPILED_PER_TOKEN = Interval(10 * MIB / 1024, 12.5 * MIB / 1024, 20 * MIB / 1024)
#: CUDA graphs: 1 MiB is the estimate's own floor per graph (section 3.3); measured 7.7 and 6.9 MiB per
#: graph of H200 rows a13 (12 graphs, 0.09 GiB) and l6 (87 graphs, 0.59 GiB).
_PER_GRAPH = Interval(1 * MIB, 7 * MIB, 30 * MIB)
_FIRST_GRAPH_HIGH_BYTES = 128 * MIB

#: CPU worker, resident bytes less weights at small T and S: 0.57 to 0.62 GiB eager, 0.64 to 0.68
#: compiled (twelve launches of examples/tiny-llama). Another build of torch, or more threads, moves it.
_CPU_BASE_EAGER = Interval(0.40 * GIB, 0.60 * GIB, 1.2 * GIB)
_CPU_BASE_COMPILED = Interval(0.45 * GIB, 0.66 * GIB, 1.5 * GIB)
#: Weights in resident memory: from bfloat16 to float32 it grew by 1.35 (eager, 0.71 to 0.84 GiB) and
#: 1.45 (compiled, 0.79 to 0.93) times the 99 MiB of the tensors: packed copies for oneDNN. 2 is both
#: copies in full.
_CPU_WEIGHTS = Interval(1.0, 1.4, 2.0)
#: Part of the profile forward's peak that stays resident (compiled only; the V1 CPU runner does no
#: forward when eager). Measured, against T x (3I + 3h): bfloat16, 1536 tokens more 0 of 25 MiB, 7680
#: more 143 of 124; float32, 3584 more 113 of 115.
_CPU_KEPT = Interval(0.0, 0.9, 1.6)


def components(
    resolved: Resolved,
    model: ModelSpec,
    device: Device,
    rules: Rules,
    *,
    tower_share: Interval = _ALL,
) -> Components:
    """The causes for one configuration, as far as they can be known before a launch.

    Args:
        tower_share: 0 when no encoder is built, 1 when it is, between when that is not known.
    """
    if device.kind is DeviceKind.CPU:
        return _on_cpu(resolved, model, tower_share)
    return _on_cuda(resolved, model, device, rules, tower_share)


def _on_cuda(
    resolved: Resolved, model: ModelSpec, device: Device, rules: Rules, tower_share: Interval
) -> Components:
    tp, pp = resolved.tensor_parallel_size, resolved.pipeline_parallel_size
    runner = runner_of(model, device, rules)
    weights = _weights(resolved, model, tower_share)
    if model.quantization and model.quantization.startswith(("awq", "gptq", "auto")):
        repacking = _REPACKING
        if rules.drop_formula:  # freed before the snapshot, unless it stays as a fragment
            repacking = Interval(0.0, 0.0, repacking.high)
        weights = weights + repacking
    base = _NON_TORCH if tp * pp == 1 else _NON_TORCH_PARALLEL
    if rules.drop_formula:
        base = base + Interval(0.0, 0.0, _FRAGMENTS_HIGH_BYTES + _FRAGMENTS_SHARE * weights.best)
    if not rules.certain:
        base = Interval(0.0, base.best, base.high * 1.5)
    hopper = (
        device.compute_capability[0] == 9 if device.compute_capability else device.total.best >= _HOPPER_BYTES
    )
    return Components(
        weights=weights,
        offloaded=offloaded_prior(resolved, model, runner, rules),
        layers=_layers_peak(resolved, model),
        logits=_logits_peak(resolved, model, runner, rules),
        encoder=_encoder_peak(resolved, model, tower_share),
        workspace=_CUBLAS_HOPPER if hopper and not model.quantized else _CUBLAS,
        persistent=_sampler_state(resolved, model, runner, rules),
        base=base,
        cudagraph=_graphs(resolved, runner, rules),
    )


def _weights(resolved: Resolved, model: ModelSpec, tower_share: Interval) -> Interval:
    tp, pp = resolved.tensor_parallel_size, resolved.pipeline_parallel_size
    full = model.weight_bytes(resolved.dtype_bytes, tensor_parallel=tp, pipeline_parallel=pp)
    if not model.multimodal or tower_share.low == 1.0:
        return full
    bare = model.weight_bytes(resolved.dtype_bytes, tensor_parallel=tp, pipeline_parallel=pp, towers=False)
    tower = full - bare.best
    return Interval(
        bare.low + max(0.0, tower.low) * tower_share.low,
        bare.best + max(0.0, tower.best) * tower_share.best,
        bare.high + max(0.0, tower.high) * tower_share.high,
    )


def offloaded_prior(resolved: Resolved, model: ModelSpec, runner: str, rules: Rules) -> Interval:
    """Bytes that leave the device: whole parameters until G GiB are reached, decoder layers only
    (section 8). 0.32+ may take the towers' too.
    """
    asked = resolved.cpu_offload_gb * GIB
    if asked <= 0:
        return _NONE
    able = model.decoder_bytes(
        resolved.dtype_bytes,
        tensor_parallel=resolved.tensor_parallel_size,
        pipeline_parallel=resolved.pipeline_parallel_size,
    )
    cap_high = able.high
    if rules.column in ("0.32", "0.33"):
        cap_high += model.parts["tower"].size_bytes(resolved.dtype_bytes).high
    overshoot = model.largest_layer_parameter_bytes / resolved.tensor_parallel_size
    high = min(asked + overshoot, cap_high)
    sure = rules.certain and (runner == "V1" or rules.offload_v2 == "works")
    low = min(asked, able.low) if sure else 0.0
    return Interval(low, min(max(low, min(asked, able.best)), high), high)


def _layers_peak(resolved: Resolved, model: ModelSpec) -> Interval:
    """Peak of the decoder on T tokens.

    Eager, section 7: best (3I + 3h + what q is wider than h) × bytes per token, between
    `2h + max(2I, q + 2kv + h)` and `4h + 3I + 2(q + 2kv)`; experts add their workspace.
    """
    tp, size = resolved.tensor_parallel_size, resolved.dtype_bytes
    tokens = resolved.max_num_batched_tokens
    h, inter = model.hidden, model.intermediate / tp
    q = model.query_width / tp
    qkv = q + 2 * max(1.0, model.kv_heads / tp) * model.head_dim
    low = 2 * h + max(2 * inter, qkv + h)
    best = 3 * inter + 3 * h + max(0.0, q - h)
    high = max(best, 4 * h + 3 * inter + 2 * qkv)
    if model.experts > 1:
        width, top = model.expert_intermediate / tp, model.experts_per_token
        moe = top * max(width, h) + top * max(2 * width, h) + 2 * h
        low, best, high = min(low, moe), moe, max(high, 2 * moe)
    eager = Interval(low, max(low, best), max(high, best)).scale(size * tokens)
    if resolved.enforce_eager:
        return eager
    table = model.vocab * h * size / tp
    cold = _COMPILED_PER_TOKEN.scale(tokens) + table
    # A warm cache was not measured: between half of the least eager peak and the cold one.
    return Interval(min(eager.low * 0.5, cold.low), cold.best, max(cold.high, eager.high))


def _logits_peak(resolved: Resolved, model: ModelSpec, runner: str, rules: Rules) -> Interval:
    """Peak of logits and sampler on R = min(T, S) rows of vocab width (section 7)."""
    rows = min(resolved.max_num_batched_tokens, resolved.max_num_seqs)
    width, size = rows * model.vocab, resolved.dtype_bytes
    gathered = size if resolved.tensor_parallel_size > 1 else 0
    low, best, high = size, size + gathered, size + gathered
    if runner == "V1":
        # fp32 logits and probabilities; sorting for top-k/p may add 16 bytes an element.
        best, high = best + 8, high + 24
    elif rules.column == "0.33" or not rules.certain:
        best, high = best + 8, high + 12
    else:
        high += 8
    return Interval(low * width, best * width, high * width)


def _encoder_peak(resolved: Resolved, model: ModelSpec, tower_share: Interval) -> Interval:
    """Peak of the encoder on one profiled item. Its size is a processor's setting, so the least is
    none; the most is an image of 16384 tokens (Qwen2-VL's default `max_pixels`), or T if more.
    """
    if not model.multimodal or tower_share.high == 0.0:
        return _NONE
    patches = max(16384, resolved.max_num_batched_tokens) * model.vision_merge**2
    width = 3 * model.vision_intermediate + 3 * model.vision_hidden
    outputs = max(16384, resolved.max_num_batched_tokens) * model.hidden
    high = (patches * width + outputs) * resolved.dtype_bytes
    return Interval(0.0, 0.0, high)


def _sampler_state(resolved: Resolved, model: ModelSpec, runner: str, rules: Rules) -> Interval:
    """Runner V2 under the 0.28+ formula: S × (4V + 4·ceil(V/32) + 18 KB), on the last stage."""
    if runner != "V2" or not (rules.drop_formula or not rules.certain):
        return _NONE
    state = resolved.max_num_seqs * (4 * model.vocab + 4 * -(-model.vocab // 32) + 18_000)
    low = state if rules.certain and rules.drop_formula and resolved.pipeline_parallel_size == 1 else 0.0
    return Interval(low * 0.9, state, state * 1.1)


def _graphs(resolved: Resolved, runner: str, rules: Rules) -> Interval:
    """What the CUDA-graph estimate takes from the pool: one PIECEWISE graph per size, one FULL graph per
    size up to S (section 3.3).
    """
    sizes = resolved.cudagraph_sizes
    counted = rules.graphs_v2 if runner == "V2" else rules.graphs_v1
    if not sizes or (not counted and rules.certain):
        return _NONE
    graphs = len(sizes) + sum(1 for size in sizes if size <= resolved.max_num_seqs)
    high = graphs * _PER_GRAPH.high + _FIRST_GRAPH_HIGH_BYTES
    low = max(0, len(sizes) - 2) * _PER_GRAPH.low if rules.certain else 0.0
    return Interval(low, (graphs * _PER_GRAPH.best if counted else 0.0), high)


def _on_cpu(resolved: Resolved, model: ModelSpec, tower_share: Interval) -> Components:
    """Resident bytes of one worker: the CPU backend's non-KV (section 11)."""
    weights = _weights(resolved, model, tower_share)
    weights = Interval(
        weights.low * _CPU_WEIGHTS.low,
        weights.best * _CPU_WEIGHTS.best,
        weights.high * _CPU_WEIGHTS.high,
    )
    size, rows = resolved.dtype_bytes, min(resolved.max_num_batched_tokens, resolved.max_num_seqs)
    # The forward itself, as on CUDA without compilation; then logits and the sampler's fp32 copies.
    eager = _without_compilation(resolved)
    forward = _layers_peak(eager, model)
    logits = Interval(0.0, rows * model.vocab * size, rows * model.vocab * (size + 24.0))
    layers = Interval(
        forward.low * _CPU_KEPT.low, forward.best * _CPU_KEPT.best, forward.high * _CPU_KEPT.high
    )
    if resolved.enforce_eager:
        # No profile forward on runner V1; V2 (with a Triton for CPUs) would do one.
        layers = Interval(0.0, 0.0, layers.high)
        logits = Interval(0.0, 0.0, logits.high)
    # Token-id table of S x L ids of 4 bytes and a byte of mask, touched or not; two input buffers of T
    # rows (eager, 7680 tokens more: 20 MiB measured, 22.5 in the buffers).
    table = 5.0 * resolved.max_num_seqs * resolved.max_model_len
    inputs = resolved.max_num_batched_tokens * (2.0 * model.hidden * size + 64)
    state = 4.0 * model.vocab * resolved.max_num_seqs
    return Components(
        weights=weights,
        offloaded=_NONE,
        layers=layers,
        logits=logits,
        encoder=_encoder_peak(resolved, model, tower_share),
        workspace=_NONE,
        persistent=Interval(0.0, table + 0.8 * inputs, 1.5 * table + 1.5 * inputs + state),
        base=_CPU_BASE_EAGER if resolved.enforce_eager else _CPU_BASE_COMPILED,
        cudagraph=_NONE,
    )


def _without_compilation(resolved: Resolved) -> Resolved:
    """The same launch without compilation."""
    return resolved if resolved.enforce_eager else replace(resolved, enforce_eager=True)
