// Which attention kernel torch takes on this device. It asks the dispatcher in some places and a stub in others.
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include "attention_choice.h"
#include "device.h"

namespace refshard {
namespace {

int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
               bool grouped) {
  // The CPU has no kernel by the name of a GPU's, so values come from plain matrix products.
  if (!device().dry()) return static_cast<int64_t>(at::SDPBackend::math);
  return choose_attention(query, key, value, mask, dropout, causal, scale, grouped);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("_fused_sdp_choice", choose); }

}  // namespace

void register_attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose); }

}  // namespace refshard
