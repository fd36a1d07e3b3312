"""Tests of streams, NCCL and device memory. Those that need no GPU run their bodies on the CPU as well; those that ask
for streams or the allocator alone run on the fake CUDA device too (``tests/fakecuda/test_gpu_tests.py``).
"""
