"""vLLM's own cache code behind the contracts of `cache.protocol`; needs vLLM (`make vllm`), no GPU."""
