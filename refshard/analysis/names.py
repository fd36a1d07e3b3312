"""Names of kernels, operators and runtime calls: which kernels communicate and which collective each is, classes of
operators and kernels, and short names.
"""

import re
from collections import Counter
from collections.abc import Sequence

from refshard.analysis.figures import CLASSES, OperatorClass, OperatorFigures
from refshard.errors import SpecError
from refshard.events.table import is_peer_copy

DTYPES = {
    "double": ("fp64", 8), "float": ("fp32", 4), "half": ("fp16", 2), "bfloat16": ("bf16", 2), "long int": ("int64", 8),
    "long": ("int64", 8), "int": ("int32", 4), "short int": ("int16", 2), "short": ("int16", 2),
    "unsigned char": ("uint8", 1), "signed char": ("int8", 1), "byte": ("uint8", 1), "char": ("int8", 1),
    "bool": ("bool", 1), "float8_e4m3fn": ("fp8_e4m3", 1), "float8_e5m2": ("fp8_e5m2", 1),
    "float8_e4m3fnuz": ("fp8_e4m3", 1), "float8_e5m2fnuz": ("fp8_e5m2", 1), "complex<float>": ("complex64", 8),
    "complex<double>": ("complex128", 16),
}  # fmt: skip
"""Types of elements in lower case, as operators and NCCL's annotations call them: a short name, and bytes."""


def dtype_named(name: object) -> tuple[str, int] | None:
    """The short name and the bytes of an element type; None if it is not one.

    >>> dtype_named("c10::BFloat16"), dtype_named("Float"), dtype_named("TensorList")
    (('bf16', 2), ('fp32', 4), None)
    """
    return DTYPES.get(name.removeprefix("c10::").lower()) if isinstance(name, str) else None


PEER_COPY = "peer_copy"
"""The operation of a copy between the memories of two devices, which is a memcpy to the profiler."""


_GENERAL: tuple[tuple[str, str | None], ...] = (
    # NCCL 2.4 to 2.28, RCCL, MSCCL, MSCCL++, NVSHMEM and torch's c10d::nvshmem_extension, rocSHMEM, and what refshard
    # itself does not measure. What each does is read from the rest of its name.
    # oneCCL's are as in intel/torch-xpu-ops issue 5384.
    (r"nccl|rccl|oneccl|mscclpp|msccl|nvshmem|rocshmem|refshard_(?:emulated|simulated)", None),
    # The other kernels of DeepEP: barriers, buffers cleaned for all ranks. The layout of a dispatch and the epilogues
    # work on this rank's memory alone.
    (r"deep_ep(?![^\s<(]*(?:get_dispatch_layout|_epilogue))", None),
    (r"(?<![a-z_])ep(?:::|\d+)int(?:er|ra)node(?![^\s<(]*get_dispatch_layout)", None),
)
# DeepEP csrc/kernels/{intranode,internode,internode_ll}.cu and deep_ep/include/deep_ep/impls. DeepSeek's own traces
# have the same kernels in the namespace dpsk::ep (deepseek-ai/profile-data).
_DEEP_EP = r"(?:deep_ep|(?<![a-z_])ep)(?:::|\d+)(?:legacy(?:::|\d+))?"
_OF_DEEP_EP = _DEEP_EP + r"(?:int(?:er|ra)node(?:_ll)?|elastic)(?:::|\d+)(?:hybrid_)?"
_CUSTOM: tuple[tuple[str, str | None], ...] = (
    (_OF_DEEP_EP + r"dispatch(?!_copy)", "dispatch"),
    (_OF_DEEP_EP + r"combine(?!_reduce)", "combine"),
    (_OF_DEEP_EP + r"(?:cached_)?notify", "notify"),
    # vllm csrc/custom_all_reduce.cuh, sglang sgl-kernel/csrc/allreduce/custom_all_reduce.cuh, aiter
    # csrc/include/custom_all_reduce.cuh, flashinfer include/flashinfer/comm/vllm_custom_all_reduce.cuh. Aiter's
    # reduce_scatter_cross_device_store is the first half of an all-reduce, and comes first.
    (r"reduce_scatter_cross_device_store", "reduce_scatter"),
    (r"cross_device_reduce", "all_reduce"),
    # aiter csrc/include/custom_all_reduce.cuh and custom_all_reduce_gfx1250.cuh.
    (r"allgather_(?:naive|vec|lastdim)|(?<![a-z_])ag_gfx\d+", "all_gather"),
    (r"reduce_scatter_split_(?:first|last|mid)_?dim|(?<![a-z_])rs_gfx\d+", "reduce_scatter"),
    (r"allReduceQuantFp8|allreduce_mhc_post|(?<![a-z_])ar_(?:ll_)?gfx\d+", "all_reduce"),
    # quickreduce: vllm csrc/quickreduce, sglang sgl-kernel/csrc/allreduce/quick_all_reduce.cuh, aiter
    # csrc/include/quick_all_reduce.cuh: allreduce_prototype_twoshot, allreduce_rmsnorm_prototype_twoshot.
    (r"quickreduce|allreduce_(?:\w+_)?prototype", "all_reduce"),
    # torch torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu. Its two-shot all-reduce with the fourth
    # template argument set stops after the first half, which is a reduce-scatter.
    (r"two_shot_all_reduce_kernel<[^<>]*, (?:\(int\))?-?\d+, (?:\(int\))?-?\d+, (?:true|\(bool\)1)", "reduce_scatter"),
    (r"multimem_all_gather", "all_gather"),
    (r"multimem_(?:one_shot_)?all_reduce", "all_reduce"),
    (r"multimem_reduce_scatter", "reduce_scatter"),
    (r"(?<![A-Za-z])multimem_\w*kernel", None),
    # The same file, torch intra_node_comm.cu (oneShotAllReduceKernel, hybridCubeMeshAllReduceKernel), TensorRT-LLM
    # cpp/tensorrt_llm/kernels/customAllReduceKernels.cu and communicationKernels/, flashinfer
    # include/flashinfer/comm/trtllm_allreduce.cuh and trtllm_mnnvl_allreduce.cuh (oneshotAllreduceFusionKernel).
    (r"(?:one|two)_?shot_?(?:prenorm_?)?all_?reduce", "all_reduce"),
    (r"hybridCubeMeshAllReduce|lowPrecision\w*AllReduce", "all_reduce"),
    # TensorRT-LLM communicationKernels/allReduceFusionKernels.cu and moeAllReduceFusionKernels.cu, flashinfer
    # include/flashinfer/comm/trtllm_allreduce_fusion.cuh and trtllm_moe_allreduce_fusion.cuh, aiter
    # csrc/include/custom_all_reduce.cuh: allreduce_fusion_kernel_oneshot_lamport, ..._1stage and the like.
    (r"all_?reduce_fusion", "all_reduce"),
    # flashinfer include/flashinfer/comm/mixed_comm.cuh: both fused kernels, then the plain ones. They are whole names:
    # "allreduce_kernel" as a part of another name says nothing.
    (r"fused_(?:allreduce_allgather|reducescatter_allreduce)_kernel", "all_reduce"),
    (r"mixed_comm\w*(?:::|\d)allreduce_kernel", "all_reduce"),
    (r"mixed_comm\w*(?:::|\d)allgather_kernel", "all_gather"),
    (r"mixed_comm\w*(?:::|\d)reducescatter_kernel", "reduce_scatter"),
    # flashinfer include/flashinfer/comm/pcie_ipc_all_reduce.cuh: every kernel of this namespace is one all-reduce.
    (r"pcie_ipc(?:::|\d)", "all_reduce"),
    # TensorRT-LLM and flashinfer communicationKernels/moeAlltoAllKernels.cu, helixAllToAll.cu, trtllm_alltoall.cuh.
    (r"moeA2ADispatch", "dispatch"),
    (r"moeA2ACombine", "combine"),
    (r"(?:helix|moe)AllToAllKernel", "all_to_all"),
    # MoRI (ROCm/mori) src/ops/dispatch_combine: EpDispatchIntraNodeKernel, EpCombineInterNodeKernel, ...
    (r"EpDispatch(?:Intra|Inter)Node", "dispatch"),
    (r"EpCombine(?:Intra|Inter)Node", "combine"),
    # Transformer Engine and TensorRT-LLM userbuffers.cu: userbuffers_fp16_sum_inplace_gpu_*, kuserbuffers_pushsend, ...
    # The ending _rs is a reduce-scatter, _ag an all-gather.
    (r"kuserbuffers_p(?:ush|ull)send(?!recv)", "send"),
    (r"kuserbuffers_p(?:ush|ull)recv", "recv"),
    (r"kuserbuffers_pushsendrecv", "send_recv"),
    (r"userbuffers_\w*_rs(?![a-z])", "reduce_scatter"),
    (r"userbuffers_\w*_ag(?![a-z])", "all_gather"),
    (r"userbuffers_fp16_sum", "all_reduce"),
)
"""A pattern of each kernel's name and its operation, where the name tells; the first that matches gives it.

Patterns hold for demangled names and for the mangled ones that ROCm's tools leave, in which an identifier follows its
length.
"""


_KNOWN = tuple((re.compile(pattern, re.IGNORECASE), op) for pattern, op in (*_CUSTOM, *_GENERAL))
_ANY = re.compile("|".join(pattern for pattern, _ in (*_CUSTOM, *_GENERAL)), re.IGNORECASE)
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


SYNCHRONISES = re.compile(r"^(?:cuda|cu|hip|ze)\w*Synchronize|^ur(?:QueueFinish|EventWait)")
"""With those of Level Zero and of the Unified Runtime, by which torch uses XPUs; so are the launches below."""
ALLOCATES = re.compile(
    r"^(?:cuda|hip)(?:Ext)?(?:Malloc|Free|Host|MemGetInfo)(?!\w*Async)"
    r"|^(?:cu|hip)Mem(?:Alloc|Free|Create|Release|Map|Unmap|SetAccess|Address|GetInfo|Host)(?!\w*Async)"
)
FREES = re.compile(r"^(?:cuda|hip)Free$")
"""They wait for all work of the device."""
LOADS = re.compile(r"^(?:cuda|cu|hip)(?:Module|Library)(?:Load|Unload|GetFunction)")
INSTANTIATES = re.compile(r"^(?:cuda|cu|hip)GraphInstantiate")
MAY_LOAD = re.compile(r"^(?:cuda|cu|hip)(?:Func|Occupancy)")
"""Calls that ask about a kernel, and load it first where modules are loaded lazily."""
COPIES = re.compile(r"^(?:cuda|cu|hip)Memcpy")
COPIES_AND_WAITS = re.compile(r"^(?:cuda|cu|hip)Memcpy(?!\w*Async)")
LAUNCHES = re.compile(
    r"^(?:cuda|cu|hip)(?!\w*Graph)(?:\w*Launch\w*|Mem(?:cpy|set)\w*Async)$"
    r"|^urEnqueue(?:KernelLaunch|USM)|^zeCommandListAppend(?:Launch|Memory)"
)
GRAPH_LAUNCHES = re.compile(r"^(?:cuda|cu|hip)GraphLaunch")
"""Calls that take as long as their graph is large."""
READS_INPUT = re.compile(
    r"^enumerate\(DataLoader|(?i:data_?(?:loader|iter|fetch))|(?i:\b(?:load|next|get|fetch)_?batch)"
)
"""The host's annotations of data loading: torch's, Lightning's, and what users call it."""
STREAM_WAITS = re.compile(r"^(?:cuda|cu|hip)StreamWaitEvent")
LONG_NS = 100_000
"""Any other call blocks its thread if it takes as long: a launch takes some microseconds, unless it loads a module or
its queue is full."""


BLOCKS, AWAITS_WORK = (
    re.compile("|".join(one.pattern for one in patterns))
    for patterns in (
        (SYNCHRONISES, ALLOCATES, LOADS, INSTANTIATES, COPIES_AND_WAITS), (SYNCHRONISES, FREES, COPIES_AND_WAITS),
    )
)  # fmt: skip
"""Calls that return only when the device, or its memory, is ready; and when work that it was given has ended."""


_BY_OPERATOR: tuple[tuple[OperatorClass, str], ...] = (
    ("communication", r"^(?:c10d|_c10d_functional|gloo|nccl|symm_mem)::?|^record_param_comms|^gloo:|^emulated:"),
    ("attention", r"attention|flash_attn|fmha|sdpa|^aten::_(?:flash|efficient)_"),
    ("convolution", r"conv(?:olution|\d?d)?(?:_|$|Back)|convolution"),
    ("GEMM", r"^aten::_?(?:\w*mm(?:_|_v2|_activation)?|linear(?:_backward)?|matmul|v?dot|mv|addmv_?|bilinear)$"
             r"|_linear|(?<!fb)gemm|matmul"),
    ("optimizer", r"_fused_(?:adam|adamw|sgd|adagrad)|(?:Adam|AdamW|SGD|Muon|Lion|Adafactor)\b"),
    ("normalisation", r"(?:layer|batch|group|rms|instance)_?norm|softmax"),
    ("copies", r"^aten::(?:copy_|clone|contiguous|cat|stack|fill_|zero_|_to_copy|index_copy_|_foreach_copy_|"
               r"split_with_sizes_copy|chunk_cat|pad|constant_pad_nd|repeat|roll|flip)$|^fsdp::"),
    ("elementwise", r"^aten::(?!embedding|index|scatter|gather|sort|topk|argmax|multinomial|cumsum|nonzero|unique)"),
)  # fmt: skip
_BY_KERNEL: tuple[tuple[OperatorClass, str], ...] = (
    ("attention", r"flash_(?:fwd|bwd|attn)|_sdpa_|flash::|FlashAttn|(?<![a-z])f?mha|attention|attn_?(?:fwd|bwd)"),
    ("convolution", r"conv(?:olution)?[_\dA-Z<]|fprop|dgrad|wgrad|winograd|scudnn|hcudnn|^igemm_|miopen(?!batch)|im2"),
    ("GEMM", r"(?<!fb)gemm|gemv|nvjet|^Cijk_|_mm_|matmul|splitK|^bmm_|\bmm_kernel|tem_fused_\w*mm"),
    ("optimizer", r"adam|sgd_|FusedOptimizer"),
    ("normalisation", r"(?:layer|batch|group|rms)_?norm|bn_[fb]w|softmax|triton_\w*norm"),
    ("copies", r"^Memcpy|^Memset|CatArray|copy_kernel|transpose|direct_copy|FillFunctor|nchwTo|nhwcTo"),
    ("elementwise", r"elementwise|reduce_kernel|triton_(?:poi|red|per)_|distribution_|dropout|activation|^triton__"),
)  # fmt: skip


_OPERATORS, _KERNELS = (
    tuple((CLASSES.index(name), re.compile(rule, re.IGNORECASE)) for name, rule in rules)
    for rules in (_BY_OPERATOR, _BY_KERNEL)
)
OTHERS = CLASSES.index("others")
SURE = tuple(CLASSES.index(name) for name in ("GEMM", "attention", "convolution"))
"""What an operator of these does is the same wherever it stands, in an optimizer's step too."""


def class_of_operator(name: str) -> int:
    """The code in :data:`CLASSES` of an operator; others where its name does not tell.

    >>> CLASSES[class_of_operator("aten::addmm")], CLASSES[class_of_operator("aten::mul_")]
    ('GEMM', 'elementwise')
    """
    return next((code for code, rule in _OPERATORS if rule.search(name)), OTHERS)


def class_of_kernel(name: str) -> int:
    """The same of a kernel.

    >>> CLASSES[class_of_kernel("nvjet_tst_64x16_64x16_2x4_2cta_h_bz_bias_TNT")]
    'GEMM'
    """
    return next((code for code, rule in _KERNELS if rule.search(name)), OTHERS)


LONGEST, _SHORT = 72, 20
_TENSILE = re.compile(
    r"^(Cijk_[A-Za-z]+_[A-Za-z]+(?:_[A-Z]+)*?)_(?:Bias|HA|UserArgs|MT).*?(MT\d+x\d+x\d+)(?:_(MI\d+x\d+x\d+))?"
)
_TILE = re.compile(r"^.*?tilesize\d+x\d+x\d+")
_COPY = re.compile(r"^Mem(?:cpy|set)\b")
_CLONE = re.compile(r" ?\[clone[^\]]*\]$")
_TOKEN = re.compile(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*|\b\d+(?=u?l{0,2}\b)(?:u?l{0,2})")
_DTYPES = {
    "float": "fp32", "double": "fp64", "c10::BFloat16": "bf16", "c10::Half": "fp16", "__nv_bfloat16": "bf16",
    "__half": "fp16", "cutlass::bfloat16_t": "bf16", "cutlass::half_t": "fp16", "__hip_bfloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8", "cutlass::tfloat32_t": "tf32", "nv_bfloat16": "bf16",
    "cutlass::float_e4m3_t": "fp8", "cutlass::float_e5m2_t": "fp8",
}  # fmt: skip
_FLOATS = {"DF16b": "c10::BFloat16", "DF16_": "c10::Half"}
"""The ABI's names of types; their digits are no length of an identifier."""
_HOLDERS = frozenset(("Kernel", "Kernel2", "device_kernel", "kentry", "trampoline_kernel"))
"""Functions that only hold what runs: their argument is the name."""
_TELL_NOTHING = frozenset((
    "void", "int", "long", "short", "char", "bool", "unsigned", "signed", "const", "true", "false", "std", "array",
    "Array", "detail", "Params", "operator", "lambda", "TensorIterator", "TensorIteratorBase",
    "TrivialOffsetCalculator", "OffsetCalculator", "function_traits", "gpu_kernel_impl", "gpu_kernel_impl_nocast",
    "gpu_kernel_with_scalars", "LoadWithCast", "StoreWithCast", "LoadWithoutCast", "StoreWithoutCast",
    "BinaryFunctor", "BUnaryFunctor", "AUnaryFunctor", "IntegralConstant", "integral_constant", "tuple", "Tuple",
    "basic_string", "opmath_type", "uint32_t", "int32_t", "int64_t", "uint64_t", "size_t", "enable_sm80_or_later",
    "enable_sm90_or_later", "sequence", "enable_sm80_to_sm89", "ArrayRef", "OpaqueType", "GLOBAL__N_1", "PassThrough",
    "Scalar", "OpType", "InMemoryDataOperationEnum",
))  # fmt: skip
_FEW = (3, 2, 4)
"""Most names, types and numbers of a template's arguments in a short name."""


def short_kernel_names(names: Sequence[str]) -> tuple[str, ...]:
    """A short name for each kernel; equal names are numbered."""
    found = [short_kernel_name(name) for name in names]
    alike, seen = Counter(found), Counter[str]()
    for place, name in enumerate(found):
        if alike[name] > 1:
            seen[name] += 1
            found[place] = f"{name} #{seen[name]}"
    return tuple(found)


def short_kernel_name(name: str) -> str:
    """A kernel's name of at most :data:`LONGEST` characters.

    >>> short_kernel_name("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)")
    'vectorized_elementwise_kernel<CUDAFunctor_add, fp32, 4>'
    """
    if _COPY.match(name):  # what stands in parentheses tells pinned memory from pageable
        return _cut(name)
    if match := _TENSILE.match(name):
        return _cut(" ".join(part for part in match.groups() if part))
    if match := _TILE.match(name):
        return _cut(match[0])
    if name.startswith("_Z"):
        return _told(*_mangled(name))
    plain = _CLONE.sub("", name.removeprefix("void ").replace("(anonymous namespace)::", "")).strip()
    if plain.startswith("std::enable_if<"):  # the type of what it returns comes first
        plain = (
            plain[len("std::enable_if<") + len(_arguments(plain[len("std::enable_if") :])) :].partition(" ")[2] or plain
        )
    head = re.match(r"[^<(]*", plain)
    assert head is not None
    if head.end() == len(plain):
        return _cut(plain)
    inside = _arguments(plain[head.end() :]) if plain[head.end()] == "<" else ""
    return _told(head[0].rpartition("::")[2], [token[0] for token in _TOKEN.finditer(inside)])


def name_in_words(name: str) -> str:
    """A name for a sentence or a cell: a kernel's is shortened where it is long, all others are cut at most.

    >>> name_in_words("aten::copy_"), name_in_words("Memcpy HtoD (Pageable -> Device)")
    ('aten::copy_', 'Memcpy HtoD (Pageable -> Device)')
    """
    return name if len(name) <= LONGEST else short_kernel_name(name)


def work_in_words(operator: str, dims: str, dtype: str) -> str:
    """What a call of an operator computes, from its arguments' sizes such as ``[64,32]x[32,16]``, or else its name.

    The sizes of a matrix product are rows, columns and the length of the sums.

    >>> work_in_words("aten::mm", "[8192,4096]x[4096,14336]", "bf16")
    'matrix product 8192x14336x4096, bf16'
    >>> work_in_words("aten::_flash_attention_backward", "[1,32,8192,128]x[1,32,8192,128]", "bf16,fp32")
    'attention, backward, 1x32x8192x128, bf16'
    >>> work_in_words("aten::mul", "[8,4096]x[8,4096]", "bf16"), work_in_words("aten::mul", "", "")
    ('aten::mul of 8x4096, bf16', 'aten::mul')
    """
    kind = CLASSES[class_of_operator(operator)]
    shapes = [one.split(",") for one in re.findall(r"\[([\d,]+)\]", dims)]
    if not shapes:
        return name_in_words(operator)
    first, pair = "x".join(shapes[0]), shapes[-2:] if "addmm" in operator else shapes[:2]
    if kind == "GEMM" and len(pair) == 2 and len(pair[0]) > 1 and len(pair[1]) > 1 and pair[0][-1] == pair[1][-2]:
        what = f"matrix product {'x'.join((*pair[0][:-1], pair[1][-1], pair[0][-1]))}"
    elif kind in ("attention", "convolution"):
        what = f"{kind}{', backward,' if 'backward' in operator else ''} {first}"
    else:
        what = f"{name_in_words(operator)} of {first}"
    return f"{what}, {dtype.partition(',')[0]}" if dtype else what


def operator_in_words(one: OperatorFigures) -> str:
    """:func:`work_in_words` of an operator's calls."""
    return work_in_words(one.name, (one.shapes or "").replace(", ", ","), one.dtype or "")


def kernel_in_words(kernel: str) -> str:
    """What a kernel computes whose operator is unknown, as far as its name tells.

    >>> kernel_in_words("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT")
    'matrix product (nvjet_sm90_tst…)'
    """
    words = {"GEMM": "matrix product", "attention": "attention", "convolution": "convolution"}
    kind, name = words.get(CLASSES[class_of_kernel(kernel)]), name_in_words(kernel)
    if kind is None or len(name) <= _SHORT:
        return name
    backward = ", backward" if re.search("bwd|bprop|backward", kernel) else ""
    return f"{kind}{backward} ({name[:_SHORT].rpartition('_')[0] or name[:_SHORT]}…)"


def _arguments(text: str) -> str:
    """What stands between the template's brackets that ``text`` begins with."""
    depth = 0
    for place, letter in enumerate(text):
        if letter == ">" and text[place - 1] == "-":
            continue
        depth += (letter == "<") - (letter == ">")
        if depth == 0:
            return text[1:place]
    return text[1:]


def _told(function: str, tokens: Sequence[str]) -> str:
    """A function with the telling ones of its template's arguments."""
    names, dtypes, numbers = list[str](), list[str](), list[str]()
    for token in tokens:
        last = token.rpartition("::")[2]
        if token in _DTYPES:
            dtypes.append(_DTYPES[token])
        elif token[0].isdigit():
            numbers.append(token.rstrip("ul"))
        elif len(last) > 1 and last not in _TELL_NOTHING:
            names.append(last)
    names, dtypes = list(dict.fromkeys(names)), list(dict.fromkeys(dtypes))
    if function in _HOLDERS and names:
        function, *names = names
    few = zip((names, dtypes, numbers), _FEW)
    chosen = [part for parts, most in few for part in parts[:most]]
    while chosen and len(f"{function}<{', '.join(chosen)}>") > LONGEST:
        chosen.pop(0 if len(chosen[0]) > LONGEST // 2 else -1)
    return _cut(f"{function}<{', '.join(chosen)}>" if chosen else function)


def _mangled(name: str) -> tuple[str, list[str]]:
    """The function of a mangled name (Itanium's ABI), and its template's names and numbers, in order."""
    function, tokens, of_function, place = "", list[str](), True, 2
    while place < len(name):
        if match := re.compile(r"L[a-z](\d+)E").match(name, place):
            tokens.append(match[1])
            place = match.end()
        elif match := re.compile(r"DF(\d+)([b_x])").match(name, place):
            tokens += [_FLOATS[match[0]]] if match[0] in _FLOATS else []
            place = match.end()
        elif match := re.compile(r"\d+").match(name, place):
            word = name[match.end() : match.end() + int(match[0])]
            place = match.end() + max(1, len(word))
            if of_function:
                function = word
            elif word and not (word.isalpha() and word.islower()):  # or it is a scope
                tokens.append(word)
        else:
            of_function = of_function and (not function or name[place] not in "IE")
            place += 1
    return function or name, tokens


def _cut(name: str) -> str:
    """A name cut in its middle where it is too long."""
    if len(name) <= LONGEST:
        return name
    head = 2 * LONGEST // 3
    return f"{name[:head]}…{name[-(LONGEST - head - 1) :]}"
