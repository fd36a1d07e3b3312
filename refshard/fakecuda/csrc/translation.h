// Stand-ins for an operator's CUDA tensors on the device type that runs it in their place: on the CPU over the same
// memory, or on meta with shapes alone. Tensors that share a storage share one there too, so views stay views.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace refshard {

class Translation {
 public:
  // `target` is CPU or Meta. With `keeps`, large results of the CPU keep their values.
  explicit Translation(c10::DeviceType target, bool keeps = false) : target_(target), keeps_(keeps) {}

  // Replaces the operator's arguments on the stack, from `first` on.
  void arguments(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t first);
  // Replaces its results, which have taken the arguments' place. Lets outputs grow that the operator made grow.
  void results(torch::jit::Stack& stack, size_t first);

  at::Tensor there(const at::Tensor& tensor);
  at::Tensor back(const at::Tensor& tensor);

 private:
  struct Pair {
    at::Tensor here, there;
  };
  c10::Storage storage_there(const at::Tensor& tensor);
  at::Tensor made(const at::Tensor& like);
  at::Tensor view(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) const;
  void grow_outputs();

  c10::DeviceType target_;
  bool keeps_;
  std::optional<c10::Device> device_;
  bool host_tensor_ = false;
  std::vector<Pair> tensors_;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;
};

// Calls `change` for each tensor in a value (a tensor, or a list of tensors or of optional ones) and keeps what it
// returns.
template <typename Change>
void change_tensors(c10::IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorVector();
    for (auto& tensor : list) tensor = change(tensor);
    value = std::move(list);
  } else if (value.isList()) {
    const auto items = value.toListRef();
    if (std::none_of(items.begin(), items.end(), [](const auto& item) { return item.isTensor(); })) return;
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : items) {
      list.push_back(item.isNone() ? std::nullopt : std::optional<at::Tensor>(change(item.toTensor())));
    }
    value = std::move(list);
  }
}

// Calls `see` for each defined tensor in a value.
template <typename See>
void for_each_tensor(const c10::IValue& value, See see) {
  const auto check = [&](const at::Tensor& tensor) {
    if (tensor.defined()) see(tensor);
  };
  if (value.isTensor()) {
    check(value.toTensor());
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) {
      if (item.isTensor()) check(item.toTensor());
    }
  }
}

// The same bytes as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace refshard
