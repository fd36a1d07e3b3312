// Which attention kernel torch takes on a CUDA accelerator. The rules are those of torch 2.13, from
// aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and aten/src/ATen/native/transformers/sdp_utils_cpp.h, checked
// against the binary of its CUDA 13.0 build, for dense tensors. Nested tensors are not modelled: no fused kernel takes
// them here, so they go to math.
#pragma once

#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "capability.h"

namespace refshard {

// Sizes and strides in elements; of a query, key or value: batch, heads, sequence, head dimension.
struct AttentionTensor {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kBFloat16;
  int64_t storage_offset = 0;
  bool requires_grad = false;
  bool nested = false;
  bool on_device = true;
};

struct AttentionCall {
  AttentionTensor query, key, value;
  std::optional<AttentionTensor> mask;
  double dropout = 0;  // probability
  bool causal = false;
  bool grouped = false;  // enable_gqa
  bool grad_enabled = true;
};

// What the user's program allows, and in which order torch tries it.
struct AttentionSettings {
  bool math = true, flash = true, efficient = true, cudnn = true, overrideable = true;
  bool flash3 = false;         // FlashAttention-3 is registered: fp8 is welcome
  bool deterministic = false;  // torch.use_deterministic_algorithms(True), not warn_only
  std::array<at::SDPBackend, at::num_sdp_backends> order = {
      at::SDPBackend::flash_attention, at::SDPBackend::efficient_attention, at::SDPBackend::math,
      at::SDPBackend::cudnn_attention, at::SDPBackend::overrideable};
};

// Why a kernel does not take a call; nothing if it does.
using Refusal = std::optional<std::string>;

Refusal refuse_flash(const AttentionCall& call, const AttentionSettings& settings, const Capability& capability);
Refusal refuse_efficient(const AttentionCall& call, const AttentionSettings& settings, const Capability& capability);
Refusal refuse_cudnn(const AttentionCall& call, const AttentionSettings& settings, const Capability& capability);

// Whether torch puts cuDNN first on this accelerator. TORCH_CUDNN_SDPA_DEPRIORITIZED=1 is not looked at here.
bool prefers_cudnn(const Capability& capability);

// The first kernel in the order that takes the call; error if the user allows none at all. Throws c10::Error, with
// torch's text, after a warning for each kernel, if some are allowed but none takes it.
at::SDPBackend choose_backend(const AttentionCall& call, const AttentionSettings& settings,
                              const Capability& capability);

// What torch's global context says now.
AttentionSettings current_attention_settings();

// The same from tensors and torch's global context, for the device's capability: an at::SDPBackend. Like torch, the
// first call of a process puts cuDNN first in the context's order if this accelerator prefers it. Throws c10::Error.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped);

// Whether one kernel would take the call, as torch.backends.cuda.can_use_flash_attention and its like say.
bool can_use_attention(int64_t backend, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                       const std::optional<at::Tensor>& mask, double dropout, bool causal, bool grouped);

}  // namespace refshard
