#include "attention_choice.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/env.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <initializer_list>

#include "device.h"

namespace refshard {
namespace attention_rules {

// One rule: whether it holds, and what to say where it does not.
Refusal unless(bool holds, const char* otherwise) { return holds ? Refusal() : Refusal(otherwise); }

// The first refusal of several rules.
template <typename... Rules>
Refusal first_of(Rules... rules) {
  Refusal found;
  ((found || (found = rules())), ...);
  return found;
}

int64_t head_dim(const AttentionTensor& tensor) { return tensor.sizes[3]; }
int64_t sequence(const AttentionTensor& tensor) { return tensor.sizes[2]; }
int64_t heads(const AttentionTensor& tensor) { return tensor.sizes[1]; }
int64_t batch(const AttentionTensor& tensor) { return tensor.sizes[0]; }

bool half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// input_requires_grad
bool needs_grad(const AttentionCall& call) {
  return call.grad_enabled && (call.query.requires_grad || call.key.requires_grad || call.value.requires_grad);
}

// check_all_tensors_on_device, check_tensor_shapes; what follows in a list of rules relies on four dimensions.
Refusal placed(const AttentionCall& call) {
  if (!call.query.on_device) return "the query is not on a CUDA device";
  if (call.query.nested || call.key.nested || call.value.nested) return "nested tensors are not modelled";
  return unless(call.query.sizes.size() == 4 && call.key.sizes.size() == 4 && call.value.sizes.size() == 4,
                "query, key and value must have 4 dimensions");
}

// check_tensor_dtype
Refusal dtype_among(const AttentionCall& call, std::initializer_list<at::ScalarType> allowed) {
  const auto type = call.query.dtype;
  return unless(type == call.key.dtype && type == call.value.dtype &&
                    std::find(allowed.begin(), allowed.end(), type) != allowed.end(),
                "query, key and value must share a dtype that the kernel has");
}

// check_dtypes_low_precision
Refusal low_precision(const AttentionCall& call, const Capability& capability) {
  if (capability.major >= 8) return dtype_among(call, {at::kHalf, at::kBFloat16});
  return dtype_among(call, {at::kHalf});
}

// check_nonzero_sequence_lengths_dense
Refusal nonempty(const AttentionCall& call) {
  return unless(sequence(call.query) != 0 && sequence(call.key) != 0, "a sequence is empty");
}

// check_last_dim_stride_equals_1_dense
Refusal dense_rows(const AttentionCall& call, bool ignore_one_element) {
  const auto dense = [](const AttentionTensor& tensor) { return tensor.strides.back() == 1; };
  const bool rows = (dense(call.query) && dense(call.key) && dense(call.value)) ||
                    (ignore_one_element && head_dim(call.query) == 1);
  const bool masked = call.mask && !call.mask->strides.empty();
  return unless(rows && (!masked || dense(*call.mask)), "the last dimension must have stride 1");
}

// check_batch_size_and_num_heads_dense, check_grouped_query_attention
Refusal matching_heads(const AttentionCall& call, bool knows_groups, bool same_key_and_value) {
  if (batch(call.query) != batch(call.key) || batch(call.query) != batch(call.value)) {
    return "query, key and value must have the same batch size";
  }
  const auto q = heads(call.query), k = heads(call.key), v = heads(call.value);
  if (!call.grouped || !knows_groups) return unless(q == k && q == v, "query, key and value must have the same heads");
  if (same_key_and_value && k != v) return "key and value must have the same heads";
  return unless(k && v && q % k == 0 && q % v == 0, "the heads of key and value must divide those of the query");
}

// check_attn_mask_shape
Refusal mask_shape(const AttentionCall& call) {
  if (!call.mask) return std::nullopt;
  if (call.mask->requires_grad) return "the mask requires a gradient";
  const auto& sizes = call.mask->sizes;
  const auto fits = [](int64_t size, int64_t target) { return size == target || size == 1; };
  const auto dims = sizes.size();
  const bool fitting = (dims == 2 || dims == 4) && fits(sizes[dims - 2], sequence(call.query)) &&
                       fits(sizes[dims - 1], sequence(call.key)) &&
                       (dims == 2 || (fits(sizes[0], batch(call.query)) && fits(sizes[1], heads(call.query))));
  return unless(fitting, "the mask must expand to (queries, keys) or (batch, heads, queries, keys)");
}

// check_head_dim_size_flash
Refusal flash_head_dim(const AttentionCall& call) {
  const auto d = head_dim(call.query);
  return unless(d == head_dim(call.key) && d == head_dim(call.value) && d <= 256,
                "query, key and value must have the same head dimension, at most 256");
}

// check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
Refusal flash_backward(const AttentionCall& call, const Capability& capability) {
  const bool small = capability.between(86, 89) || capability.between(120, 121);
  if (!needs_grad(call) || !small) return std::nullopt;
  const auto d = head_dim(call.query);
  return unless(d <= 192 || (d > 224 && call.dropout <= 0),
                "compute capabilities 8.6 to 8.9 and 12.x have no backward for this head dimension");
}

// minimum_gemm_alignment, in elements
int64_t gemm_alignment(const AttentionCall& call, const Capability& capability) {
  const bool is_half = half(call.query.dtype);
  const bool tensor_cores = capability.major >= 8 || (capability.major == 7 && is_half);
  const int64_t least = capability.major >= 8 ? 4 : 1;
  return tensor_cores ? std::max<int64_t>(least, 128 / (is_half ? 16 : 32)) : least;
}

// check_head_dim_size_mem_efficient, check_data_ptr_alignment_mem_efficient
Refusal efficient_alignment(const AttentionCall& call, const Capability& capability) {
  const auto alignment = gemm_alignment(call, capability);
  const auto aligned = [&](int64_t size) { return size > 0 && size % alignment == 0; };
  if (head_dim(call.query) != head_dim(call.key) || !aligned(head_dim(call.query)) || !aligned(head_dim(call.value))) {
    return "head dimensions must be a multiple of " + std::to_string(alignment);
  }
  if (capability.major < 8) return std::nullopt;
  for (const auto* tensor : {&call.query, &call.key, &call.value}) {
    const auto empty = std::find(tensor->sizes.begin(), tensor->sizes.end(), 0) != tensor->sizes.end();
    const auto item = static_cast<int64_t>(c10::elementSize(tensor->dtype));
    const auto bytes = alignment * static_cast<int64_t>(c10::elementSize(call.query.dtype));
    if (!empty && tensor->storage_offset * item % bytes) {
      return "storage offsets must be a multiple of " + std::to_string(bytes) + " bytes";
    }
  }
  return std::nullopt;
}

// check_cudnn_tensor_shapes; what it says of cuDNN before 9.0 is left out, since refuse_cudnn refuses that.
Refusal cudnn_shapes(const AttentionCall& call, const Capability& capability) {
  constexpr int64_t most = 65535;
  if (batch(call.query) > most || heads(call.query) > most) return "batch size and heads must be at most 65535";
  const auto qk = head_dim(call.query), v = head_dim(call.value);
  int64_t limit = capability.cudnn_version >= 91000 && capability.number() == 90 ? 256 : 128;
  if (capability.cudnn_version >= 91100 && capability.major == 10 && qk == 192 && v == 128) limit = 192;
  if (qk > limit || v > limit) return "head dimensions must be at most " + std::to_string(limit);
  if (qk % 8 || v % 8) return "head dimensions must be a multiple of 8";
  if (sequence(call.key) == 1) return "one key is not supported";
  return unless(call.dropout == 0 || sequence(call.query) != 1, "one query with dropout is not supported");
}

// The part of can_use_cudnn_attention that looks at versions and settings alone.
Refusal cudnn_allowed(const AttentionCall& call, const AttentionSettings& settings, const Capability& capability) {
  if (!capability.cudnn || capability.cudnn_version < 90000) return "there is no cuDNN of version 9 or later";
  if (call.dropout > 0 && capability.cudnn_version > 91100 && capability.cudnn_version < 91400) {
    return "cuDNN 9.11 to 9.13 has no dropout in attention";
  }
  if (!settings.cudnn) return "cuDNN attention is disabled";
  return unless(!settings.deterministic, "cuDNN attention is not deterministic");
}

AttentionTensor describe(const at::Tensor& tensor) {
  AttentionTensor made;
  made.dtype = tensor.scalar_type();
  made.requires_grad = tensor.requires_grad();
  made.nested = tensor.is_nested();
  made.on_device = tensor.is_cuda();
  if (made.nested) return made;
  made.sizes = tensor.sizes().vec();
  made.strides = tensor.strides().vec();
  made.storage_offset = tensor.storage_offset();
  return made;
}

AttentionCall call_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                      const std::optional<at::Tensor>& mask, double dropout, bool causal, bool grouped) {
  AttentionCall call{describe(query), describe(key), describe(value), std::nullopt, dropout, causal, grouped,
                     at::GradMode::is_enabled()};
  if (mask && mask->defined()) call.mask = describe(*mask);
  return call;
}

// priority_order: once in a process, and over whatever order the user has set before.
void put_cudnn_first_once(const Capability& capability) {
  static std::atomic<bool> done = false;
  if (done.exchange(true)) return;
  if (c10::utils::check_env("TORCH_CUDNN_SDPA_DEPRIORITIZED") == true || !prefers_cudnn(capability)) return;
  std::vector<int64_t> order;
  for (const auto backend : {at::SDPBackend::cudnn_attention, at::SDPBackend::flash_attention,
                             at::SDPBackend::efficient_attention, at::SDPBackend::math}) {
    order.push_back(static_cast<int64_t>(backend));
  }
  at::globalContext().setSDPPriorityOrder(order);
}

[[noreturn]] void refuse_all(const AttentionCall& call, const AttentionSettings& settings,
                             const Capability& capability) {
  const auto why = [](const Refusal& refusal) { return refusal.value_or("it is not in the order of priority"); };
  TORCH_WARN("Memory efficient kernel not used because: ", why(refuse_efficient(call, settings, capability)));
  TORCH_WARN("Flash attention kernel not used because: ", why(refuse_flash(call, settings, capability)));
  TORCH_WARN("cuDNN attention kernel not used because: ", why(refuse_cudnn(call, settings, capability)));
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}

}  // namespace attention_rules

// can_use_flash_attention
Refusal refuse_flash(const AttentionCall& call, const AttentionSettings& settings, const Capability& capability) {
  using namespace attention_rules;
  const auto dtypes = [&] {
    if (capability.major < 9 || !settings.flash3) return low_precision(call, capability);
    return dtype_among(call, {at::kFloat8_e4m3fn, at::kHalf, at::kBFloat16});
  };
  return first_of([&] { return unless(settings.flash, "flash attention is disabled"); }, [&] { return placed(call); },
                  [&] { return unless(!call.mask, "flash attention takes no mask"); },
                  [&] { return flash_head_dim(call); },
                  [&] { return unless(capability.between(80, 121), "the compute capability is not in 8.0 to 12.1"); },
                  [&] { return flash_backward(call, capability); },
                  [&] {
                    return unless(!call.causal || sequence(call.query) == sequence(call.key),
                                  "a causal mask needs as many queries as keys");
                  },
                  dtypes, [&] { return matching_heads(call, true, true); }, [&] { return nonempty(call); },
                  [&] { return dense_rows(call, true); });
}

// can_use_mem_efficient_attention
Refusal refuse_efficient(const AttentionCall& call, const AttentionSettings& settings, const Capability& capability) {
  using namespace attention_rules;
  const auto dtypes = [&] {
    if (capability.major >= 8) return dtype_among(call, {at::kHalf, at::kFloat, at::kBFloat16});
    return dtype_among(call, {at::kHalf, at::kFloat});
  };
  return first_of([&] { return unless(settings.efficient, "memory-efficient attention is disabled"); },
                  [&] { return placed(call); },
                  [&] { return unless(capability.between(50, 121), "the compute capability is not in 5.0 to 12.1"); },
                  [&] { return efficient_alignment(call, capability); }, [&] { return nonempty(call); },
                  [&] { return dense_rows(call, false); }, [&] { return matching_heads(call, false, true); }, dtypes);
}

// can_use_cudnn_attention
Refusal refuse_cudnn(const AttentionCall& call, const AttentionSettings& settings, const Capability& capability) {
  using namespace attention_rules;
  return first_of([&] { return cudnn_allowed(call, settings, capability); }, [&] { return placed(call); },
                  [&] { return low_precision(call, capability); }, [&] { return mask_shape(call); },
                  [&] { return unless(capability.between(80, 121), "the compute capability is not in 8.0 to 12.1"); },
                  [&] {
                    return unless(call.dropout * 16 == std::floor(call.dropout * 16),
                                  "the dropout must be a multiple of 1/16");
                  },
                  [&] { return nonempty(call); }, [&] { return dense_rows(call, true); },
                  [&] { return matching_heads(call, true, false); }, [&] { return cudnn_shapes(call, capability); });
}

// check_prefer_cudnn_attention
bool prefers_cudnn(const Capability& capability) {
  if (!capability.cudnn || capability.cudnn_version <= 91500) return false;
  if (capability.major != 9 && capability.major != 10) return false;
  return capability.cuda_version >= 13000 || capability.minor == 0 || capability.minor == 3;
}

// select_sdp_backend
at::SDPBackend choose_backend(const AttentionCall& call, const AttentionSettings& settings,
                              const Capability& capability) {
  using at::SDPBackend;
  if (!settings.math && !settings.flash && !settings.efficient && !settings.cudnn) return SDPBackend::error;
  for (const auto backend : settings.order) {
    bool taken = false;
    switch (backend) {
      case SDPBackend::cudnn_attention: taken = !refuse_cudnn(call, settings, capability); break;
      case SDPBackend::flash_attention: taken = !refuse_flash(call, settings, capability); break;
      case SDPBackend::efficient_attention: taken = !refuse_efficient(call, settings, capability); break;
      case SDPBackend::math: taken = settings.math; break;
      case SDPBackend::overrideable: TORCH_CHECK(!settings.overrideable, "Invalid backend"); break;
      default: TORCH_CHECK(false, "Invalid backend");
    }
    if (taken) return backend;
  }
  attention_rules::refuse_all(call, settings, capability);
}

AttentionSettings current_attention_settings() {
  auto& context = at::globalContext();
  AttentionSettings settings;
  settings.math = context.userEnabledMathSDP();
  settings.flash = context.userEnabledFlashSDP();
  settings.efficient = context.userEnabledMemEfficientSDP();
  settings.cudnn = context.userEnabledCuDNNSDP();
  settings.overrideable = context.userEnabledOverrideableSDP();
  settings.flash3 = context.userEnabledFA3SDP();
  settings.deterministic = context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  settings.order = context.sDPPriorityOrder();
  return settings;
}

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> /*scale*/, bool grouped) {
  const auto call = attention_rules::call_of(query, key, value, mask, dropout, causal, grouped);
  const auto& capability = device().options.capability;
  auto& context = at::globalContext();
  if (context.userEnabledMathSDP() || context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP() ||
      context.userEnabledCuDNNSDP()) {
    attention_rules::put_cudnn_first_once(capability);
  }
  const auto backend = choose_backend(call, current_attention_settings(), capability);
  TORCH_CHECK(backend != at::SDPBackend::error, "No viable backend for scaled_dot_product_attention was found. ",
              "This is likely due to turning off both the math kernel and the fused kernels.");
  return static_cast<int64_t>(backend);
}

bool can_use_attention(int64_t backend, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const std::optional<at::Tensor>& mask, double dropout, bool causal, bool grouped) {
  const auto call = attention_rules::call_of(query, key, value, mask, dropout, causal, grouped);
  const auto settings = current_attention_settings();
  const auto& capability = device().options.capability;
  switch (static_cast<at::SDPBackend>(backend)) {
    case at::SDPBackend::flash_attention: return !refuse_flash(call, settings, capability);
    case at::SDPBackend::efficient_attention: return !refuse_efficient(call, settings, capability);
    case at::SDPBackend::cudnn_attention: return !refuse_cudnn(call, settings, capability);
    default: return false;
  }
}

}  // namespace refshard
