// Memory that CUDA kernels take from the caching allocator in addition to their results. Sizes are those of torch
// 2.13; each rule names its source. Temporary storage of cub's scans, selections and reductions is left out: it is
// small (a few bytes for each thousand elements), and those kernels are rare in training.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "capability.h"

namespace refshard {

// One tensor that an operator is given. Strides are in elements.
struct TensorArgument {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool on_device = true;
};

// The operator's other arguments, as far as they decide how much memory its kernels take.
struct Scalars {
  std::vector<int64_t> dims;            // `dim`; empty: all
  std::optional<at::ScalarType> dtype;  // `dtype`
  int64_t num_weights = 0;              // of embedding_dense_backward: rows
  bool scale_grad_by_freq = false;      // of embedding_dense_backward
  bool accumulate = false;              // of index_put
  bool non_blocking = false;            // of copy_
  double dropout = 0;                   // `dropout_p`
  bool deterministic = false;           // torch.use_deterministic_algorithms(True), not warn_only
};
Scalars scalars_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first);

struct OperatorCall {
  std::string_view name;               // as `aten::mm`, with or without its overload
  std::vector<TensorArgument> inputs;  // defined tensors in the order of the schema, lists unrolled
  Scalars scalars;
};

enum class Moment { BeforeResults, AfterResults };
constexpr int kUntilReturn = -1;

// One allocation, in bytes as asked for (the allocator rounds). It lives until `lives_for` further ones of the same
// moment have been taken: 0 is freed at once, kUntilReturn when the operator returns.
struct Workspace {
  size_t bytes = 0;
  Moment moment = Moment::AfterResults;
  int lives_for = kUntilReturn;
};

// Whether an operator may take any; cheap, since every launch asks.
bool takes_workspaces(std::string_view op);
// In the order in which they are taken.
std::vector<Workspace> workspaces(const OperatorCall& call, const Capability& capability);

// Calls `allocate(bytes)` for each workspace of a moment and drops what it returns when torch would; returns what
// lives until the operator returns.
template <typename Allocate>
auto take(const std::vector<Workspace>& all, Moment moment, Allocate allocate) {
  using Held = decltype(allocate(size_t{}));
  std::vector<Held> held;
  std::vector<std::pair<int, Held>> passing;
  for (const auto& workspace : all) {
    if (workspace.moment != moment || workspace.bytes == 0) continue;
    auto block = allocate(workspace.bytes);
    for (auto& [left, kept] : passing) --left;
    std::erase_if(passing, [](const auto& entry) { return entry.first <= 0; });
    if (workspace.lives_for == kUntilReturn) {
      held.push_back(std::move(block));
    } else if (workspace.lives_for > 0) {
      passing.emplace_back(workspace.lives_for, std::move(block));
    }
  }
  return held;
}

// Bytes that the first call of this operator on a (device, host thread, stream) takes for cuBLAS and keeps; 0 if it
// does not call cuBLAS. cuBLASLt shares them (TORCH_CUBLASLT_UNIFIED_WORKSPACE=0, which parts the two, is not
// modelled).
size_t persistent_workspace(std::string_view op, const Capability& capability);

// CUBLAS_WORKSPACE_CONFIG (":SIZE:COUNT" in KiB, any number of them) in bytes; the default for this accelerator if it
// is empty or none can be read in it.
size_t cublas_workspace(std::string_view configuration, const Capability& capability);

}  // namespace refshard
