// Products of matrices in groups: one kernel for bf16 on Hopper and Blackwell. For other types and GPUs torch launches a
// product for each group, and the host waits for their sizes.
#include <ATen/ATen.h>
#include <ATen/native/GroupedMMUtils.h>
#include <torch/library.h>

#include "device.h"

namespace refshard {

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);  // operators.cpp

namespace {

// _grouped_mm(self, mat2, offs, bias, out_dtype)
void grouped_mm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto first = stack->size() - op.schema().arguments().size();
  const auto a = (*stack)[first].toTensor(), b = (*stack)[first + 1].toTensor();
  const auto major = device().options.capability.major;
  const bool one_kernel = a.scalar_type() == at::kBFloat16 && b.scalar_type() == at::kBFloat16;
  if (one_kernel && (major == 9 || major == 10)) return kernel(op, stack);
  const auto offsets = (*stack)[first + 2].toOptional<at::Tensor>();
  const auto bias = (*stack)[first + 3].toOptional<at::Tensor>();
  const auto dtype = (*stack)[first + 4].toOptional<at::ScalarType>();
  at::native::_grouped_mm_validate_inputs(a, b, offsets, bias, dtype);
  const auto made_of = at::native::_resolve_grouped_mm_out_dtype(a, b, dtype);
  auto out = at::native::create_grouped_gemm_output_tensor(a, b, offsets, made_of);
  at::native::_grouped_mm_fallback(a, b, offsets, bias, dtype, out);
  stack->resize(first);
  stack->emplace_back(out);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&grouped_mm>());
}

}  // namespace
}  // namespace refshard
