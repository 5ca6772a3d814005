"""The retrieval index measured: memory, latency, freshness, upkeep, reopening; beside other people's drafters."""
