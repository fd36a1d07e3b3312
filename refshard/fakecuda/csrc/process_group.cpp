#include "process_group.h"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <numeric>

#include "guard.h"
#include "launch.h"
#include "memory.h"
#include "translation.h"

namespace refshard {
namespace {

auto& groups = *new std::vector<c10::intrusive_ptr<c10d::Backend::Options>>;
auto& groups_mutex = *new std::mutex;

int64_t bytes_of(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0},
                         [](int64_t sum, const auto& tensor) { return sum + static_cast<int64_t>(tensor.nbytes()); });
}

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

Tensors hosts(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(on_host(tensor));
  return made;
}

double factor_of(const c10d::ReduceOp& premultiplied) {
  const auto* given = static_cast<c10d::NCCLPreMulSumSupplement*>(premultiplied.supplement_.get());
  return given->tensor_factor.defined() ? given->tensor_factor.item().toDouble() : given->double_factor;
}

// What a reduction over `size` ranks that all hold the same gives. Those that are not here give the same again.
void reduce_alike(const at::Tensor& tensor, const c10d::ReduceOp& op, int size) {
  if (tensor.scalar_type() == at::kBool) return;
  if (op.op_ == c10d::ReduceOp::SUM) tensor.mul_(size);
  if (op.op_ == c10d::ReduceOp::PREMUL_SUM) tensor.mul_(factor_of(op) * size);
  if (op.op_ == c10d::ReduceOp::PRODUCT) tensor.pow_(size);
}

// The elements that each of `size` ranks gets of a tensor: `splits` rows of it, or an equal part.
std::vector<int64_t> parts_of(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size) {
  if (splits.empty()) return std::vector<int64_t>(size, tensor.numel() / size);
  const auto row = tensor.size(0) ? tensor.numel() / tensor.size(0) : 0;
  auto parts = splits;
  for (auto& part : parts) part *= row;
  return parts;
}

void fill_repeatedly(const at::Tensor& out, const at::Tensor& in) {
  if (!out.numel() || !in.numel()) return;
  auto to = out.view(-1);
  const auto from = in.reshape(-1);
  for (int64_t at = 0; at < to.numel(); at += from.numel()) {
    const auto count = std::min(from.numel(), to.numel() - at);
    to.narrow(0, at, count).copy_(from.narrow(0, 0, count));
  }
}

class FakeWork final : public c10d::Work {
 public:
  FakeWork(std::optional<c10::Stream> stream, int64_t event, Tensors results, Tensors held,
           std::vector<WorkPtr> pending, bool host_waits)
      : stream_(stream), event_(event), results_(std::move(results)), held_(std::move(held)),
        pending_(std::move(pending)), host_waits_(host_waits) {}

  // What a collective uses lives until it is over, also where nobody waits for it.
  ~FakeWork() override {
    for (const auto& tensor : held_) {
      if (tensor.is_cuda()) keep_until_passed(tensor.device().index(), tensor.storage().data(), stream_->id());
    }
  }

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override {
    finish_pending();
    if (event_) {
      guard().block(reinterpret_cast<void*>(event_), guard().getStream(stream_->device()));
    }
    if (host_waits_) refshard::synchronise("barrier", stream_ ? stream_->id() : kNoStream);
    held_.clear();  // as NCCL's: what a collective uses stays until its stream has been waited for
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_) return future_;
    finish_pending();
    std::vector<c10::Device> devices;
    if (stream_) devices.push_back(stream_->device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    if (!stream_) {
      future_->markCompleted(c10::IValue(results_));
      return future_;
    }
    const auto before = guard().exchangeStream(*stream_);
    future_->markCompleted(c10::IValue(results_));
    guard().exchangeStream(before);
    return future_;
  }

 private:
  void finish_pending() {
    for (const auto& work : pending_) {
      if (work) work->wait();
    }
    pending_.clear();
  }

  std::optional<c10::Stream> stream_;
  int64_t event_;
  Tensors results_, held_;
  std::vector<WorkPtr> pending_;  // of gloo
  bool host_waits_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

std::vector<c10::intrusive_ptr<c10d::Backend::Options>> group_options() {
  std::lock_guard lock(groups_mutex);
  return groups;
}

struct FakeNccl::Call {
  const char* op;
  Tensors out, in;
  bool async = true;
  int64_t bytes = 0;  // of the unsharded tensor
  int64_t peer = -1;
  // Moves the bytes over gloo, and gives what is still under way.
  std::function<WorkPtr(c10d::Backend&, const Tensors& out, const Tensors& in)> over_gloo;
  // Gives resident results their values where all ranks hold the same; none where values are unknown.
  std::function<void(const Tensors& out, const Tensors& in)> alike;
};

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
  // NCCL has a communicator, and a stream, for each peer that is spoken to outside of a batch.
  const auto key = (coalescing_ ? -1 : call.peer) * 256 + index;
  auto found = streams_.find(key);
  if (found == streams_.end()) {
    std::lock_guard lock(device().mutex);
    found = streams_.emplace(key, device().streams.from_pool(index)).first;
  }
  return found->second;
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
  event.subject = id_ | (call.peer >= 0 ? call.peer << 32 : 0);
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

void FakeNccl::move(const Call& call) {
  if (!call.alike) return;
  const auto here = [](const at::Tensor& tensor) { return tensor.is_cpu() || resident(tensor); };
  const bool known = std::all_of(call.in.begin(), call.in.end(), [&](const at::Tensor& tensor) {
    return here(tensor) && !(tensor.is_cuda() && unknown(tensor));
  });
  if (std::all_of(call.out.begin(), call.out.end(), here) && std::all_of(call.in.begin(), call.in.end(), here)) {
    at::NoGradGuard no_grad;
    call.alike(hosts(call.out), hosts(call.in));
  }
  if (known) return;
  for (const auto& tensor : call.out) {
    if (tensor.is_cuda() && resident(tensor)) set_unknown(tensor, true);
  }
}

WorkPtr FakeNccl::issue(const Call& call) {
  ++sequence_;
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
  const auto on_device = std::find_if(held.begin(), held.end(), [](const auto& tensor) { return tensor.is_cuda(); });
  const bool host_waits = name_ == "nccl" && std::string_view(call.op) == "barrier";
  if (on_device == held.end()) {
    record(call, kNoStream);
    return c10::make_intrusive<FakeWork>(std::nullopt, 0, call.out, Tensors{}, pending, host_waits);
  }
  const auto index = on_device->device().index();
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
    return c10::make_intrusive<FakeWork>(std::nullopt, 0, call.out, Tensors{}, std::vector<WorkPtr>{}, false);
  }
  if (!call.async) return c10::make_intrusive<FakeWork>(stream, 0, call.out, Tensors{}, pending, host_waits);
  void* done = nullptr;
  guard().record(&done, stream, index, c10::EventFlag::PYTORCH_DEFAULT);
  return c10::make_intrusive<FakeWork>(stream, Guard::event_of(done), call.out, std::move(held), pending, host_waits);
}

WorkPtr FakeNccl::endCoalescing() {
  coalescing_ = false;
  auto pending = std::exchange(coalesced_pending_, {});
  if (coalesced_.empty()) {
    return c10::make_intrusive<FakeWork>(std::nullopt, 0, Tensors{}, Tensors{}, std::move(pending), false);
  }
  const auto on = coalesced_.front().device();
  Call call{"coalesced"};
  call.async = coalesced_async_;
  const c10::Stream stream(c10::Stream::UNSAFE, on, stream_of(call, on.index()));
  void* done = nullptr;
  if (call.async) guard().record(&done, stream, on.index(), c10::EventFlag::PYTORCH_DEFAULT);
  auto held = std::exchange(coalesced_, {});
  return c10::make_intrusive<FakeWork>(stream, Guard::event_of(done), Tensors{}, std::move(held), std::move(pending),
                                       false);
}

namespace {

// gloo sums; what NCCL can besides is done after.
template <typename Options>
std::pair<Options, double> as_sum(Options options, int size) {
  double factor = 1;
  if (options.reduceOp.op_ == c10d::ReduceOp::AVG) {
    factor = 1.0 / size;
    options.reduceOp = c10d::ReduceOp::SUM;
  } else if (options.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM) {
    factor = factor_of(options.reduceOp);
    options.reduceOp = c10d::ReduceOp::SUM;
  }
  return {options, factor};
}

void all_reduce_over(c10d::Backend& gloo, const at::Tensor& tensor, const c10d::ReduceOp& op, int size) {
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  const auto [summing, factor] = as_sum(options, size);
  Tensors one{tensor};
  gloo.allreduce(one, summing)->wait();
  if (factor != 1) tensor.mul_(factor);
}

// A reduce-scatter as the all-reduce of a copy.
void reduce_scatter_over(c10d::Backend& gloo, const at::Tensor& out, const at::Tensor& in, const c10d::ReduceOp& op,
                         int rank, int size) {
  auto copy = in.reshape(-1).clone();
  all_reduce_over(gloo, copy, op, size);
  out.view(-1).copy_(copy.narrow(0, rank * out.numel(), out.numel()));
}

// gloo wants the output shaped as its concatenation; NCCL asks for as many elements alone.
void all_gather_over(c10d::Backend& gloo, const at::Tensor& out, const at::Tensor& in) {
  auto whole = out.view(-1), mine = in.reshape(-1);
  gloo._allgather_base(whole, mine, {})->wait();
}

// NCCL gathers tensors of several sizes too, by a broadcast from each rank.
void all_gather_over(c10d::Backend& gloo, const Tensors& out, const at::Tensor& in, int rank) {
  const bool even = std::all_of(out.begin(), out.end(), [&](const auto& tensor) { return tensor.numel() == in.numel(); });
  if (even) {
    std::vector<Tensors> lists{out};
    Tensors mine{in};
    gloo.allgather(lists, mine, {})->wait();
    return;
  }
  out[rank].copy_(in);
  for (size_t root = 0; root < out.size(); ++root) {
    c10d::BroadcastOptions options;
    options.rootRank = static_cast<int64_t>(root);
    Tensors part{out[root]};
    gloo.broadcast(part, options)->wait();
  }
}

}  // namespace

WorkPtr FakeNccl::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Call call{"broadcast", tensors, {}, options.asyncOp, bytes_of(tensors)};
  call.over_gloo = [&](auto& gloo, const auto& out, const auto&) {
    auto mine = out;
    gloo.broadcast(mine, options)->wait();
    return WorkPtr();
  };
  return issue(call);
}

WorkPtr FakeNccl::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Call call{"all_reduce", tensors, tensors, options.asyncOp, bytes_of(tensors)};
  call.over_gloo = [&](auto& gloo, const auto& out, const auto&) {
    for (const auto& tensor : out) all_reduce_over(gloo, tensor, options.reduceOp, getSize());
    return WorkPtr();
  };
  call.alike = [&](const auto& out, const auto&) {
    for (const auto& tensor : out) reduce_alike(tensor, options.reduceOp, getSize());
  };
  return issue(call);
}

WorkPtr FakeNccl::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return allreduce(tensors, options);
}

WorkPtr FakeNccl::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Call call{"reduce", tensors, tensors, options.asyncOp, bytes_of(tensors)};
  call.over_gloo = [&](auto& gloo, const auto& out, const auto&) {
    for (const auto& tensor : out) {
      auto mine = tensor.clone();  // only the root's changes
      all_reduce_over(gloo, mine, options.reduceOp, getSize());
      if (options.rootRank == getRank()) tensor.copy_(mine);
    }
    return WorkPtr();
  };
  call.alike = [&](const auto& out, const auto&) {
    for (const auto& tensor : out) reduce_alike(tensor, options.reduceOp, getSize());
  };
  return issue(call);
}

WorkPtr FakeNccl::allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) {
  Call call{"all_gather", flat(out), in, options.asyncOp, bytes_of(flat(out))};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    all_gather_over(gloo, to, from.front(), getRank());
    return WorkPtr();
  };
  call.alike = [](const auto& to, const auto& from) {
    for (const auto& tensor : to) fill_repeatedly(tensor, from.front());
  };
  // NCCL gathers into one tensor of its own, and copies from there.
  Allocating allocating("nccl::all_gather", Category::Workspace);
  const auto elements = in.front().is_cuda() ? call.bytes / static_cast<int64_t>(in.front().itemsize()) : 0;
  const auto whole = at::empty({elements}, in.front().options());
  return issue(call);
}

WorkPtr FakeNccl::_allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) {
  Tensors outs{out}, ins{in};
  return allgather_into_tensor_coalesced(outs, ins, options);
}

WorkPtr FakeNccl::allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) {
  Call call{"all_gather", out, in, options.asyncOp, bytes_of(out)};
  call.over_gloo = [](auto& gloo, const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) all_gather_over(gloo, to[i], from[i]);
    return WorkPtr();
  };
  call.alike = [](const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) fill_repeatedly(to[i], from[i]);
  };
  for (const auto& tensor : out) {
    if (tensor.is_cuda()) recorder().categorise(block_at(tensor.device().index(), tensor.storage().data()), Category::Unsharded);
  }
  return issue(call);
}

WorkPtr FakeNccl::gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) {
  Call call{"gather", flat(out), in, options.asyncOp, bytes_of(in) * getSize()};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    std::vector<Tensors> lists;
    if (!out.empty()) lists.push_back(to);
    auto mine = from;
    gloo.gather(lists, mine, options)->wait();
    return WorkPtr();
  };
  call.alike = [](const auto& to, const auto& from) {
    for (const auto& tensor : to) fill_repeatedly(tensor, from.front());
  };
  return issue(call);
}

WorkPtr FakeNccl::scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) {
  Call call{"scatter", out, flat(in), options.asyncOp, bytes_of(out) * getSize()};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    std::vector<Tensors> lists;
    if (!in.empty()) lists.push_back(from);
    auto mine = to;
    gloo.scatter(mine, lists, options)->wait();
    return WorkPtr();
  };
  call.alike = [this](const auto& to, const auto& from) {
    if (!from.empty()) to.front().copy_(from[getRank()]);
  };
  return issue(call);
}

WorkPtr FakeNccl::reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) {
  Call call{"reduce_scatter", out, flat(in), options.asyncOp, bytes_of(flat(in))};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    for (int rank = 0; rank < getSize(); ++rank) {
      auto part = from[rank].clone();
      all_reduce_over(gloo, part, options.reduceOp, getSize());
      if (rank == getRank()) to.front().copy_(part);
    }
    return WorkPtr();
  };
  call.alike = [&](const auto& to, const auto& from) {
    to.front().copy_(from[getRank()]);
    reduce_alike(to.front(), options.reduceOp, getSize());
  };
  return issue(call);
}

WorkPtr FakeNccl::_reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) {
  Tensors outs{out}, ins{in};
  return reduce_scatter_tensor_coalesced(outs, ins, options);
}

WorkPtr FakeNccl::reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                                  const c10d::ReduceScatterOptions& options) {
  Call call{"reduce_scatter", out, in, options.asyncOp, bytes_of(in)};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) {
      reduce_scatter_over(gloo, to[i], from[i], options.reduceOp, getRank(), getSize());
    }
    return WorkPtr();
  };
  call.alike = [&](const auto& to, const auto& from) {
    for (size_t i = 0; i < to.size(); ++i) {
      to[i].view(-1).copy_(from[i].reshape(-1).narrow(0, getRank() * to[i].numel(), to[i].numel()));
      reduce_alike(to[i], options.reduceOp, getSize());
    }
  };
  for (const auto& tensor : in) {
    if (tensor.is_cuda()) recorder().categorise(block_at(tensor.device().index(), tensor.storage().data()), Category::Gradients);
  }
  return issue(call);
}

WorkPtr FakeNccl::alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                                std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) {
  Call call{"all_to_all", {out}, {in}, options.asyncOp, bytes_of({in})};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    auto received = to.front(), sent = from.front();
    gloo.alltoall_base(received, sent, out_splits, in_splits, options)->wait();
    return WorkPtr();
  };
  // Each rank sends this one what this one would send itself.
  call.alike = [&](const auto& to, const auto& from) {
    const auto parts = parts_of(from.front(), in_splits, getSize());
    const auto start = std::accumulate(parts.begin(), parts.begin() + getRank(), int64_t{0});
    fill_repeatedly(to.front(), from.front().reshape(-1).narrow(0, start, parts[getRank()]));
  };
  return issue(call);
}

WorkPtr FakeNccl::alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) {
  Call call{"all_to_all", out, in, options.asyncOp, bytes_of(in)};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto& from) {
    const auto sizes = [](const Tensors& tensors) {
      std::vector<int64_t> counts;
      for (const auto& tensor : tensors) counts.push_back(tensor.numel());
      return counts;
    };
    auto out_splits = sizes(to), in_splits = sizes(from);
    Tensors pieces;
    for (const auto& tensor : from) pieces.push_back(tensor.reshape(-1));
    auto sent = at::cat(pieces);
    auto received = at::empty({std::accumulate(out_splits.begin(), out_splits.end(), int64_t{0})}, sent.options());
    gloo.alltoall_base(received, sent, out_splits, in_splits, options)->wait();
    const auto parts = received.split_with_sizes(sizes(to));  // gloo takes the other vector for itself
    for (size_t i = 0; i < to.size(); ++i) to[i].view(-1).copy_(parts[i]);
    return WorkPtr();
  };
  call.alike = [this](const auto& to, const auto& from) {
    for (const auto& tensor : to) fill_repeatedly(tensor, from[getRank()]);
  };
  return issue(call);
}

WorkPtr FakeNccl::send(Tensors& tensors, int peer, int tag) {
  Call call{"send", {}, tensors, true, bytes_of(tensors), peer};
  call.over_gloo = [&](auto& gloo, const auto&, const auto& from) {
    auto mine = from;
    return gloo.send(mine, peer, tag);
  };
  return issue(call);
}

WorkPtr FakeNccl::recv(Tensors& tensors, int peer, int tag) {
  Call call{"recv", tensors, {}, true, bytes_of(tensors), peer};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto&) {
    auto mine = to;
    return gloo.recv(mine, peer, tag);
  };
  return issue(call);
}

WorkPtr FakeNccl::recvAnysource(Tensors& tensors, int tag) {
  Call call{"recv", tensors, {}, true, bytes_of(tensors)};
  call.over_gloo = [&](auto& gloo, const auto& to, const auto&) {
    auto mine = to;
    return gloo.recvAnysource(mine, tag);
  };
  return issue(call);
}

WorkPtr FakeNccl::barrier(const c10d::BarrierOptions& options) {
  Call call{"barrier", {}, {}, options.asyncOp, 4};
  if (name_ == "nccl") {  // whose barrier is an all-reduce of one element for which the host waits
    Allocating allocating("nccl::barrier", Category::Workspace);
    call.out = {at::zeros({1}, at::TensorOptions().device(c10::Device(c10::DeviceType::CUDA, current_device())))};
  }
  call.over_gloo = [&](auto& gloo, const auto&, const auto&) {
    gloo.barrier(options)->wait();
    return WorkPtr();
  };
  return issue(call);
}

}  // namespace refshard
