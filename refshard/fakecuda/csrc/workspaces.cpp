#include "workspaces.h"

#include <ATen/Context.h>

#include <cstdlib>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "workspace_rules.h"

namespace refshard {
namespace workspace_rules {

int64_t numel(const TensorArgument& tensor) {
  int64_t product = 1;
  for (const auto size : tensor.sizes) product *= size;
  return product;
}

int64_t bytes(const TensorArgument& tensor) { return numel(tensor) * item_size(tensor.dtype); }

bool contiguous(const TensorArgument& tensor) {
  int64_t expected = 1;
  for (size_t d = tensor.sizes.size(); d-- > 0;) {
    if (tensor.sizes[d] == 1) continue;
    if (tensor.strides[d] != expected) return numel(tensor) == 0;
    expected *= tensor.sizes[d];
  }
  return true;
}

bool dense(const TensorArgument& tensor) {
  std::vector<size_t> order;
  for (size_t d = 0; d < tensor.sizes.size(); ++d) {
    if (tensor.sizes[d] != 1) order.push_back(d);
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tensor.strides[a] < tensor.strides[b]; });
  int64_t expected = 1;
  for (const auto d : order) {
    if (tensor.strides[d] != expected) return numel(tensor) == 0;
    expected *= tensor.sizes[d];
  }
  return true;
}

TensorArgument transposed(const TensorArgument& tensor, size_t one, size_t other) {
  auto made = tensor;
  std::swap(made.sizes[one], made.sizes[other]);
  std::swap(made.strides[one], made.strides[other]);
  return made;
}

// `sum` of `aten::sum.dim_IntList`.
std::string_view base_name(std::string_view op) {
  if (const auto colons = op.rfind("::"); colons != op.npos) op.remove_prefix(colons + 2);
  return op.substr(0, op.find('.'));
}

const std::unordered_map<std::string_view, Rule>& rules() {
  static const std::unordered_map<std::string_view, Rule> table = {
      {"_scaled_dot_product_flash_attention", flash_forward},
      {"_flash_attention_forward", flash_forward},
      {"_scaled_dot_product_flash_attention_backward", flash_backward},
      {"_flash_attention_backward", flash_backward},
      {"_scaled_dot_product_efficient_attention", efficient_forward},
      {"_efficient_attention_forward", efficient_forward},
      {"_scaled_dot_product_efficient_attention_backward", efficient_backward},
      {"_efficient_attention_backward", efficient_backward},
      {"_scaled_dot_product_cudnn_attention_backward", cudnn_backward},
      {"_cudnn_attention_backward", cudnn_backward},
      {"sum", reduction}, {"nansum", reduction}, {"mean", reduction}, {"prod", reduction}, {"norm", reduction},
      {"linalg_vector_norm", reduction}, {"amax", reduction}, {"amin", reduction}, {"argmax", reduction},
      {"argmin", reduction}, {"var", reduction}, {"std", reduction}, {"var_mean", reduction},
      {"std_mean", reduction}, {"_foreach_norm", foreach_reduction}, {"_foreach_max", foreach_reduction},
      {"_foreach_powsum", foreach_reduction},
      {"native_layer_norm", layer_norm}, {"_fused_rms_norm", layer_norm},
      {"native_layer_norm_backward", layer_norm_backward}, {"_fused_rms_norm_backward", rms_norm_backward},
      {"mm", matrix_product}, {"addmm", matrix_product}, {"addmm_", matrix_product}, {"bmm", matrix_product},
      {"baddbmm", matrix_product}, {"baddbmm_", matrix_product}, {"_scaled_mm", matrix_product},
      {"_addmm_activation", matrix_product}, {"_grouped_mm", grouped_product},
      {"embedding_dense_backward", embedding_backward}, {"sort", sort},
      {"index_put", index_put}, {"index_put_", index_put}, {"_index_put_impl_", index_put},
      {"_softmax", softmax}, {"_log_softmax", softmax}, {"_softmax_backward_data", softmax_backward},
      {"_log_softmax_backward_data", softmax}, {"copy_", copy},
  };
  return table;
}

// CUDABlas.cpp, LinearAlgebra: what gets a handle by getCurrentCUDABlasHandle().
const std::unordered_set<std::string_view>& users_of_cublas() {
  static const std::unordered_set<std::string_view> names = {
      "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "mv", "addmv", "addmv_", "dot",
      "vdot", "_addmm_activation", "_scaled_mm", "_scaled_mm_v2", "_int_mm", "linalg_solve_triangular", "triangular_solve",
  };
  return names;
}

}  // namespace workspace_rules

bool takes_workspaces(std::string_view op) {
  return workspace_rules::rules().contains(workspace_rules::base_name(op));
}

std::vector<Workspace> workspaces(const OperatorCall& call, const Capability& capability) {
  const auto& table = workspace_rules::rules();
  const auto rule = table.find(workspace_rules::base_name(call.name));
  if (rule == table.end()) return {};
  workspace_rules::Taken taken;
  rule->second(call, capability, taken);
  return taken.all();
}

Scalars scalars_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, size_t first) {
  Scalars found;
  for (size_t place = 0; place < schema.arguments().size(); ++place) {
    const auto& name = schema.arguments()[place].name();
    const auto& value = stack[first + place];
    if (name == "dim" && value.isInt()) found.dims = {value.toInt()};
    if (name == "dim" && value.isIntList()) found.dims = value.toIntVector();
    if (name == "dtype" && value.isInt()) found.dtype = value.toScalarType();
    if (name == "num_weights" && value.isInt()) found.num_weights = value.toInt();
    if (name == "scale_grad_by_freq" && value.isBool()) found.scale_grad_by_freq = value.toBool();
    if (name == "accumulate" && value.isBool()) found.accumulate = value.toBool();
    if (name == "non_blocking" && value.isBool()) found.non_blocking = value.toBool();
    if (name == "dropout_p" && value.isDouble()) found.dropout = value.toDouble();
  }
  const auto& context = at::globalContext();
  found.deterministic = context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  return found;
}

// aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize: 32 MiB on Hopper and Blackwell, else what
// ":4096:2:16:8" says.
size_t cublas_workspace(std::string_view configuration, const Capability& capability) {
  const bool large = capability.major == 9 || capability.major == 10 || capability.major == 12;
  const size_t otherwise = large ? size_t{32} << 20 : size_t{4096 * 2 + 16 * 8} << 10;
  size_t total = 0;
  bool found = false;
  for (size_t at = configuration.find(':'); at != configuration.npos; at = configuration.find(':', at)) {
    const std::string rest(configuration.substr(at));
    unsigned long long size = 0, count = 0;
    int length = 0;
    if (std::sscanf(rest.c_str(), ":%llu:%llu%n", &size, &count, &length) == 2) {
      total += static_cast<size_t>(size * count) << 10;
      found = true;
      at += static_cast<size_t>(length);
    } else {
      ++at;
    }
  }
  return found ? total : otherwise;
}

size_t persistent_workspace(std::string_view op, const Capability& capability) {
  const auto name = workspace_rules::base_name(op);
  // GroupedBlas.cpp: without a CUTLASS kernel for the architecture, one product for each group.
  const bool grouped = name == "_grouped_mm" && !capability.between(90, 90) && capability.major != 10;
  if (!grouped && !workspace_rules::users_of_cublas().contains(name)) return 0;
  static const std::string configuration = [] {
    const auto* value = std::getenv("CUBLAS_WORKSPACE_CONFIG");
    return std::string(value ? value : "");
  }();
  return cublas_workspace(configuration, capability);
}

}  // namespace refshard
