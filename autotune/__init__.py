"""autotune: the fastest vLLM launch configuration for one model on one card."""

__version__ = "0.1.0"
