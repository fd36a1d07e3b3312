"""Tests of streams, NCCL and device memory. Those that need no GPU run their bodies on the CPU as well."""
