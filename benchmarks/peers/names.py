"""The peers there are."""

PEER_NAMES = ("arctic", "vllm-ngram", "prompt-lookup", "sglang-ngram", "llama-cpp")
