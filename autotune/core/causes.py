"""The bytes of each cause before any launch is known.

Sources: sections 3, 7, 7.1 and 11 of vLLM's memory notes; figures marked "measured" come from the H200
rows (tests/data/recordings) or from launches of examples/tiny-llama on vLLM's CPU backend 0.32.0.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.core.components import Components
from autotune.core.device import Device, DeviceKind
from autotune.core.encoder import EncoderUse
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.numeric import Number, greatest, least
from autotune.core.online import online_decoder, online_weights
from autotune.core.phases import (
    CUBLAS_LARGE_BYTES,
    CUBLAS_SMALL_BYTES,
    LLAMA_LIKE,
    NONE,
    encoder_peak,
    layers_peak,
    logits_peak,
)
from autotune.core.rounding import allocator_rounding
from autotune.core.rules import Rules, runner_of
from autotune.units import GIB, MIB

_ALL = Interval.exact(1.0)

#: Non-torch memory: CUDA modules and library handles. 0.02, 0.07 (twice) and 0.13 GiB (seven times) in public
#: logs, 0.13 on the 4 GB card (2.43 GiB consumed, 2.30 of them weights), 0.22 on the H200; 0.6 leaves
#: room for FlashInfer's 0.39 GiB workspace.
_NON_TORCH = Interval(0.02 * GIB, 0.14 * GIB, 0.6 * GIB)
#: On a Hopper card under 0.26 (torch 2.11, CUDA 13), one rank, dense: 229 to 231 MiB in all 18 started
#: H200 rows, four models, eager and compiled (budget less blocks, weights and the counted peak). The
#: bounds leave room for other kernels (quantisation, KV types) and drivers.
_NON_TORCH_HOPPER_26 = Interval(195 * MIB, 230 * MIB, 275 * MIB)
#: Several ranks add communication buffers (section 2: part of them counts before the snapshot).
_NON_TORCH_PARALLEL = Interval(0.02 * GIB, 0.6 * GIB, 3.0 * GIB)
#: 0.28+ also charges torch segments that stay reserved (section 7: up to 0.02 W + 1 GiB in all).
_FRAGMENTS_HIGH_BYTES, _FRAGMENTS_SHARE = 0.4 * GIB, 0.02
#: Only datacentre cards from Hopper on have this much, and A100-80G, whose workspace is in the bounds.
_HOPPER_BYTES = 70 * GIB
#: Between these only Hopper cards are: H200, H20 and GH200, 139 to 144 GiB.
_HOPPER_ALONE_BYTES = 130 * GIB, 150 * GIB
#: And only Hopper and datacentre Blackwell have this much.
_LARGE_BYTES = 100 * GIB

#: CUDA graphs: 1 MiB is the estimate's own floor per graph (section 3.3); measured 7.7 and 6.9 MiB per
#: graph of H200 rows a13 (12 graphs, 0.09 GiB) and l6 (87 graphs, 0.59 GiB).
PER_GRAPH_BYTES = Interval(1 * MIB, 7 * MIB, 30 * MIB)
FIRST_GRAPH_BYTES = 128 * MIB

#: MLA's chunked-prefill workspace: C tokens x heads x (nope + v) elements (section 7); 128 + 128 in
#: DeepSeek's models, up to 512 elsewhere.
_MLA_HEAD_ELEMENTS = Interval(0, 256, 512)
_MLA_WORKSPACE_TOKENS = 65536

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
    encoder: EncoderUse | None = None,
) -> Components:
    """The causes for one configuration, as far as they can be known before a launch.

    The options gmu, length, S and T of `resolved` may be arrays; so are the bounds then.

    Args:
        tower_share: 0 when no encoder is built, 1 when it is, between when that is not known.
        encoder: what else the options say of encoders; `tower_share` alone without it.
    """
    use = encoder or EncoderUse(built=tower_share)
    if device.kind is DeviceKind.CPU:
        return _on_cpu(resolved, model, rules, use)
    return _on_cuda(resolved, model, device, rules, use)


def _on_cuda(
    resolved: Resolved, model: ModelSpec, device: Device, rules: Rules, use: EncoderUse
) -> Components:
    runner = runner_of(model, device, rules)
    offloaded = offloaded_prior(resolved, model, runner, rules)
    workspace = _cublas(model, device)
    peak, outputs = encoder_peak(resolved, model, runner, rules, use)
    if peak is not NONE:
        peak = peak + Interval(0.0, 0.0, workspace.high)
    layers, forward, compiling = layers_peak(resolved, model, rules, workspace=workspace)
    return Components(
        weights=online_weights(_weights(resolved, model, use.built), resolved, model),
        rounding=allocator_rounding(
            resolved, model, offloaded, rules, hopper=_machete(device), towers=use.built.high > 0
        ),
        offloaded=offloaded,
        layers=layers,
        forward=forward,
        compiling=compiling,
        kept=outputs,
        logits=logits_peak(resolved, model, runner, rules, workspace=workspace),
        encoder=peak,
        persistent=_persistent(resolved, model, runner, rules),
        base=_non_torch(resolved, model, device, rules),
        cudagraph=_graphs(resolved, runner, rules),
    )


def is_hopper(device: Device) -> bool:
    """Compute capability 9.x, or as much memory as only datacentre cards have when it is not known."""
    if device.capability:
        return device.capability[0] == 9
    return bool(device.total.best >= _HOPPER_BYTES and "a100" not in device.name.lower())


def _machete(device: Device) -> Interval:
    """1 where vLLM picks the Machete kernel for packed weights: compute capability 9.0 alone."""
    if device.capability is not None:
        return Interval.exact(1.0 if device.capability == (9, 0) else 0.0)
    low, high = _HOPPER_ALONE_BYTES
    if low <= device.total.low and device.total.high <= high:
        return Interval.exact(1.0)
    return Interval(0.0, 1.0, 1.0) if is_hopper(device) else Interval.exact(0.0)


def _cublas(model: ModelSpec, device: Device) -> Interval:
    """cuBLAS's workspace, and a second one for matrices with a bias."""
    capability = device.capability
    large = is_hopper(device) or bool(capability and capability[0] == 10)
    size = CUBLAS_LARGE_BYTES if large else CUBLAS_SMALL_BYTES
    biased = model.family.startswith("qwen2") or model.family not in LLAMA_LIKE
    high = size * (2 if biased else 1)
    known = capability is not None or device.total.low >= _LARGE_BYTES
    return Interval(float(size if known else 0), size, max(high, CUBLAS_SMALL_BYTES * 4))


def _non_torch(resolved: Resolved, model: ModelSpec, device: Device, rules: Rules) -> Interval:
    ranks = resolved.tensor_parallel_size * resolved.pipeline_parallel_size
    base = _NON_TORCH if ranks == 1 else _NON_TORCH_PARALLEL
    if ranks == 1 and rules.certain and rules.column == "0.26" and is_hopper(device) and model.experts == 1:
        base = _NON_TORCH_HOPPER_26
    if not rules.start_check and rules.engine == "V1":
        # 0.8: everything in use on the device counts, whoever holds it (v1/worker/gpu_worker.py).
        base = base + (device.total - device.free).clamp_low(0.0)
    if rules.drop_formula:
        weights = model.weight_bytes(resolved.dtype_bytes, tensor_parallel=resolved.tensor_parallel_size)
        base = base + Interval(0.0, 0.0, _FRAGMENTS_HIGH_BYTES + _FRAGMENTS_SHARE * weights.best)
    if not rules.certain:
        base = Interval(0.0, base.best, base.high * 1.5)
    return base


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
    (section 8). 0.30+ may take the towers' too.
    """
    asked = resolved.cpu_offload_gb * GIB
    if asked <= 0:
        return NONE
    able = model.decoder_bytes(
        resolved.dtype_bytes,
        tensor_parallel=resolved.tensor_parallel_size,
        pipeline_parallel=resolved.pipeline_parallel_size,
    )
    able = online_decoder(able, resolved)
    cap_high = able.high
    if rules.offload_towers:
        cap_high += model.parts["tower"].size_bytes(resolved.dtype_bytes).high
    largest = model.largest_parameter_bytes(resolved.dtype_bytes, towers=rules.offload_towers)
    overshoot = largest / resolved.tensor_parallel_size
    high = min(asked + overshoot, cap_high)
    sure = rules.certain and (runner != "V2" or rules.offload_v2 == "works")
    low = min(asked, able.low) if sure else 0.0
    return Interval(low, min(max(low, min(asked, able.best)), high), high)


def _persistent(resolved: Resolved, model: ModelSpec, runner: str, rules: Rules) -> Interval:
    """Buffers that outlive profiling but are made after loading: charged from 0.28 on, by the drop in
    free memory. Runner V2's sampler state on the last stage: S × (4V + 4·ceil(V/32) + 18 KB); the
    runner's inputs, and its embeddings of T rows for multimodal models; expert and MLA workspaces.
    """
    if not rules.drop_formula and rules.certain:
        return NONE
    seqs, tokens = resolved.max_num_seqs, resolved.max_num_batched_tokens
    state: Number = 0.0
    if runner == "V2":
        state = seqs * (4.0 * model.vocab + 4 * -(-model.vocab // 32) + 18_000)
    embeddings = tokens * (model.hidden * resolved.dtype_bytes) if model.multimodal else 0.0 * tokens
    last = 1.0 if rules.certain and resolved.pipeline_parallel_size == 1 else 0.0
    low, best, high = state * (0.9 * last), state, state * 1.1
    low, best, high = low + embeddings * last, best + embeddings, high + embeddings + 64.0 * tokens + 2 * MIB
    mla = _mla_workspace(resolved, model)
    return Interval(low, best, high) + mla


def _mla_workspace(resolved: Resolved, model: ModelSpec) -> Interval:
    if not any(item.kind == "mla" for item in model.attention):
        return NONE
    length, seqs = resolved.max_model_len, resolved.max_num_seqs
    tokens = least(greatest(8 * length, 4 * seqs * resolved.block_size), _MLA_WORKSPACE_TOKENS)
    scale = tokens * (model.heads / resolved.tensor_parallel_size * resolved.dtype_bytes)
    return Interval(
        _MLA_HEAD_ELEMENTS.low * scale, _MLA_HEAD_ELEMENTS.best * scale, _MLA_HEAD_ELEMENTS.high * scale
    )


def graph_count(resolved: Resolved) -> Number:
    """PIECEWISE graphs, one per size, and FULL ones, one per size up to S (section 3.3)."""
    counted = getattr(resolved, "graph_count", None)
    if counted is not None:  # columns of many configurations (vllm/batch.py)
        return counted
    sizes = resolved.cudagraph_sizes
    return len(sizes) + sum(1 for size in sizes if size <= resolved.max_num_seqs)


def _graphs(resolved: Resolved, runner: str, rules: Rules) -> Interval:
    """What the CUDA-graph estimate takes from the pool."""
    taken = rules.graphs_v2 if runner == "V2" else rules.graphs_v1
    graphs = graph_count(resolved)
    if resolved.enforce_eager or (not taken and rules.certain):
        return NONE
    some = graphs > 0
    high = graphs * PER_GRAPH_BYTES.high + FIRST_GRAPH_BYTES * some
    # Without FULL graphs, half as many, of which two are captured in full.
    low = greatest(0, graphs / 2 - 2) * PER_GRAPH_BYTES.low if rules.certain else 0.0 * graphs
    return Interval(low, (graphs * PER_GRAPH_BYTES.best if taken else low), high)


def _on_cpu(resolved: Resolved, model: ModelSpec, rules: Rules, use: EncoderUse) -> Components:
    """Resident bytes of one worker: the CPU backend's non-KV (section 11)."""
    weights = online_weights(_weights(resolved, model, use.built), resolved, model)
    weights = Interval(
        weights.low * _CPU_WEIGHTS.low,
        weights.best * _CPU_WEIGHTS.best,
        weights.high * _CPU_WEIGHTS.high,
    )
    size = resolved.dtype_bytes
    rows = least(resolved.max_num_batched_tokens, resolved.max_num_seqs)
    # The forward itself, as on CUDA without compilation; then logits and the sampler's fp32 copies.
    eager = resolved if resolved.enforce_eager else replace(resolved, enforce_eager=True)
    forward, _, _ = layers_peak(eager, model, rules, workspace=NONE)
    logits = Interval(0.0 * rows, rows * (model.vocab * size), rows * (model.vocab * (size + 24.0)))
    layers = Interval(
        forward.low * _CPU_KEPT.low, forward.best * _CPU_KEPT.best, forward.high * _CPU_KEPT.high
    )
    if resolved.enforce_eager:
        # No profile forward on runner V1; V2 (with a Triton for CPUs) would do one.
        layers = Interval(0.0 * layers.high, 0.0 * layers.high, layers.high)
        logits = Interval(0.0 * logits.high, 0.0 * logits.high, logits.high)
    # Token-id table of S x L ids of 4 bytes and a byte of mask, touched or not; two input buffers of T
    # rows (eager, 7680 tokens more: 20 MiB measured, 22.5 in the buffers).
    table = 5.0 * resolved.max_num_seqs * resolved.max_model_len
    inputs = resolved.max_num_batched_tokens * (2.0 * model.hidden * size + 64)
    state = 4.0 * model.vocab * resolved.max_num_seqs
    encoder, _ = encoder_peak(resolved, model, "V1", rules, use)
    return Components(
        weights=weights,
        rounding=NONE,
        offloaded=NONE,
        layers=layers,
        logits=logits,
        encoder=Interval(0.0 * encoder.low, 0.0 * encoder.best, encoder.high),
        persistent=Interval(0.0, table + 0.8 * inputs, 1.5 * table + 1.5 * inputs + state),
        base=_CPU_BASE_EAGER if resolved.enforce_eager else _CPU_BASE_COMPILED,
        cudagraph=NONE,
    )
