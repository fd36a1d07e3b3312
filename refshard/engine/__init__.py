"""The reference sharding engine: one code path for every mode."""
