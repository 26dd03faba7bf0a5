"""Texts by which a device, a model or an option is refused, and which of the two outcomes they prove.

`unsupported_arch`: this device, kernel or vLLM does not know the model or its format, whatever the
options. `bad_arg`: the options contradict each other, the model or the machine. Sources: the raise
statements of vLLM 0.4 to 0.33 (config, argument parser, platforms, quantization, attention, loaders),
of Transformers, Triton and CUDA.
"""

from __future__ import annotations

import re

from autotune.core.outcome import Outcome
from autotune.vllm.rules import Kind, rules

# What a device is called in vLLM's refusals.
_DEVICE = (
    r"(?:GPUs?|devices?|platforms?|hardware|CPUs?|ROCm|XPU|TPU|HPU|NVIDIA|AMD|Intel|CUDA|Volta|Turing|Ampere"
    r"|Ada|Hopper|Blackwell|SM ?\d+\w*|sm_?\d+\w*|gfx\d+\w*|RDNA\d?|CDNA\d?|Apple|macOS|WSL)"
)
_ADJECTIVES = r"(?:(?:the|this|your|current|non-\w+|older) )*"

UNSUPPORTED_RULES = (
    *rules(
        Kind.ROOT,
        Outcome.UNSUPPORTED_ARCH,
        ("for the current GPU", r"is not supported for the current GPU"),
        (
            "no kernel image|kernel image is invalid",
            r"no kernel image is available|device kernel image is invalid",
        ),
        ("no binary for gpu|NoBinaryForGpu", r"no binary for gpu|hipErrorNoBinaryForGpu"),
        ("NoKernelImageForDevice", r"cudaErrorNoKernelImageForDevice"),
        ("invalid device function", r"(?:CUDA|HIP) error: invalid device function"),
        ("ARCH_MISMATCH", r"_STATUS_ARCH_MISMATCH"),
        ("Illegal instruction", r"\bIllegal instruction\b(?! was)"),
        ("illegal hardware", r"\billegal hardware instruction\b"),
        ("SIGILL", r"\bSIGILL\b"),
        ("compute capability", r"only supported on GPUs with compute capability"),
        (
            "compute capability|inimum capability",
            r"compute capability (?:of )?(?:at least|>=?|must be)|[Mm]inimum capability",
        ),
        (
            "in capability|inimum capability|equired capability",
            r"[Mm]in(?:imum)? capability|[Rr]equired capability: \d",
        ),
        ("No compiled ", r"No compiled \w+ for .*capability"),
        (
            "require",
            r"\brequires? .{0,60}(?:compute capability|\bSM ?\d{2}|\bsm_?\d{2}|\bgfx\d|AVX-?\d|\bAMX\b"
            r"|Hopper|Blackwell|Ampere)",
        ),
        ("Model architectures|rchitectures [", r"Model architectures .*(?:are|is) not supported"),
        ("vLLM implementation", r"has no (?:\w+ )?vLLM implementation"),
        ("recognize this architecture", r"does not recognize this architecture"),
        (
            "Cannot find model module|is not a registered",
            r"Cannot find model module|is not a registered model in the Transformers",
        ),
        ("Unrecognized configuration", r"Unrecognized configuration class"),
        ("GGUF model with", r"GGUF model with architecture .* is not supported"),
        ("Unknown gguf", r"Unknown gguf model_type"),
        (
            "in this architecture|gpu architecture",
            r"not supported in this architecture|Unsupported gpu architecture",
        ),
        ("attention backend found", r"No valid (?:MLA )?attention backend found"),
        ("for this configuration", r"Selected (?:attention )?backend .* is not valid for this configuration"),
        ("backend does|backend currently", r"backend (?:currently )?does(?:n't| not) (?:currently )?support"),
        ("backend supports the", r"No .{1,40} backend supports the (?:deployment|given) configuration"),
        ("out of resource", r"OutOfResources: out of resource: (?!.*\bmemory on device)"),
        ("ptxas", r"ptxas\b.*\bsm_\d+\w?\b.*(?:returned non-zero|is not defined|[Uu]nsupported)"),
        ("is not defined for", r"Value 'sm_\d+\w?' is not defined for option"),
        (
            "FlashAttention only|FlashAttention forward|FlashAttention requires",
            r"FlashAttention (?:only supports|forward only supports|requires)",
        ),
        (
            "FlashInfer|FlashMLA|FLASHMLA|Marlin|Machete|CUTLASS|Cutlass|DeepGEMM|FlashAttention",
            r"^(?:\w+Error: )?(?:The )?(?:FlashInfer|FlashMLA|FLASHMLA|Marlin|Machete|CUTLASS|Cutlass"
            r"|DeepGEMM|FlashAttention)\b.{0,60}(?:is not supported|does not support|not available on)",
        ),
        (
            "nsupported head|ead size|ead_size|ead dim|eadsize|eaddim",
            r"[Uu]nsupported head[ _]size|[Hh]ead[ _]?(?:size|dim) \d+ is not supported",
        ),
        ("support head", r"not support (?:head ?dim|head size)"),
        ("Failed to find a kernel", r"Failed to find a kernel that can implement"),
        (
            "not supported|not yet supported|not currently supported",
            r"not (?:yet |currently )?supported (?:on|by|for|in) " + _ADJECTIVES + _DEVICE + r"\b",
        ),
        (
            "only supported|only available|only work|only run",
            r"only (?:supported|available|works?|runs?) (?:on|for) " + _ADJECTIVES + _DEVICE + r"\b",
        ),
        ("nly support", r"\b[Oo]nly supports? (?:the )?(?:arch\b|architectures? )?" + _DEVICE + r"\b"),
    ),
)

# vLLM's names for its options, as families; a word of a refusal, not of a remedy in it.
_OPTION = (
    r"(?:--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*|(?:enable|disable)_[a-z]\w+|max_(?:model_len|num_\w+|lora\w*"
    r"|loras"
    r"|cpu_loras|logprobs|seq_len_to_capture|cudagraph_capture_size|long_partial_prefills|prompt_adapter\w*)"
    r"|\w+_parallel_size|gpu_memory_utilization|kv_(?:cache_dtype|cache_memory_bytes|transfer_config|role"
    r"|connector|disagg_role)|cpu_offload_gb|swap_space|load_format|limit_mm_per_prompt"
    r"|num_(?:speculative_tokens|scheduler_steps|gpu_blocks_override|lookahead_slots|redundant_experts)"
    r"|speculative_\w+|ngram_\w+|prompt_lookup_\w+|distributed_executor_backend|attention_backend"
    r"|tokenizer_mode"
    r"|cudagraph_\w+|cuda_graph_sizes|compilation_config|api_server_count|mm_\w+|\w*guided_decoding\w*"
    r"|all2all_backend|master_(?:port|addr)|nnodes|node_rank|tokenizer_pool_\w+|rope_scaling|hf_overrides"
    r"|trust_remote_code|VLLM_[A-Z_]+|[`'\"](?:dtype|quantization|block_size|runner|task|device)[`'\"=])"
)
_REFUSES = (
    r"(?:must (?:be|have|not|equal|match|divide)|cannot (?:be|use|set|exceed)|can't be|can not be|not "
    r"compatible"
    r"|incompatible|not support(?:ed)?|unsupported|only supported|requires?\b|is required|should be|has to be"
    r"|needs? to be|[Ii]nvalid|[Uu]nknown|[Uu]nrecognized|[Ee]xpected|greater than|less than|larger than"
    r"|smaller than"
    r"|exceeds?|not allowed|not divisible|mutually exclusive|conflict|do(?:es)? not exist|is deprecated)"
)

ARGUMENT_RULES = (
    *rules(
        Kind.ROOT,
        Outcome.BAD_ARG,
        ("unrecognized arguments", r"error: unrecognized arguments"),
        (
            "error: argument|following arguments",
            r"error: argument -{1,2}[\w/-]+|error: the following arguments are required",
        ),
        (": error: ", r"^(?:vllm(?: [\w-]+){0,2}|\S+\.py|api_server|serve): error: "),
        (
            "No such option|Invalid value for|Missing option",
            r"^Error: (?:No such option|Invalid value for|Missing option)",
        ),
        (
            "Unknown quantization|in the model config",
            r"Unknown quantization method|Quantization method specified in the model config .*not match",
        ),
        ("for quantization method", r"is not supported for quantization method"),
        ("of attention heads", r"Total number of attention heads \(\d+\) must be divisible"),
        (
            "must be divisible|not divisible by",
            r"must be divisible by (?:the )?tensor.parallel|\bis not divisible by\b(?! the max)",
        ),
        ("Block size must|nvalid block size", r"Block size must be|[Ii]nvalid block size"),
        # 0.32+: the option's blocks fit no attention backend of this device.
        (
            "No common block|share no supported",
            r"No common block size for|share no supported KV cache block size",
        ),
        ("is not supported by", r"block size \d+ is not supported by"),
        ("User-specified max_model_len", r"User-specified max_model_len"),
        (
            "max_num_batched_tokens (",
            r"max_num_batched_tokens \(\d+\) (?:is smaller than|must be greater)",
        ),
        (
            "available Mamba cache|max_num_seqs (",
            r"max_num_seqs \(\d+\) exceeds available Mamba cache blocks",
        ),
        ("max_tokens_per_mm_item", r"max_tokens_per_mm_item \(\d+\) is larger than"),
        ("utilization must be", r"(?:GPU memory|gpu_memory_)[ ]?utilization must be"),
        (
            "of required GPUs|available GPUs|visible GPUs",
            r"number of required GPUs exceeds|larger than the number of (?:available|visible) GPUs",
        ),
        ("placement group of", r"Cannot provide a placement group of"),
        ("max local gpu", r"less than max local gpu count"),
        ("invalid device ordinal", r"invalid device ordinal"),
        (
            "Invalid repository|Invalid attention",
            r"Invalid repository ID or local directory|Invalid attention backend",
        ),
        ("appear to have a file", r"does not appear to have a file named"),
        ("valid model identifier", r"is not a valid model identifier"),
        ("Repo id must", r"Repo id must (?:be in the form|use alphanumeric)"),
        ("RepositoryNotFoundError", r"RepositoryNotFoundError: 404"),
        ("nknown attention backend", r"[Uu]nknown attention backend"),
        ("custom code to be", r"allow custom code to be run"),
        ("trust_remote_code=True", r"(?:argument|option) `trust_remote_code=True`"),
        ("unexpected keyword", r"(?:Args|LLM|Config)\.__init__\(\) got an unexpected keyword"),
        ("than max_lora_rank", r"is greater than max_lora_rank"),
        ("Pipeline parallelism is", r"Pipeline parallelism is (?:not|only) supported"),
        ("finished its bootstrapping", r"before the current process has finished its bootstrapping"),
        (
            "Unknown dtype|kv cache dtype",
            r"^(?:\w+\.)*ValueError: Unknown dtype: |Invalid kv cache dtype: |Unknown kv cache dtype: ",
        ),
        ("Unsupported kv_", r"^(?:\w+\.)*ValueError: Unsupported kv_(?:role|connector)"),
        ("ecognized distributed", r"[Uu]nrecognized distributed.executor.backend"),
    ),
    *rules(
        Kind.BROAD,
        Outcome.BAD_ARG,
        ("validation error", r"\bvalidation errors? for (?:\w*Config|\w*Args)\b"),
        ("mutually exclusive", r"(?:are|is) mutually exclusive"),
        ("cannot be used", r"cannot be used (?:together )?with"),
        (
            "ValueError: |NotImplementedError: |AssertionError: |TypeError: ",
            r"^(?:\w+\.)*(?:ValueError|NotImplementedError|AssertionError|TypeError): "
            rf"(?=.{{0,600}}(?<![\w.]){_OPTION}(?!\w))(?=.{{0,600}}{_REFUSES})",
        ),
    ),
)

#: Files of vLLM whose exceptions speak of the options: nothing else is looked at there yet.
CONFIG_FILE = re.compile(
    r"(?:^|/)vllm/(?:config(?:\.py$|/)|engine/arg_utils\.py$|entrypoints/(?:cli/|openai/cli_args\.py"
    r"|llm\.py$)|v1/engine/(?:llm_engine|async_llm)\.py$)|(?:^|/)argparse\.py$"
)
#: Exceptions that such a refusal is raised as.
CONFIG_ERROR = re.compile(
    r"^(?:\w+\.)*(?:ValueError|NotImplementedError|AssertionError|TypeError|ValidationError)\b"
)
