#include "process_group.h"

#include <torch/csrc/autograd/engine.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "collective_work.h"
#include "guard.h"
#include "large_integers.h"
#include "launch.h"
#include "memory.h"
#include "routing.h"
#include "translation.h"

namespace refshard {
namespace {

auto& groups = *new std::vector<c10::intrusive_ptr<c10d::Backend::Options>>;
auto& groups_mutex = *new std::mutex;
// By then the watchdog is taken to have looked, and in a later backward too. An average launch takes 0.1 ms of a step of
// Llama 1B on an H200; time itself would differ from run to run.
constexpr int64_t kLaunchesUntilSeen = 1000;
constexpr int64_t kMostExchanged = 1 << 20;  // bytes
std::function<bool(const Exchanged&)> exchange_callback;
std::function<std::string()> places_callback;

Tensors hosts(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(on_host(tensor));
  return made;
}

}  // namespace

int64_t bytes_of(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const auto& tensor) { return sum + static_cast<int64_t>(tensor.nbytes()); });
}

std::vector<c10::intrusive_ptr<c10d::Backend::Options>> group_options() {
  std::lock_guard lock(groups_mutex);
  return groups;
}

void set_exchange_callback(std::function<bool(const Exchanged&)> callback) { exchange_callback = std::move(callback); }

void set_places_callback(std::function<std::string()> callback) { places_callback = std::move(callback); }

FakeNccl::FakeNccl(int rank, int size, BackendPtr gloo, std::string name)
    : Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)),
      options_(c10::make_intrusive<Options>(name_)) {
  TORCH_CHECK(device().dry() || size == 1 || gloo_, "in host compute, a group of several ranks needs gloo");
  std::lock_guard lock(groups_mutex);
  id_ = static_cast<int64_t>(groups.size());
  groups.push_back(options_);
}

StreamId FakeNccl::stream_of(const Call& call, c10::DeviceIndex index) {
  if (!call.async) return current_stream(index);
  const auto key = communicator_of(call, index);
  auto found = streams_.find(key);
  if (found == streams_.end()) {
    std::lock_guard lock(device().mutex);
    found = streams_.emplace(key, device().streams.from_pool(index)).first;
  }
  return found->second;
}

int64_t FakeNccl::communicator_of(const Call& call, c10::DeviceIndex index) const {
  return (coalescing_ ? -1 : call.peer) * 256 + index;
}

void FakeNccl::ensure_communicator(const Call& call, c10::DeviceIndex index) {
  if (name_ != "nccl" || !communicators_.insert(communicator_of(call, index)).second) return;
  device().add_communicator(index, id_);
}

void FakeNccl::record(const Call& call, StreamId stream) {
  {
    std::lock_guard lock(device().mutex);
    if (stream >= 0) device().streams.launched(stream);
  }
  if (!recorder().on) return;
  std::string signature;
  for (const auto& tensor : call.in) describe(tensor, signature);
  std::string made;
  for (const auto& tensor : call.out) describe(tensor, made);
  Event event{.kind = Kind::Collective, .name = recorder().names.code(call.op), .stream = stream};
  event.subject = id_ | std::max({call.peer, call.root, int64_t{0}}) << 32;
  if (coalescing_ && !coalesced_.empty()) event.flags = kJoined;
  if (places_callback) event.site = recorder().sites.code(places_callback());
  event.size = call.bytes;
  event.reads = bytes_of(call.in);
  event.writes = bytes_of(call.out);
  event.signature = recorder().signatures.code(signature + " -> " + made);
  std::vector<Access> accesses;
  for (const auto& tensor : call.in) {
    if (tensor.is_cuda()) accesses.push_back(access_of(tensor, false));
  }
  for (const auto& tensor : call.out) {
    if (tensor.is_cuda()) accesses.push_back(access_of(tensor, true));
  }
  recorder().add(event, accesses);
}

bool FakeNccl::exchange(const Call& call) {
  if (!exchange_callback) return false;
  const std::string_view op = call.op;
  const auto number = numbers_[call.peer < 0 ? -1 : 2 * call.peer + (op == "recv")]++;
  if (op == "all_to_all" || op == "barrier" || bytes_of(call.in) + bytes_of(call.out) > kMostExchanged) return false;
  const auto here = [](const at::Tensor& tensor) { return tensor.is_cpu() || resident(tensor); };
  if (!std::all_of(call.out.begin(), call.out.end(), here)) return false;
  const bool roots = op == "broadcast" && call.root == getRank();
  const auto& given = roots ? call.out : call.in;
  const bool known = std::all_of(given.begin(), given.end(), [&](const at::Tensor& tensor) {
    return here(tensor) && !(tensor.is_cuda() && (unknown(tensor) || marked(tensor, Mark::Assumed)));
  });
  StandIn stand_in;
  const auto in = known ? std::optional(hosts(given)) : std::nullopt;
  if (!exchange_callback({id_, number, call.op, call.peer, call.root, call.reduces, hosts(call.out), in})) return false;
  for (const auto& tensor : call.out) {
    if (tensor.is_cuda()) set_unknown(tensor, false);
  }
  return true;
}

void FakeNccl::move(const Call& call) {
  if (exchange(call) || !call.alike) return;
  const bool assumed = std::any_of(call.in.begin(), call.in.end(), [](const at::Tensor& tensor) {
    return tensor.is_cuda() && marked(tensor, Mark::Assumed);
  });
  for (const auto& tensor : call.in) {
    if (tensor.is_cuda()) note_use(tensor);
  }
  if (assumed) {
    if (std::string_view(call.op) == "all_to_all") note_exchange(getRank(), getSize());
    for (const auto& tensor : call.out) {
      if (!tensor.is_cuda()) continue;
      set_mark(tensor, Mark::Assumed, true);
      if (!resident(tensor) && worth_computing(tensor)) set_mark(tensor, Mark::Real, true);
    }
  }
  const auto here = [](const at::Tensor& tensor) { return tensor.is_cpu() || resident(tensor); };
  const bool known = std::all_of(call.in.begin(), call.in.end(), [&](const at::Tensor& tensor) {
    return here(tensor) && !(tensor.is_cuda() && unknown(tensor));
  });
  const bool moved = std::all_of(call.out.begin(), call.out.end(), here) &&
                     std::all_of(call.in.begin(), call.in.end(), here);
  if (moved) {
    at::NoGradGuard no_grad;
    call.alike(hosts(call.out), hosts(call.in));
  }
  if (known) return;
  for (const auto& tensor : call.out) {
    if (!tensor.is_cuda() || !resident(tensor)) continue;
    set_unknown(tensor, true);
    if (!moved && c10::isFloatingType(tensor.scalar_type())) on_host(tensor).fill_(kPlaceholder);
  }
}

Shelf FakeNccl::shelve(Tensors tensors) {
  auto shelf = std::make_shared<Tensors>(std::move(tensors));
  std::lock_guard lock(shelves_mutex_);
  shelves_.push_back({shelf, torch::autograd::get_current_graph_task_id(), launches_made()});
  return shelf;
}

void FakeNccl::clear_shelves() {
  const auto backward = torch::autograd::get_current_graph_task_id();
  const auto is_seen = [&](const Shelved& one) {
    const bool later_backward = backward >= 0 && backward != one.backward;
    return one.shelf->empty() || later_backward || launches_made() - one.launches >= kLaunchesUntilSeen;
  };
  std::lock_guard lock(shelves_mutex_);
  while (!shelves_.empty() && is_seen(shelves_.front())) {
    shelves_.front().shelf->clear();
    shelves_.pop_front();
  }
}

WorkPtr FakeNccl::issue(const Call& call) {
  ++sequence_;
  clear_shelves();
  for (const auto& tensor : call.out) values_are_overwritten(tensor);
  std::vector<WorkPtr> pending;
  if (gloo_) {
    pending.push_back(call.over_gloo(*gloo_, hosts(call.out), hosts(call.in)));
  } else if (device().dry()) {
    move(call);
  } else if (call.alike) {
    call.alike(hosts(call.out), hosts(call.in));  // a group of one
  }
  Tensors held = call.in;
  held.insert(held.end(), call.out.begin(), call.out.end());
  held.insert(held.end(), call.staging.begin(), call.staging.end());
  const auto on_device = std::find_if(held.begin(), held.end(), [](const auto& tensor) { return tensor.is_cuda(); });
  const bool host_waits = name_ == "nccl" && std::string_view(call.op) == "barrier";
  if (on_device == held.end()) {
    if (host_waits) ensure_communicator(call, current_device());
    record(call, kNoStream);
    return c10::make_intrusive<FakeWork>(std::nullopt, 0, call.out, Shelf(), pending, host_waits);
  }
  const auto index = on_device->device().index();
  ensure_communicator(call, index);
  const auto current = guard().getStream(on_device->device());
  const c10::Stream stream(c10::Stream::UNSAFE, on_device->device(), stream_of(call, index));
  if (stream.id() != current.id()) {
    void* ready = nullptr;
    guard().record(&ready, current, index, c10::EventFlag::PYTORCH_DEFAULT);
    guard().block(ready, stream);
  }
  record(call, stream.id());
  if (coalescing_) {
    coalesced_.insert(coalesced_.end(), held.begin(), held.end());
    coalesced_async_ = call.async;
    coalesced_pending_.insert(coalesced_pending_.end(), pending.begin(), pending.end());
    return c10::make_intrusive<FakeWork>(std::nullopt, 0, call.out, Shelf(), std::vector<WorkPtr>{}, false);
  }
  if (!call.async) return c10::make_intrusive<FakeWork>(stream, 0, call.out, Shelf(), pending, host_waits);
  void* done = nullptr;
  guard().record(&done, stream, index, c10::EventFlag::PYTORCH_DEFAULT);
  auto shelf = shelve(std::move(held));
  return c10::make_intrusive<FakeWork>(stream, Guard::event_of(done), call.out, std::move(shelf), pending, host_waits);
}

WorkPtr FakeNccl::endCoalescing() {
  coalescing_ = false;
  auto pending = std::exchange(coalesced_pending_, {});
  if (coalesced_.empty()) {
    return c10::make_intrusive<FakeWork>(std::nullopt, 0, Tensors{}, Shelf(), std::move(pending), false);
  }
  const auto on = coalesced_.front().device();
  Call call{"coalesced"};
  call.async = coalesced_async_;
  const c10::Stream stream(c10::Stream::UNSAFE, on, stream_of(call, on.index()));
  void* done = nullptr;
  if (call.async) guard().record(&done, stream, on.index(), c10::EventFlag::PYTORCH_DEFAULT);
  auto shelf = shelve(std::exchange(coalesced_, {}));
  return c10::make_intrusive<FakeWork>(stream, Guard::event_of(done), Tensors{}, std::move(shelf), std::move(pending),
                                       false);
}

}  // namespace refshard
