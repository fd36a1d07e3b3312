// The backend that stands where NCCL does: NCCL's stream semantics, without NCCL.
//
// In a dry run one rank runs alone, and values, where there are any, are as if all ranks held the same. In host compute
// gloo moves the bytes between the processes, over the host's memory that the tensors lie in.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device.h"

namespace refshard {

using Tensors = std::vector<at::Tensor>;
// Tensors that a collective uses: its work and its group hold them together.
using Shelf = std::shared_ptr<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

int64_t bytes_of(const Tensors& tensors);

// The options of all groups of this process, by id: their names, and the global ranks in them.
std::vector<c10::intrusive_ptr<c10d::Backend::Options>> group_options();

// A call with values that are known here: its group, its number there, what it does, and its tensors on the host. Inputs
// are missing where they are not known. Fills the outputs; false if it cannot.
struct Exchanged {
  int64_t group, number;
  std::string op;
  int64_t peer, root;
  int reduces;
  Tensors out;
  std::optional<Tensors> in;
};
void set_exchange_callback(std::function<bool(const Exchanged&)> callback);
// Tells the lines of the script that issue a collective.
void set_places_callback(std::function<std::string()> callback);

class FakeNccl : public c10d::Backend {
 public:
  // `gloo` moves the bytes; none in a dry run. `name` is what getBackendName() says.
  FakeNccl(int rank, int size, BackendPtr gloo, std::string name = "nccl");

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  int64_t id() const { return id_; }

 private:
  // A collective that a caller asks for.
  struct Call {
    const char* op;
    Tensors out, in;
    bool async = true;
    int64_t bytes = 0;  // of the unsharded tensor
    int64_t peer = -1;
    int64_t root = -1;
    int reduces = -1;   // by which c10d::ReduceOp, if it does
    Tensors staging{};  // what NCCL allocates for itself
    // Moves the bytes over gloo, and gives what is still under way.
    std::function<WorkPtr(c10d::Backend&, const Tensors& out, const Tensors& in)> over_gloo;
    // Gives resident results their values where all ranks hold the same; none where values are unknown.
    std::function<void(const Tensors& out, const Tensors& in)> alike;
  };

  struct Shelved {
    Shelf shelf;
    int backward;      // autograd's number of the backward that issued it, -1 outside
    int64_t launches;  // made until then
  };

  // Puts a collective on its stream, has its bytes moved and gives what waits for it.
  WorkPtr issue(const Call& call);
  StreamId stream_of(const Call& call, c10::DeviceIndex device);
  // NCCL makes a communicator for the first call of a group, and for each peer that is spoken to outside of a batch.
  int64_t communicator_of(const Call& call, c10::DeviceIndex device) const;
  void ensure_communicator(const Call& call, c10::DeviceIndex device);
  void record(const Call& call, StreamId stream);
  void move(const Call& call);
  // Gives results the values that the group's other ranks had in their own runs; false where they are not known.
  bool exchange(const Call& call);
  // A shelf of the group's for these tensors. Where nobody waits for a work, as DDP's reducer does not, its tensors stay
  // until a later collective of the group finds that the watchdog's thread, which looks every 100 ms, has seen its end.
  Shelf shelve(Tensors tensors);
  void clear_shelves();

  int64_t id_;
  BackendPtr gloo_;
  std::string name_;
  c10::intrusive_ptr<Options> options_;
  uint64_t sequence_ = 0;
  std::unordered_map<int64_t, int64_t> numbers_;  // of calls: collectives (-1), messages by peer and direction
  bool coalescing_ = false;
  Tensors coalesced_;
  std::vector<WorkPtr> coalesced_pending_;
  bool coalesced_async_ = false;
  std::mutex shelves_mutex_;
  std::deque<Shelved> shelves_;
  std::unordered_map<int64_t, StreamId> streams_;  // by communicator
  std::unordered_set<int64_t> communicators_;
};

// Gloo for tensors on the device. `gloo` moves the bytes; in a dry run it has no peers to talk to either.
class FakeGloo final : public FakeNccl {
 public:
  FakeGloo(int rank, int size, BackendPtr gloo) : FakeNccl(rank, size, std::move(gloo), "gloo") {}

  void monitoredBarrier(const c10d::BarrierOptions&, bool) override {}
};

}  // namespace refshard
