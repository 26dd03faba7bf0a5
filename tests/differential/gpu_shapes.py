"""Lets the CPU wheel of vLLM build the layers it would build on a GPU: only shapes are asked for, so a
kernel may be promised that this machine could not run.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from typing import Any

#: Which back end vLLM is told it has, per kind of quantised experts: the one a Hopper card takes first or
#: that every card has. MXFP4's choice decides padding, so it can be set per job.
MOE_BACKENDS = {
    "fp8": ("select_fp8_moe_backend", "Fp8MoeBackend", "TRITON"),
    "int8": ("select_int8_moe_backend", "Int8MoeBackend", "TRITON"),
    "int_wna16": ("select_wna16_moe_backend", "WNA16MoEBackend", "MARLIN"),
    "mxfp4": ("select_mxfp4_moe_backend", "Mxfp4MoeBackend", "TRITON"),
    "nvfp4": ("select_nvfp4_moe_backend", "NvFp4MoeBackend", "VLLM_CUTLASS"),
    "unquantized": ("select_unquantized_moe_backend", "UnquantizedMoeBackend", "TRITON"),
}
_LINEAR = "vllm.model_executor.kernels.linear"
#: Model types whose configuration class lies in the checkpoint's own repository, and what it adds to the
#: fields of the file.
_GENERIC_CONFIGS: dict[str, dict[str, Any]] = {
    "exaone": {"attribute_map": {"num_hidden_layers": "num_layers"}, "tie_word_embeddings": False},
    "minicpm": {"tie_word_embeddings": True},
    "internlm2": {"tie_word_embeddings": False},
    "mimo": {"tie_word_embeddings": False},
}


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Stub(types.ModuleType):
    """A module of which any attribute exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class Kernel:
    """Stands for any kernel: takes any arguments, answers any question with no."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.supports = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False


def stub_torchvision() -> None:
    """torchvision is not installed here; image processors import it, but no model is built with it."""
    from transformers.utils import import_utils

    # Asked before the stub is there (the answer is remembered): transformers keeps its other processors.
    import_utils.is_torchvision_available()
    for name in ("", ".transforms", ".transforms.v2", ".transforms.functional",
                 ".transforms.v2.functional", ".io"):  # fmt: skip
        module = _Stub("torchvision" + name)
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        module.__path__ = []  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


def register_configs() -> None:
    """Model types whose configuration class is Python code in the checkpoint's own repository: vLLM's
    models read plain fields of it, so a plain configuration does.
    """
    from transformers import AutoConfig, PreTrainedConfig

    for name, fields in _GENERIC_CONFIGS.items():
        common = {"model_type": name, "max_position_embeddings": 2048, "rope_parameters": None}
        kind = type(f"{name.title()}Config", (PreTrainedConfig,), common | fields)
        AutoConfig.register(name, kind, exist_ok=True)


def _replace(original: Any, stand_in: Any) -> None:
    """Everywhere in vLLM where the name was imported to."""
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, stand_in)


def promise_kernels() -> None:
    from vllm.platforms import current_platform

    # The list of quantisation methods of a GPU: empty means all.
    type(current_platform).supported_quantization = []
    linear = importlib.import_module(_LINEAR)
    for quantised in ("auto_awq", "auto_gptq", "fp8", "modelopt", "mxfp4", "moe_wna16",
                      "compressed_tensors.compressed_tensors"):  # fmt: skip
        importlib.import_module(f"vllm.model_executor.layers.quantization.{quantised}")
    for name in ("init_fp8_linear_kernel", "init_nvfp4_linear_kernel", "init_int8_linear_kernel",
                 "init_mxfp8_linear_kernel", "init_mxfp4_linear_kernel"):  # fmt: skip
        _replace(getattr(linear, name), lambda *args, **kwargs: Kernel())
    _replace(linear.choose_mp_linear_kernel, lambda *args, **kwargs: Kernel)
    marlin = importlib.import_module("vllm.model_executor.layers.quantization.utils.marlin_utils")
    for name in ("verify_marlin_supported", "verify_marlin_supports_shape"):
        _replace(getattr(marlin, name), lambda *args, **kwargs: None)
    for module_name, (function, enum, member) in MOE_BACKENDS.items():
        oracle = importlib.import_module(f"vllm.model_executor.layers.fused_moe.oracle.{module_name}")
        backend = getattr(getattr(oracle, enum), member)
        _replace(getattr(oracle, function), lambda *args, _b=backend, **kwargs: (_b, Kernel))


class _Gpu:
    """The platform, but for one answer."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda_alike(self) -> bool:
        return True


def allow_experts_without_gates() -> None:
    """Their configuration asks whether this is a GPU (Nemotron 3)."""
    config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    config.current_platform = _Gpu(config.current_platform)


def compute_alibi_on_cpu() -> None:
    """Bloom reads its slopes' values while it is built: they cannot be on the meta device."""
    import torch
    from vllm.model_executor.models import bloom

    slopes = bloom._get_alibi_slopes

    def on_cpu(heads: int) -> Any:
        with torch.device("cpu"):
            return slopes(heads)

    bloom._get_alibi_slopes = on_cpu
