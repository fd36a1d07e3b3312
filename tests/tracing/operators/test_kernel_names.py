"""Names of kernels, as libraries write them, shortened to what tells them apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refshard.tracing.names import LONGEST, short_kernel_name, short_kernel_names

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


@pytest.mark.parametrize(
    ("name", "short"),
    [
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
            "std::enable_if<(8)>(0), void>::type vllm::rms_norm_kernel<c10::BFloat16, 8>(int)",
            "rms_norm_kernel<bf16, 8>",
        ),
        ("void at::native::(anonymous namespace)::copy_kernel<c10::Half>(int) [clone .kd]", "copy_kernel<fp16>"),
    ],
)
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
