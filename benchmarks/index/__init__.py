"""The retrieval index measured: memory, latency, freshness, upkeep, reopening."""
