#include "translation.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>

#include <cstring>
#include <string_view>
#include <unordered_set>

#include "large_integers.h"
#include "memory.h"
#include "routing.h"

namespace refshard {
namespace {

// Operators that take tensors of the host beside those of the device: indices, which they move, and lengths.
const std::unordered_set<std::string_view> kTakingHostTensors = {
    "aten::index", "aten::_unsafe_index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index_put", "aten::_ctc_loss", "aten::_ctc_loss_backward", "aten::_cudnn_ctc_loss",
    "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward",
};

c10::Storage storage_over(const at::Tensor& tensor, c10::DeviceType target) {
  const auto& storage = tensor.storage();
  void* address = target == c10::DeviceType::CPU ? const_cast<void*>(storage.data()) : nullptr;
  if (address) write_out_values(address);
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(address, c10::Device(target)),
          c10::GetAllocator(target), /*resizable=*/true};
}

void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  const auto& source = from.storage();
  const auto offset = from.storage_offset() * from.itemsize();
  const auto size = std::min(to.storage().nbytes(), source.nbytes() - offset);
  if (size) std::memcpy(to.storage().mutable_data(), static_cast<const char*>(source.data()) + offset, size);
}

}  // namespace

void Translation::arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first) {
  for (size_t place = first; place < stack.size(); ++place) {
    auto& value = stack[place];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!device_) device_ = value.toDevice();
      value = c10::Device(target_);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      value = c10::IValue();  // Drawing has seeded the host's
    } else {
      change_tensors(value, [this](const at::Tensor& tensor) { return there(tensor); });
    }
  }
  // Some meta kernels insist that the first argument lies where the result does, also if it is a scalar of the host. A
  // number that torch has wrapped stays there: meta kernels in Python are given it as a number again.
  if (target_ == c10::DeviceType::Meta && op.hasTag(at::Tag::pointwise) && stack[first].isTensor()) {
    const auto& scalar = stack[first].toTensor();
    const bool on_host = scalar.defined() && scalar.is_cpu() && scalar.dim() == 0;
    if (on_host && !scalar.unsafeGetTensorImpl()->is_wrapped_number()) {
      stack[first] = at::empty({}, scalar.options().device(at::kMeta));
    }
  }
  const auto& name = op.schema().name();
  TORCH_CHECK(
      !host_tensor_ || !device_ || kTakingHostTensors.contains(name), "Expected all tensors to be on the same device, ",
      "but found at least two devices, ", *device_, " and cpu! (when checking arguments of ", name, ")");
  if (!device_) device_ = c10::Device(c10::DeviceType::CUDA, current_device());
}

void Translation::results(torch::jit::Stack& stack, size_t first) {
  grow_outputs();
  for (size_t place = first; place < stack.size(); ++place) {
    change_tensors(stack[place], [this](const at::Tensor& tensor) { return back(tensor); });
  }
}

at::Tensor Translation::there(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_cuda()) {
    host_tensor_ |= tensor.is_cpu() && tensor.dim() > 0;
    return tensor;
  }
  if (!device_) device_ = tensor.device();
  TORCH_CHECK(*device_ == tensor.device(), "Expected all tensors to be on the same device, but found at least two ",
              "devices, ", *device_, " and ", tensor.device(), "!");
  for (const auto& pair : tensors_) {
    if (pair.here.is_same(tensor)) return pair.there;
  }
  const auto key = target_ == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  auto made = view(storage_there(tensor), key, tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  tensors_.push_back({tensor, made});
  return made;
}

at::Tensor Translation::back(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != target_) return tensor;
  for (const auto& pair : tensors_) {
    if (pair.there.is_same(tensor)) return pair.here;
  }
  for (const auto& [here, there] : storages_) {
    if (there.is_alias_of(tensor.storage())) return view(here, c10::DispatchKey::CUDA, tensor);
  }
  return made(tensor);
}

c10::Storage Translation::storage_there(const at::Tensor& tensor) {
  for (const auto& [here, there] : storages_) {
    if (here.is_alias_of(tensor.storage())) return there;
  }
  storages_.emplace_back(tensor.storage(), storage_over(tensor, target_));
  return storages_.back().second;
}

at::Tensor Translation::made(const at::Tensor& like) {
  auto fresh = at::empty_strided(like.sizes(), like.strides(), like.options().device(*device_).pinned_memory(false));
  if (keeps_ && !resident(fresh) && worth_computing(fresh)) set_mark(fresh, Mark::Real, true);
  if (target_ == c10::DeviceType::CPU && resident(fresh)) copy_bytes(fresh, like);
  return fresh;
}

at::Tensor Translation::view(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) const {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return made;
}

void Translation::grow_outputs() {
  for (const auto& [here, there] : tensors_) {
    if (there.sizes() == here.sizes() && there.strides() == here.strides()) continue;
    here.resize_(there.sizes());
    here.unsafeGetTensorImpl()->set_sizes_and_strides(there.sizes(), there.strides());
    if (keeps_ && !resident(here) && worth_computing(here)) set_mark(here, Mark::Real, true);
    const bool moved = there.storage().data() != here.storage().data();
    if (target_ == c10::DeviceType::CPU && moved && resident(here)) copy_bytes(here, there);
  }
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.is_cuda() ? Translation(c10::DeviceType::CPU).there(tensor) : tensor;
}

}  // namespace refshard
