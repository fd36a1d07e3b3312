"""Which kernels communicate, by their names, and what each does.

Each pattern names the project that its kernels are from. Those of torch, FlashInfer, AITER and TensorRT-LLM were read
in its sources; those of vLLM, SGLang, MoRI and Transformer Engine's userbuffers in excerpts of theirs. A kernel of
one's own is named with ``refshard trace --communication``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from refshard.errors import SpecError
from refshard.events.table import is_peer_copy

PEER_COPY = "peer_copy"
"""The operation of a copy between the memories of two devices, which is a memcpy to the profiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Kernels of one library: a pattern searched in their names, and their operation where the name tells.

    Patterns hold for demangled names and for the mangled ones that ROCm's tools leave, in which an identifier follows
    its length.
    """

    pattern: str
    op: str | None = None


_GENERAL = (
    # NCCL 2.4 to 2.28, RCCL, MSCCL, MSCCL++, NVSHMEM and torch's c10d::nvshmem_extension, rocSHMEM, and what refshard
    # itself does not measure. What each does is read from the rest of its name.
    _Family(pattern=r"nccl|rccl|mscclpp|msccl|nvshmem|rocshmem|refshard_(?:emulated|simulated)"),
    # The other kernels of DeepEP: barriers, buffers cleaned for all ranks. The layout of a dispatch and the epilogues
    # work on this rank's memory alone.
    _Family(pattern=r"deep_ep(?![^\s<(]*(?:get_dispatch_layout|_epilogue))"),
    _Family(pattern=r"(?<![a-z_])ep(?:::|\d+)int(?:er|ra)node(?![^\s<(]*get_dispatch_layout)"),
)
# DeepEP csrc/kernels/{intranode,internode,internode_ll}.cu and deep_ep/include/deep_ep/impls. DeepSeek's own traces
# have the same kernels in the namespace dpsk::ep (deepseek-ai/profile-data).
_DEEP_EP = r"(?:deep_ep|(?<![a-z_])ep)(?:::|\d+)(?:legacy(?:::|\d+))?"
_OF_DEEP_EP = _DEEP_EP + r"(?:int(?:er|ra)node(?:_ll)?|elastic)(?:::|\d+)(?:hybrid_)?"
_CUSTOM = (
    _Family(pattern=_OF_DEEP_EP + r"dispatch(?!_copy)", op="dispatch"),
    _Family(pattern=_OF_DEEP_EP + r"combine(?!_reduce)", op="combine"),
    _Family(pattern=_OF_DEEP_EP + r"(?:cached_)?notify", op="notify"),
    # vllm csrc/custom_all_reduce.cuh, sglang sgl-kernel/csrc/allreduce/custom_all_reduce.cuh, aiter
    # csrc/include/custom_all_reduce.cuh, flashinfer include/flashinfer/comm/vllm_custom_all_reduce.cuh. Aiter's
    # reduce_scatter_cross_device_store is the first half of an all-reduce, and comes first.
    _Family(pattern=r"reduce_scatter_cross_device_store", op="reduce_scatter"),
    _Family(pattern=r"cross_device_reduce", op="all_reduce"),
    # aiter csrc/include/custom_all_reduce.cuh and custom_all_reduce_gfx1250.cuh.
    _Family(pattern=r"allgather_(?:naive|vec|lastdim)|(?<![a-z_])ag_gfx\d+", op="all_gather"),
    _Family(pattern=r"reduce_scatter_split_(?:first|last|mid)_?dim|(?<![a-z_])rs_gfx\d+", op="reduce_scatter"),
    _Family(pattern=r"allReduceQuantFp8|allreduce_mhc_post|(?<![a-z_])ar_(?:ll_)?gfx\d+", op="all_reduce"),
    # quickreduce: vllm csrc/quickreduce, sglang sgl-kernel/csrc/allreduce/quick_all_reduce.cuh, aiter
    # csrc/include/quick_all_reduce.cuh: allreduce_prototype_twoshot, allreduce_rmsnorm_prototype_twoshot.
    _Family(pattern=r"quickreduce|allreduce_(?:\w+_)?prototype", op="all_reduce"),
    # torch torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu. Its two-shot all-reduce with the fourth
    # template argument set stops after the first half, which is a reduce-scatter.
    _Family(
        pattern=r"two_shot_all_reduce_kernel<[^<>]*, (?:\(int\))?-?\d+, (?:\(int\))?-?\d+, (?:true|\(bool\)1)",
        op="reduce_scatter",
    ),
    _Family(pattern=r"multimem_all_gather", op="all_gather"),
    _Family(pattern=r"multimem_(?:one_shot_)?all_reduce", op="all_reduce"),
    _Family(pattern=r"multimem_reduce_scatter", op="reduce_scatter"),
    _Family(pattern=r"(?<![A-Za-z])multimem_\w*kernel"),
    # The same file, torch intra_node_comm.cu (oneShotAllReduceKernel, hybridCubeMeshAllReduceKernel), TensorRT-LLM
    # cpp/tensorrt_llm/kernels/customAllReduceKernels.cu and communicationKernels/, flashinfer
    # include/flashinfer/comm/trtllm_allreduce.cuh and trtllm_mnnvl_allreduce.cuh (oneshotAllreduceFusionKernel).
    _Family(pattern=r"(?:one|two)_?shot_?(?:prenorm_?)?all_?reduce", op="all_reduce"),
    _Family(pattern=r"hybridCubeMeshAllReduce|lowPrecision\w*AllReduce", op="all_reduce"),
    # TensorRT-LLM communicationKernels/allReduceFusionKernels.cu and moeAllReduceFusionKernels.cu, flashinfer
    # include/flashinfer/comm/trtllm_allreduce_fusion.cuh and trtllm_moe_allreduce_fusion.cuh, aiter
    # csrc/include/custom_all_reduce.cuh: allreduce_fusion_kernel_oneshot_lamport, ..._1stage and the like.
    _Family(pattern=r"all_?reduce_fusion", op="all_reduce"),
    # flashinfer include/flashinfer/comm/mixed_comm.cuh: both fused kernels, then the plain ones. They are whole names:
    # "allreduce_kernel" as a part of another name says nothing.
    _Family(pattern=r"fused_(?:allreduce_allgather|reducescatter_allreduce)_kernel", op="all_reduce"),
    _Family(pattern=r"mixed_comm\w*(?:::|\d)allreduce_kernel", op="all_reduce"),
    _Family(pattern=r"mixed_comm\w*(?:::|\d)allgather_kernel", op="all_gather"),
    _Family(pattern=r"mixed_comm\w*(?:::|\d)reducescatter_kernel", op="reduce_scatter"),
    # flashinfer include/flashinfer/comm/pcie_ipc_all_reduce.cuh: every kernel of this namespace is one all-reduce.
    _Family(pattern=r"pcie_ipc(?:::|\d)", op="all_reduce"),
    # TensorRT-LLM and flashinfer communicationKernels/moeAlltoAllKernels.cu, helixAllToAll.cu, trtllm_alltoall.cuh.
    _Family(pattern=r"moeA2ADispatch", op="dispatch"),
    _Family(pattern=r"moeA2ACombine", op="combine"),
    _Family(pattern=r"(?:helix|moe)AllToAllKernel", op="all_to_all"),
    # MoRI (ROCm/mori) src/ops/dispatch_combine: EpDispatchIntraNodeKernel, EpCombineInterNodeKernel, ...
    _Family(pattern=r"EpDispatch(?:Intra|Inter)Node", op="dispatch"),
    _Family(pattern=r"EpCombine(?:Intra|Inter)Node", op="combine"),
    # Transformer Engine and TensorRT-LLM userbuffers.cu: userbuffers_fp16_sum_inplace_gpu_*, kuserbuffers_pushsend, ...
    # The ending _rs is a reduce-scatter, _ag an all-gather.
    _Family(pattern=r"kuserbuffers_p(?:ush|ull)send(?!recv)", op="send"),
    _Family(pattern=r"kuserbuffers_p(?:ush|ull)recv", op="recv"),
    _Family(pattern=r"kuserbuffers_pushsendrecv", op="send_recv"),
    _Family(pattern=r"userbuffers_\w*_rs(?![a-z])", op="reduce_scatter"),
    _Family(pattern=r"userbuffers_\w*_ag(?![a-z])", op="all_gather"),
    _Family(pattern=r"userbuffers_fp16_sum", op="all_reduce"),
)
"""In the order of precedence: the first pattern that a name holds gives its operation."""


def _compiled(families: Sequence[_Family]) -> tuple[tuple["re.Pattern[str]", str | None], ...]:
    return tuple((re.compile(family.pattern, re.IGNORECASE), family.op) for family in families)


_KNOWN = _compiled((*_CUSTOM, *_GENERAL))
_ANY = re.compile("|".join(family.pattern for family in (*_CUSTOM, *_GENERAL)), re.IGNORECASE)
_GENERATED = re.compile(r"^triton_(?:poi|red|per|tem|for|mm)_")
"""Inductor's kernels: their names list what is fused in them, a collective's wait too, but none communicates."""


def patterns(texts: Sequence[str]) -> tuple["re.Pattern[str]", ...]:
    """A user's patterns for kernels that communicate, searched in names without regard to case.

    Raises:
        SpecError: one is empty or no regular expression.
    """
    found = []
    for text in texts:
        if not text:
            raise SpecError("communication: the pattern is empty and would match every kernel; name a part of a kernel")
        try:
            found.append(re.compile(text, re.IGNORECASE))
        except (re.error, RecursionError, OverflowError) as error:
            raise SpecError(
                f"communication: '{text}' is no regular expression ({error}); escape special characters with \\"
            ) from None
    return tuple(found)


def communicates(name: str) -> bool:
    """Whether a kernel of this name communicates."""
    return bool(_ANY.search(name)) and not _GENERATED.match(name)


def custom_operation(name: str) -> str | None:
    """The operation of a kernel that no process group of torch announces; None where its name does not tell.

    >>> custom_operation("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)")
    'all_reduce'
    """
    if is_peer_copy(name):
        return PEER_COPY
    return next((op for pattern, op in _KNOWN if pattern.search(name)), None)
