"""What ``torch._C`` has of CUDA graphs, of private pools, and of what inductor's cudagraph trees ask for.

The trees (``torch/_inductor/cudagraph_trees.py``) run a compiled function in their pool, then capture it, and from then
on replay it. They make the tensors that a replay gives from addresses, and set the pool back to what these tensors hold
before they capture another graph.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

PoolId = tuple[int, int]
OWN_POOL: PoolId = (0, 0)
"""The pool that is not private."""


def graphs(ext: ModuleType) -> dict[str, Any]:
    """The functions and classes by their names in ``torch._C``; ``ext`` is the extension."""
    return {
        "_CUDAGraph": ext.CUDAGraph,
        "_MemPool": _pool_class(ext),
        "_graph_pool_handle": ext.new_pool,
        "_cuda_isCurrentStreamCapturing": ext.is_capturing,
        **_pools(ext),
        **_storages(ext),
    }


def _pool_class(ext: ModuleType) -> type:
    class MemPool:
        """``torch.cuda.MemPool`` derives from it."""

        def __init__(
            self, allocator: Any = None, is_user_created: bool = True, use_on_oom: bool = False, no_split: bool = False
        ) -> None:
            if allocator is not None:
                raise NotImplementedError("the fake CUDA device does not support pools with an allocator of their own")
            self._device: int = ext.current_device()
            self._id: PoolId = ext.new_pool(is_user_created)
            ext.retain_pool(self._device, self._id, not no_split, use_on_oom)

        def __del__(self) -> None:
            if hasattr(self, "_id"):
                ext.release_pool(self._device, self._id)
                ext.empty_cache(self._id)

        @property
        def id(self) -> PoolId:
            return self._id

        @property
        def allocator(self) -> None:
            return None

        def use_count(self) -> int:
            return int(ext.users_of_pool(self._device, self._id))

    return MemPool


def _pools(ext: ModuleType) -> dict[str, Any]:
    def holds_only(device: int, pool: PoolId, addresses: set[int]) -> bool:
        ext.users_of_pool(device, pool)  # which raises if there is no such pool
        blocks = [block for segment in ext.snapshot(device, pool) for block in segment["blocks"]]
        return {block["address"] for block in blocks if block["state"] == "active_allocated"} == set(addresses)

    return {
        "_cuda_CUDAAllocator_AllocatorState": ext.Checkpoint,
        "_cuda_beginAllocateToPool": ext.begin_allocate_to_pool,
        "_cuda_beginAllocateCurrentThreadToPool": ext.begin_allocate_thread_to_pool,
        "_cuda_beginAllocateCurrentStreamToPool": lambda device, pool: ext.begin_allocate_stream_to_pool(
            device, pool, ext.current_stream(device)[0]
        ),
        "_cuda_endAllocateToPool": ext.end_allocate_to_pool,
        "_cuda_releasePool": ext.release_pool,
        "_cuda_checkPoolLiveAllocations": holds_only,
        "_cuda_getCheckpointState": ext.pool_checkpoint,
        "_cuda_setCheckpointPoolState": ext.restore_pool,
        "_cuda_clearCublasWorkspaces": ext.drop_cublas_workspaces,
        "_cuda_get_conv_benchmark_empty_cache": lambda: False,
        "_cudnn_set_conv_benchmark_empty_cache": lambda on: None,  # noqa: ARG005
        "_host_emptyCache": lambda: None,
    }


def _storages(ext: ModuleType) -> dict[str, Any]:
    def same_addresses(tensors: Sequence[Any], addresses: Sequence[int | None], places: Sequence[int]) -> bool:
        return all((tensors[place].data_ptr() or None) == (addresses[place] or None) for place in places)

    return {
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": ext.tensor_over,
        "_tensors_data_ptrs_at_indices_equal": same_addresses,
        "_free_And_Remove_DeleterFn": ext.free_storage,
        "_has_Standard_Deleter": ext.owns_its_block,
        "_set_storage_access_error_msg": ext.forbid_tensor,
        "_set_storage_data_ptr_access_error_msg": ext.forbid_storage,
        "_clear_storage_data_ptr_access_error_msg": ext.allow_storage,
        "_cuda_cudaCachingAllocator_raw_alloc": ext.raw_allocate,
        "_cuda_cudaCachingAllocator_raw_delete": ext.raw_free,
    }
