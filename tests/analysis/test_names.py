"""Kernels that communicate without NCCL: by the names that their projects give them, as a profiler shows these."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.analysis.analyse import analyse
from refshard.analysis.names import (
    LONGEST,
    communicates,
    custom_operation,
    patterns,
    short_kernel_name,
    short_kernel_names,
)
from refshard.errors import SpecError
from tests.analysis.handmade import event, step, write

NAMES = {
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, int)": "all_reduce",
    "void sglang::cross_device_reduce_2stage<half, 4>(sglang::RankData*, sglang::RankSignals)": "all_reduce",
    "_ZN5aiter26cross_device_reduce_1stageI12hip_bfloat16Li8EEEvPNS_8RankDataE": "all_reduce",
    "void aiter::allgather_lastdim<__hip_bfloat16, 8>(aiter::RankData*)": "all_gather",
    "void aiter::reduce_scatter_cross_device_store<half, 8>(aiter::RankData*)": "reduce_scatter",
    "void aiter::reduce_scatter_split_first_dim<half, 8>(aiter::RankData*)": "reduce_scatter",
    "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<half>, half>(half*)": "all_reduce",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "all_reduce",
    "void (anonymous namespace)::multimem_one_shot_all_reduce_kernel<float, 16>(float*)": "all_reduce",
    "void (anonymous namespace)::multimem_all_gather_kernel<16>(char*, char*)": "all_gather",
    "void (anonymous namespace)::one_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8, false, false>()": "all_reduce",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<c10::BFloat16, 16, 8, true, false>()": "reduce_scatter",
    "void (anonymous namespace)::two_shot_all_reduce_kernel<float, (int)16, (int)8, (bool)1, (bool)0>()":
        "reduce_scatter",
    "void two_shot_all_reduce_kernel_inplace<float, 16, 8>(float**)": "all_reduce",
    "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8, true, false>(AllReduceParams)": "all_reduce",
    "void lowPrecisionTwoShotAllReduceKernel<half, __nv_fp8_e4m3, 4>(LowPrecisionAllReduceParams)": "all_reduce",
    "void flashinfer::trtllm_allreduce::one_shot_prenorm_all_reduce_norm_kernel<half>()": "all_reduce",
    "void flashinfer::trtllm_mnnvl_allreduce::oneshotAllreduceFusionKernel<8, half, true>()": "all_reduce",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<0, half, 8>()": "all_reduce",
    "void moereduce_allreduce_fusion_kernel_oneshot_lamport<half, 8>()": "all_reduce",
    "void flashinfer::mixed_comm::reducescatter_kernel<half>()": "reduce_scatter",
    "void flashinfer::comm::pcie_ipc::push_oneshot_param_kernel<half, 2>()": "all_reduce",
    "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>()": "dispatch",
    "void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<half>()": "combine",
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs)": "dispatch",
    "userbuffers_fp16_sum_inplace_gpu_rr_rs(int, int)": "reduce_scatter",
    "userbuffers_fp16_sum_inplace_gpu_rr_ag(int, int)": "all_gather",
    "userbuffers_fp16_sum_inplace_gpu_rw(int, int)": "all_reduce",
    "kuserbuffers_pushsendrecv(int, int)": "send_recv",
    "kuserbuffers_pushsend(int, int)": "send",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": None,
    "void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*)": "dispatch",
    "_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li8EEEvPT_": "combine",
    "void deep_ep::legacy::internode::notify_dispatch<false, 8>(int const*)": "notify",
    "_ZN7deep_ep7elastic20hybrid_dispatch_implILi8EEEvv": "dispatch",
    "void deep_ep::intranode::barrier<8>(int**, int)": None,
    "void dpsk::ep::internode::dispatch<false, 8, true, 8>(int4*, dpsk::ep::internode::SourceMeta*)": "dispatch",
    "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16, 8, 2, 16, 24>(int4*)": "combine",
    "void dpsk::ep::internode::cached_notify<false>(int, int)": "notify",
}  # fmt: skip
"""What each does; None where the rest of the name tells, as for NCCL."""
OTHERS = (
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "void deep_ep::internode::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "void dpsk::ep::cuda::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "_ZN7deep_ep7elastic27combine_reduce_epilogue_implILi8EEEvv", "void step::internode_sum<float>()",
    "triton_red_fused__to_copy_add_all_reduce_wait_tensor_0", "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >()", "void cub::DeviceReduceKernel<float>()",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>()",
    "void vllm::moe::moe_align_block_size_kernel<int>()", "void flashinfer::norm::FusedAddRMSNormKernel<8, half>()",
)  # fmt: skip


@pytest.mark.parametrize(("name", "op"), NAMES.items())
def test_kernels_of_serving_engines_communicate(name: str, op: str | None) -> None:
    assert communicates(name)
    assert custom_operation(name) == op


@pytest.mark.parametrize("name", OTHERS)
def test_kernels_with_names_alike_do_not(name: str) -> None:
    assert not communicates(name)


def on_device(name: str, start: float, duration: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return event(name, start, duration, cat=cat, tid=7, correlation=0, stream=7, device=0, **args)


def test_each_is_a_collective_with_its_operation(tmp_path: Path) -> None:
    events = [
        step(0, 0, 50),
        on_device("gemm", 1, 10),
        on_device("void vllm::cross_device_reduce_1stage<half, 2>(vllm::RankData*)", 11, 4),
        on_device("Memcpy PtoP (Device -> Device)", 15, 5, cat="gpu_memcpy", bytes=4096),
        on_device("Memcpy DtoD (Device -> Device)", 20, 2, cat="gpu_memcpy", bytes=4096),
        on_device("void ring::exchange<float>(float*)", 22, 3),
    ]
    path = write(tmp_path / "t.json", events)
    figures = analyse(path).figures
    assert (figures.whole.comm_ns, figures.whole.copy_ns, figures.whole.compute_ns) == (9000, 2000, 13_000)
    assert [(one.op, one.bytes) for one in figures.collectives] == [("all_reduce", None), ("peer_copy", 4096)]
    assert figures.collectives[1].bus_bandwidth == 4096 / 5e-6
    own = analyse(path, communicating=patterns(["^void RING::", "gemm$"])).figures
    assert own.whole.comm_ns == 22_000
    assert [one.op for one in own.collectives] == ["gemm", "all_reduce", "peer_copy", "exchange"]


@pytest.mark.parametrize(("text", "message"), [("", "would match every kernel"), ("(", "is no regular expression")])
def test_a_pattern_that_is_none_is_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        patterns(["good", text])


ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<{}>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<{}>, std::array<char*, 3ul>)"
)
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t>, false, true, false>(pytorch_flash::Flash_fwd_params)"
)
TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x224x64_MI16x16x1_SN_LDSB0_AFC1_AG0" + "_X1" * 80
MANGLED = "_ZN2ck16tensor_operation6device12_GLOBAL__N_111kernel_gemmINS_9Gridwise1ILi256ELi16EEEDF16bEEvT_"


@pytest.mark.parametrize(("name", "short"), [
    (ADD.format("float", "float"), "vectorized_elementwise_kernel<CUDAFunctor_add, fp32, 4, 3>"),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>"
        "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8::Params)",
        "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8",
    ),
    (FLASH, "flash_fwd_kernel<Flash_fwd_kernel_traits, bf16, 64, 128, 128, 4>"),
    (TENSILE, "Cijk_Alik_Bljk_BBS_BH MT256x224x64 MI16x16x1"),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    ),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"),
    ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
    ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
    ("triton_poi_fused_add_mul_0", "triton_poi_fused_add_mul_0"),
    (
        "_Z28kn_fmla_fwd_splictkv_combineI19FlashMlaKernelTraitILi576ELi512ELi16ELi64ELi4EELi96EDF16_"
        "Ev17FlashMlaFwdParams",
        "kn_fmla_fwd_splictkv_combine<FlashMlaKernelTrait, FlashMlaFwdParams>",
    ),
    (MANGLED, "kernel_gemm<Gridwise1, bf16, 256, 16>"),
    (
        "std::enable_if<(8)>(0), void>::type vllm::rms_norm_kernel<c10::BFloat16, 8>(int)", "rms_norm_kernel<bf16, 8>",
    ),
    ("void at::native::(anonymous namespace)::copy_kernel<c10::Half>(int) [clone .kd]", "copy_kernel<fp16>"),
])  # fmt: skip
def test_what_is_kept(name: str, short: str) -> None:
    assert short_kernel_name(name) == short


def test_names_that_come_out_alike_are_numbered() -> None:
    once, again = ADD.format("int*", "int"), ADD.format("long*", "long")
    assert short_kernel_names([once, "gemm", again]) == (
        "vectorized_elementwise_kernel<CUDAFunctor_add, 4, 3> #1",
        "gemm",
        "vectorized_elementwise_kernel<CUDAFunctor_add, 4, 3> #2",
    )


@given(st.text(max_size=300) | st.from_regex(r"(_ZN|void |std::enable_if<|Cijk_)[\w<>:(), ]*", fullmatch=True))
def test_any_name_becomes_a_short_one(name: str) -> None:
    assert len(short_kernel_name(name)) <= LONGEST
