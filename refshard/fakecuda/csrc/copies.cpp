// Copies within the device and to and from the host, and operators that hand a value to the host.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "graphs.h"
#include "large_integers.h"
#include "launch.h"
#include "memory.h"
#include "routing.h"
#include "translation.h"

namespace refshard {

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);  // operators.cpp

namespace {

// What of an uncomputed tensor is copied to the host gets placeholders there, up to this size; beyond it would only cost
// the host's memory.
constexpr size_t kFilled = size_t{4} << 20;

const char* direction(const at::Tensor& to, const at::Tensor& from) {
  return to.is_cpu() ? "copy to host" : from.is_cpu() ? "copy from host" : "copy";
}

// Page-locked memory that a copy touches. Copies to and from other memory are staged, or the host waits for them.
void add_page_locked(std::vector<Access>& accesses, const at::Tensor& tensor, bool write) {
  const void* start = tensor.storage().data();
  const auto recorded = tensor.is_cpu() ? page_locked_at(start) : 0;
  if (!recorded) return;
  auto access = access_of(tensor, write);
  access.address += recorded - reinterpret_cast<int64_t>(start);
  accesses.push_back(access);
}

void put_copy(const at::Tensor& to, const at::Tensor& from, StreamId stream) {
  {
    std::lock_guard guard(device().mutex);
    device().streams.launched(stream);
  }
  if (!recorder().on) return;
  std::string signature;
  describe(to, signature);
  describe(from, signature);
  Event event{.kind = Kind::Launch, .name = recorder().names.code("aten::copy_"), .stream = stream};
  event.signature = recorder().signatures.code(signature);
  event.reads = touched_bytes(from);
  event.writes = touched_bytes(to);
  event.flags = to.is_cpu() ? kDeviceToHost : from.is_cpu() ? kHostToDevice : lie_alike({to, from}) ? 0 : kStrided;
  std::vector<Access> on_device;
  if (from.is_cuda()) on_device.push_back(access_of(from, false));
  if (to.is_cuda()) on_device.push_back(access_of(to, true));
  auto accesses = on_device;
  add_page_locked(accesses, from, false);
  add_page_locked(accesses, to, true);
  recorder().add(event, accesses);
  if (to.is_cuda()) recorder().written(block_at(to.device().index(), to.storage().data()), event.name);
  spread_categories("aten::copy_", on_device);
}

// Whether `to` now holds what `from` holds.
bool move_values(const at::Tensor& to, const at::Tensor& from) {
  const bool whole = static_cast<size_t>(to.numel()) * to.itemsize() >= to.storage().nbytes();
  if (from.is_cuda()) note_use(from);
  const bool assumed = from.is_cuda() && marked(from, Mark::Assumed);
  if (assumed && to.is_cuda()) {
    if (whole && !resident(to) && resident(from) && !unknown(from) && worth_computing(to)) {
      set_mark(to, Mark::Real, true);
    }
    set_mark(to, Mark::Assumed, true);
  }
  const auto values = in_runs(to) || in_runs(from) ? values_of(from) : std::nullopt;
  values_are_overwritten(to);
  if (values && put_values(to, *values)) return true;
  const auto real = [](const at::Tensor& tensor) { return tensor.is_cpu() || (tensor.is_cuda() && resident(tensor)); };
  if (real(to) && real(from)) {
    on_host(to).copy_(on_host(from));
    if (to.is_cuda()) {
      const bool now_unknown = from.is_cuda() && unknown(from);
      if (now_unknown || whole) set_unknown(to, now_unknown);
    }
    return !(from.is_cuda() && unknown(from));
  }
  StandIn stand_in;
  const double placeholder = c10::isFloatingType(to.scalar_type()) ? kPlaceholder : 0;
  if (to.is_cpu() && to.nbytes() <= kFilled) {
    to.fill_(placeholder);
  } else if (to.is_cuda() && resident(to)) {
    if (placeholder) on_host(to).fill_(placeholder);
    set_unknown(to, true);
  }
  return false;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (self.is_meta() || given.is_meta() || self.is_same(given)) return self;
  const auto from = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  Allocating allocating("aten::copy_");
  const auto& on_device = self.is_cuda() ? self : from;
  const auto stream = current_stream(on_device.device().index());
  for (const auto& host : {self, from}) {
    TORCH_CHECK(!host.is_cpu() || !capturing(stream) || is_pinned(host.storage().data()),
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
                "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True.");
  }
  put_copy(self, from, stream);
  const bool known = move_values(self, from);
  if (!known && self.is_cpu()) unknown_value_read(std::nullopt);
  if (self.is_cpu()) note_read(from);
  if (!non_blocking && self.is_cpu() != from.is_cpu()) {
    synchronise(direction(self, from), stream, 0, from.is_cuda() && !known ? kValueUnknown : 0);
  }
  return self;
}

// The host reads these tensors: a copy on the current stream, for which it waits.
void put_read(const char* name, std::initializer_list<at::Tensor> tensors) {
  Event event{.kind = Kind::Launch, .name = recorder().names.code(name), .stream = current_stream()};
  event.flags = kDeviceToHost;
  std::vector<Access> accesses;
  for (const auto& tensor : tensors) {
    event.reads += touched_bytes(tensor);
    accesses.push_back(access_of(tensor, false));
  }
  recorder().add(event, accesses);
}

at::Scalar item(const at::Tensor& self) {
  const auto value = in_runs(self) ? values_of(self) : std::nullopt;
  const bool known = value || (resident(self) && !unknown(self));
  put_read("aten::_local_scalar_dense", {self});
  note_read(self);
  synchronise("item", current_stream(self.device().index()), 0, known ? 0 : kValueUnknown);
  if (value) return self.scalar_type() == at::kBool ? at::Scalar(value->sum() != 0) : at::Scalar(value->sum());
  at::Scalar found = self.scalar_type() == at::kBool ? at::Scalar(false) : at::Scalar(int64_t{0});
  if (c10::isFloatingType(self.scalar_type())) found = kPlaceholder;
  if (resident(self)) found = on_host(self).item();
  if (!known) unknown_value_read(found.isFloatingPoint() ? std::optional(found.toDouble()) : std::nullopt);
  return found;
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  const bool known = resident(self) && resident(other);
  put_read("aten::equal", {self, other});
  synchronise("equal", current_stream(), 0, known ? 0 : kValueUnknown);
  if (!known) unknown_value_read(std::nullopt);
  if (known) return at::equal(on_host(self), on_host(other));
  return self.sizes() == other.sizes();  // values nobody has: what a program that checks itself expects
}

// Lists that lie on two devices are copied one by one, as torch does.
void foreach_copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto first = stack->size() - op.schema().arguments().size();
  const auto to = (*stack)[first].toTensorVector(), from = (*stack)[first + 1].toTensorVector();
  const bool together = std::all_of(from.begin(), from.end(), [&](const auto& tensor) {
    return tensor.device() == to.front().device();
  });
  if (together) return kernel(op, stack);
  TORCH_CHECK(to.size() == from.size(), "_foreach_copy_ takes two lists of one length, got ", to.size(), " and ",
              from.size());
  const bool non_blocking = (*stack)[first + 2].toBool();
  stack->resize(first);
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i], non_blocking);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&foreach_copy>());
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", item);
  library.impl("equal", equal);
}

}  // namespace
}  // namespace refshard
