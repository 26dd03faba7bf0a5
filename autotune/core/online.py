"""What `--quantization` may make of weights that the checkpoint does not bring quantised."""

from __future__ import annotations

from autotune.core.interval import Interval
from autotune.core.launch import Resolved
from autotune.core.model import ModelSpec

#: Names of vLLM 0.6 to 0.33 (model_executor/layers/quantization/__init__.py, `QUANTIZATION_METHODS`) that
#: leave one byte per element of a linear layer; of these vLLM quantises while loading (fp8.py,
#: experts_int8.py, ptpc_fp8.py, online/).
_BYTE = frozenset({
    "fp8", "fbgemm_fp8", "ptpc_fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8",
    "modelopt_mxfp8", "deepseek_v4_fp8", "experts_int8", "int8_per_channel_weight_only", "tpu_int8",
})  # fmt: skip
#: And the others: four bits is the least that bitsandbytes, rtn, nvfp4_per_token and most others store.
_FOUR_BITS = frozenset({
    "awq", "auto_awq", "awq_marlin", "cpu_awq", "gptq", "auto_gptq", "gptq_marlin", "gptq_bitblas",
    "bitblas", "bitsandbytes", "compressed-tensors", "deepspeedfp", "fp_quant", "gpt_oss_mxfp4", "inc",
    "auto-round", "ipex", "modelopt", "modelopt_fp4", "modelopt_mixed", "moe_wna16", "mxfp4",
    "nvfp4_per_token", "petit_nvfp4", "quark", "rtn", "tpu_int4",
})  # fmt: skip
#: Methods of these versions whose own settings go below four bits (2:4 sparse ones, GGUF's IQ types,
#: torchao's intx, a scheme given beside `online`).
_FEWER_BITS = frozenset({
    "aqlm", "gguf", "gptq_marlin_24", "hqq", "humming", "marlin", "neuron_quant", "online", "qqq",
    "squeezellm", "torchao",
})  # fmt: skip
#: The least that one stored element takes, whatever the method.
_LEAST_BITS = 1


def online_method(given: str | None, model: ModelSpec) -> str | None:
    """The method that vLLM quantises with while it loads; None where the checkpoint has its own, or none is
    given (`None` as text is vLLM's way to say so, engine/arg_utils.py `optional_type`).
    """
    if model.quantization is not None or given in (None, "", "None"):
        return None
    return given


def known_method(name: str) -> bool:
    """True for a name that some vLLM from 0.6 to 0.33 has itself; plugins register others."""
    return name.lower() in _BYTE | _FOUR_BITS | _FEWER_BITS


def online_weights(weights: Interval, resolved: Resolved, model: ModelSpec) -> Interval:
    """`weights` of one rank with the least that quantising while loading may leave of them.

    Best guess and upper bound stay: which layers a method leaves out is not known here, and the 16-bit
    tensors may be on the device while they are read. Scales, norms and buffers, which stay, are not
    counted: the bound is a little low. The embedding stays whole (each method of vLLM's own quantises
    `LinearBase` and experts; not where GGUF or a plugin is asked for).
    """
    method = resolved.online_quantization
    if method is None:
        return weights
    whole = 0.0
    if method.lower() in _BYTE | _FOUR_BITS and resolved.pipeline_parallel_size == 1:
        embedding = model.parts["embedding"].size_bytes(resolved.dtype_bytes).low
        whole = min(embedding / resolved.tensor_parallel_size, weights.low)
    return Interval(whole + (weights.low - whole) * _share(resolved), weights.best, weights.high)


def online_decoder(able: Interval, resolved: Resolved) -> Interval:
    """The same of the decoder's layers: all that offloading can move."""
    if resolved.online_quantization is None:
        return able
    return Interval(able.low * _share(resolved), able.best, able.high)


def _share(resolved: Resolved) -> float:
    """Bytes of a quantised element over those of one in the run's dtype."""
    method = (resolved.online_quantization or "").lower()
    bits = 8 if method in _BYTE else 4 if method in _FOUR_BITS else _LEAST_BITS
    return min(1.0, bits / 8 / resolved.dtype_bytes)
