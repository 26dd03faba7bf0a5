#!/bin/sh
# 98.35 output tok/s at 16 clients, recorded (autotune, 20261130-114549-tiny-llama).
# Further vLLM options may follow, e.g. launch.sh --port 8001.
exec vllm serve tiny-llama --gpu-memory-utilization 0.7715 --max-model-len 256 --max-num-seqs 16 --max-num-batched-tokens 512 --block-size 64 --kv-cache-memory-bytes 134217728 --dtype float32 --enforce-eager "$@"
