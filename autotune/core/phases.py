"""The peaks of one profile forward: decoder layers, logits with the sampler, the multimodal encoder.

Counted from the order in which vLLM's modules create and drop tensors (model_executor/models/qwen2.py,
llama.py, qwen2_5_vl.py; v1/worker/gpu/model_runner.py `profile_run`), and checked against logged peaks.
"""

from __future__ import annotations

from autotune.core.encoder import KNOWN_PROCESSORS, EncoderUse, profiled_tokens
from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec
from autotune.core.numeric import Number, greatest, least
from autotune.core.rules import Rules
from autotune.units import KIB, MIB

NONE = Interval.exact(0.0)

#: Families whose layer is norm, fused qkv, attention, norm, fused gate-and-up, act, down, with norms
#: that add the residual in place: what is alive together was counted for them.
LLAMA_LIKE = {
    "llama", "mistral", "ministral", "qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "phi3",
    "smollm3", "internlm2", "internlm3", "seed_oss", "mimo", "ernie4_5",
}  # fmt: skip
#: Of these, the ones whose MLP drops gate and up before `down` writes (LlamaMLP names both `x`).
_GATE_DROPPED = {"llama", "mistral", "ministral", "phi3", "internlm3", "ernie4_5"}
#: q and k get norms of their own, out of place: two tensors more in the attention phase.
_QK_NORM = {"qwen3", "qwen3_vl", "olmo2", "gemma3"}
#: Rounding of torch's allocator: a block of more than 1 MiB may carry up to 1 MiB too much; 8 such
#: tensors are alive at once.
_BLOCKS_BYTES = 8 * MIB
#: Relative doubt of a counted peak: 16 logged or derived peaks of 0.26 agree within 0.6 %.
_COUNTED = 0.015

#: Compiled, cold cache: one embedding table and two tensors of T x h more, while the first piece is
#: compiled: 8 of 7.5 MiB in row a13 (Qwen2.5-3B-AWQ, 1024 tokens) and 32 of 31 in l6 (Llama-3.1-8B, 2048).
_COMPILED_COPIES = Interval(1.0, 2.0, 5.0)

#: cuBLAS's workspace inside torch's memory (aten/src/ATen/cuda/CublasHandlePool.cpp): 4096 KiB x 8 on
#: Hopper and datacentre Blackwell, 4096 KiB x 2 + 16 KiB x 8 elsewhere; a second one for fused biases
#: where cuBLASLt keeps its own.
CUBLAS_LARGE_BYTES, CUBLAS_SMALL_BYTES = 32 * MIB, 8320 * KIB


def layers_peak(
    resolved: Resolved, model: ModelSpec, rules: Rules, *, workspace: Interval
) -> tuple[Interval, Interval, Number]:
    """Peak of the decoder on T tokens; the same when nothing is compiled in the launch (eager, or a warm
    compile cache); and the least that compiling takes, 0 when eager.

    Args:
        workspace: cuBLAS's, alive when an unquantised matrix was multiplied before.
    """
    eager = _eager(resolved, model, rules)
    if not model.quantized:
        eager = eager + workspace
    elif not fully_packed(model):
        # Some layer may be left unquantised (`modules_to_not_convert`).
        eager = eager + Interval(0.0, 0.0, workspace.best)
    if resolved.enforce_eager:
        return eager, eager, 0.0
    tokens, size = resolved.max_num_batched_tokens, resolved.dtype_bytes
    # A warm cache: generated kernels keep at least gate, up, their product and the residual.
    low = least(0.9 * (3 * _width(model, resolved) + model.hidden) * size * tokens, eager.low)
    warm = Interval(low, eager.best, eager.high)
    table = model.vocab * model.hidden * size / resolved.tensor_parallel_size
    cold = _COMPILED_COPIES.scale(tokens * (model.hidden * size)) + table
    # Only the two rows of 0.26 had the table: five launches of 0.10, four of 0.17 and eight of 0.28 (public
    # cases cloudera-qwen2-7b-*, tb-llama8b-*, sgvlm-*) had not, of whom some must have compiled.
    best = greatest(cold.best, eager.best) if minor_of(rules) == 26 else eager.best
    either = Interval(low, best, greatest(cold.high + workspace.high, eager.high))
    return either, warm, cold.low


def minor_of(rules: Rules) -> int:
    """26 for the rules of 0.26."""
    return int(rules.column.split(".")[1])


def fully_packed(model: ModelSpec) -> bool:
    """Every matrix of the decoder is quantised by a kernel of its own (Marlin), so that cuBLAS has no part
    in its layers: what is left in the run's type are norms, biases and scales, a few percent.
    """
    decoder = model.parts["decoder_layers"]
    method = model.quantization or ""
    return method.startswith(("awq", "gptq", "auto")) and (
        decoder.elements.high * 2 <= 0.15 * decoder.packed_bytes.low
    )


def _width(model: ModelSpec, resolved: Resolved) -> float:
    """MLP width on one rank; of the experts that one token meets, in MoE layers."""
    tp = resolved.tensor_parallel_size
    if model.experts > 1:
        return min(model.intermediate, model.expert_intermediate * model.experts_per_token) / tp
    return model.intermediate / tp


def _eager(resolved: Resolved, model: ModelSpec, rules: Rules) -> Interval:
    """What is alive at once, in elements per token, times T.

    MLP: the layer's input, the residual, the MLP's input (3 h), gate and up (2 I) and their product (I);
    while `down` writes also its output (h), unless gate and up are dropped by then. A multimodal
    model's residual lives in the runner's own embeddings buffer, allocated before profiling: h less.
    Attention: the layer's input, the residual, the output, q, k, v, the normed q and k, and the
    attention output.
    """
    tp, size, tokens = resolved.tensor_parallel_size, resolved.dtype_bytes, resolved.max_num_batched_tokens
    h, inter = model.hidden, model.intermediate / tp
    q = model.query_width / tp
    kv = max(1.0, model.kv_heads / tp) * model.head_dim
    buffered = 1 if model.multimodal and resolved.pipeline_parallel_size == 1 else 0
    normed = q + kv if model.family in _QK_NORM else 0.0
    attention = (3 - buffered) * h + 2 * q + 2 * kv + normed
    mlp = 3 * inter + ((3 if model.family in _GATE_DROPPED else 4) - buffered) * h
    best = max(mlp, attention)
    counted = (
        model.family in LLAMA_LIKE and model.experts == 1 and tp == 1
        and resolved.pipeline_parallel_size == 1 and rules.certain and rules.engine != "V0"
    )  # fmt: skip
    if counted:
        low, high = best * (1 - _COUNTED), best * (1 + _COUNTED)
    else:
        # Section 7: between perfect reuse and none; all-reduce may write a second output.
        qkv = q + 2 * kv
        low = min(0.95 * best, 2 * h + max(2 * inter, qkv + h))
        high = max(best + 2 * h, 4 * h + 3 * inter + 2 * qkv)
    if model.experts > 1:
        low, best, high = _experts(model, tp, h, low, best, high)
    scaled = Interval(low, max(low, best), max(high, best)).scale(size * tokens)
    return scaled + Interval(0.0, 0.0, _BLOCKS_BYTES)


def _experts(
    model: ModelSpec, tp: int, h: int, low: float, best: float, high: float
) -> tuple[float, float, float]:
    """Section 7: the Triton experts' two workspaces and outputs; DeepGEMM pads rows per expert."""
    width, top = model.expert_intermediate / tp, model.experts_per_token
    moe = top * max(width, h) + top * max(2 * width, h) + 2 * h
    # Dense layers, where there are any, are as wide as `intermediate`; else it names the expert.
    return min(low, 0.5 * moe), max(moe, min(best, 4 * moe)), max(high, 2 * moe)


def logits_peak(
    resolved: Resolved, model: ModelSpec, runner: str, rules: Rules, *, workspace: Interval
) -> Interval:
    """Peak of logits and sampler on R = min(T, S) rows of vocab width, hidden states still alive.

    Runner V1 copies logits to fp32 and runs top-k/top-p on them: by sorting (38.5 bytes an element: 1024
    rows took 5.56 to 7.38 GiB in public cases planner-h100-*), by FlashInfer where it is installed (up
    to 0.11; 17 bytes: planner-h100-mistral-small-32-24b) or by Triton (0.17+, v1/sample/ops/
    topk_topp_sampler.py). Runner V2's first pass samples from the logits as they are, with one block of
    1024 entries giving 12 bytes of argmax; 0.33 adds a pass with every feature on fp32 copies.
    """
    tokens, tp = resolved.max_num_batched_tokens, resolved.tensor_parallel_size
    rows = least(tokens, resolved.max_num_seqs)
    size = resolved.dtype_bytes
    hidden = (tokens + rows) * (model.hidden * size)
    gathered = size if tp > 1 else 0
    low, best, high = float(size), float(size + gathered), float(size + gathered)
    if runner != "V2":
        low = low + 4 * (size < 4)
        if minor_of(rules) >= 17:
            best, high = best + 8, high + 12
        else:
            best, high = (38.5 if minor_of(rules) == 13 else 17.0), 42.0
    elif rules.sampler_second_pass:
        low, best, high = low + 4 * (size < 4), best + 8, high + 20
    if not rules.certain:
        high = max(high, 42.0)
    # 12 bytes per 1024 entries, a copy of a soft-capped model's logits.
    high += 12 / 1024 + (size if model.family.startswith(("gemma", "grok")) else 0)
    width = rows * model.vocab
    stage = 1.0 if resolved.pipeline_parallel_size == 1 else 0.0
    peak = Interval(
        (low * width + hidden) * stage, best * width + hidden, high * width + hidden + _BLOCKS_BYTES
    )
    return peak + Interval(workspace.low, workspace.best, workspace.best)


def encoder_peak(
    resolved: Resolved, model: ModelSpec, runner: str, rules: Rules, use: EncoderUse
) -> tuple[Interval, Interval]:
    """Peak of the multimodal encoder while profiling, and its outputs that stay alive afterwards.

    A block of Qwen2.5-VL keeps per patch: input, norm, qkv, q and k contiguous and rotated, the attention
    output twice (11 h), or the MLP's input, residual and output and 3 I; pixels come as 3 x 2 x 14 x 14
    values of the model's type. On the 4 GB card 3584 patches took 95 to 110 MiB (public case
    sgvlm-3b-off1-gmu080: 0.12 GiB less 0.02 of graphs), 109 by this.
    """
    profiled = runner != "V2" or rules.v2_profiles_encoder
    if not model.multimodal or use.built.high == 0.0 or use.skipped or not profiled:
        return NONE, NONE
    tokens = profiled_tokens(resolved, model, use)
    wide = max(11 * model.vision_hidden, 3 * model.vision_intermediate + 3 * model.vision_hidden)
    per_token = model.vision_merge**2 * (wide + 1176) * resolved.dtype_bytes
    share = 1.0 if model.family in KNOWN_PROCESSORS and rules.certain else 0.0
    peak = Interval(
        tokens.low * per_token * 0.5 * share * use.built.low,
        tokens.best * per_token * use.built.best,
        tokens.high * per_token * 1.6,
    )
    outputs = tokens.scale(model.hidden * resolved.dtype_bytes)
    return peak, Interval(outputs.low * share * use.built.low, outputs.best * use.built.best, outputs.high)
