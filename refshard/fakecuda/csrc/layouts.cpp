// Layouts of tensors that the fake device does not have. Each operator on one of them is refused by its name.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace refshard {
namespace {

void refuse_sparse(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, c10::toString(op.operator_name()), ": the fake CUDA device has no sparse tensors; use dense ones for a ",
      "dry run (sparse=False for an embedding)");
}

constexpr auto kNoNested =
    ": the fake CUDA device has no nested tensors of the layout torch.strided; use layout=torch.jagged for a dry run";

void refuse_nested(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, c10::toString(op.operator_name()), kNoNested);
}

// Refused before there is one: autograd asks a result for its shape where an exception ends the process.
at::Tensor refuse_list(at::TensorList, std::optional<at::ScalarType>, std::optional<at::Layout>,
                       std::optional<at::Device>, std::optional<bool>) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "aten::_nested_tensor_from_tensor_list", kNoNested);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("_nested_tensor_from_tensor_list", refuse_list); }

TORCH_LIBRARY_IMPL(_, SparseCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
}
TORCH_LIBRARY_IMPL(_, NestedTensorCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_nested>());
}

}  // namespace
}  // namespace refshard
