// Operators that make tensors or change which memory they lie in: they launch nothing.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"

namespace refshard {
namespace {

constexpr c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA);

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> on, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  DeviceScope scope(on ? on->index() : -1);
  return at::detail::empty_generic(size, &device_allocator(), kCuda, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> on, std::optional<bool>) {
  DeviceScope scope(on ? on->index() : -1);
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kCuda, c10::dtype_or_default(dtype));
}

// Zeros that take no memory: what autograd gives for a gradient that is zero.
struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t) override {
    return {nullptr, c10::Device(c10::DeviceType::CUDA, current_device())};
  }
  void copy_data(void*, const void*, size_t) const override {}
};

at::Tensor zero_tensor(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                       std::optional<c10::Device> on, std::optional<bool>) {
  static NoMemory nothing;
  DeviceScope scope(on ? on->index() : -1);
  const auto keys = kCuda | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &nothing, keys, c10::dtype_or_default(dtype), std::nullopt);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto needed = static_cast<size_t>((self.storage_offset() + self.numel()) * self.itemsize());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(*storage, needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_whole_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &device_allocator(), true));
}

// Whether a library's CTC loss is to be taken: torch's own serves as well.
bool no_other_ctc(const at::Tensor&, const at::Tensor&, c10::IntArrayRef, c10::IntArrayRef, int64_t) { return false; }
bool no_other_ctc_tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) {
  return false;
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  record_stream(self.device().index(), self.storage().data(), stream.id());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, c10::IntArrayRef)>(at::native::view));
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_", set_nothing);
  library.impl("_efficientzerotensor", zero_tensor);
  for (const std::string name : {"_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"}) {
    library.impl(name.c_str(), no_other_ctc);
    library.impl((name + ".Tensor").c_str(), no_other_ctc_tensor);
  }
  library.impl("record_stream", record_stream_of);
}

}  // namespace
}  // namespace refshard
