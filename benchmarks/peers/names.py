"""The peers there are."""

PEER_NAMES = ("arctic", "vllm-ngram", "prompt-lookup")
