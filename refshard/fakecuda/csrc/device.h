// The device itself: which GPUs there are, what has been asked of their streams, and how far the host knows them to be.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "caching_allocator.h"
#include "capability.h"
#include "recorder.h"

namespace refshard {

// HostCompute runs each operator on the host's memory, through the CPU's kernel. Dry runs its meta kernel; memory has
// addresses but, large tensors at least, no pages.
enum class Mode { HostCompute, Dry };

struct DeviceOptions {
  Mode mode = Mode::Dry;
  int count = 8;
  size_t total_memory = 0;     // bytes, as torch.cuda.get_device_properties() tells
  size_t context_memory = 0;   // bytes that CUDA's context holds, which no allocator sees
  // What a process's first NCCL communicator takes of a device's memory, and each further one.
  size_t first_communicator = 0, further_communicator = 0;
  Capability capability;
  AllocatorSettings allocator;
};

// Positions in streams, by stream: what must have run before something else.
using Clock = std::unordered_map<StreamId, int64_t>;
void join(Clock& clock, const Clock& other);

// Streams and events. Nothing tells when a kernel ends on a device that is not there, so a stream counts as having come
// as far as the host has waited for: the host is taken to run ahead as far as it can. A replay knows better, later:
// refshard/dryrun/held_back.py.
class Streams final : public Progress {
 public:
  // As cudaStreamCreate's streams in torch: 32 for each device and priority, handed out in turn.
  StreamId from_pool(c10::DeviceIndex device, bool high_priority = false);
  StreamId another() { return next_stream_++; }  // that nothing else uses
  void launched(StreamId stream);
  int64_t record(StreamId stream, int64_t event = 0);  // returns the event, a new one for 0
  void wait(StreamId stream, int64_t event);
  void host_waits_for_stream(StreamId stream);
  void host_waits_for_event(int64_t event);
  bool recorded(int64_t event) const;

  int64_t position(StreamId stream) override;
  bool passed(StreamId stream, int64_t ticket) override;
  void synchronise() override;

 private:
  std::unordered_map<StreamId, Clock> clocks_;
  std::unordered_map<int64_t, Clock> events_;
  Clock host_;
  static constexpr size_t kPool = 32;
  struct Pool {
    std::vector<StreamId> streams;
    size_t handed_out = 0;
  };
  std::unordered_map<int, Pool> pools_;  // by device and priority
  StreamId next_stream_ = 1;
  int64_t next_event_ = 1;
};

class FakeDevice {
 public:
  explicit FakeDevice(DeviceOptions options) : options(std::move(options)) {}

  DeviceOptions options;
  std::recursive_mutex mutex;  // of streams and of memory
  Streams streams;

  bool dry() const { return options.mode == Mode::Dry; }
  CachingAllocator& memory(c10::DeviceIndex device);
  // An empty one, set as that of the device is now but for what is `expandable`, of a device with `total` bytes; its
  // addresses have no memory.
  std::unique_ptr<CachingAllocator> allocator_like(c10::DeviceIndex device, Progress& progress,
                                                   std::function<void(int64_t)> on_segment, size_t total,
                                                   std::optional<bool> expandable);
  // The device among whose addresses this one is; -1 if it is none of a device.
  c10::DeviceIndex owner_of(const void* address) const;
  void empty_caches(PoolId only);
  // Takes what another communicator of NCCL needs of this device, and records it; throws as an allocation does.
  void add_communicator(c10::DeviceIndex device, int64_t group);

 private:
  struct Memory;
  std::vector<std::shared_ptr<Memory>> memories_;
};

// Creates the device; once in a process, before anything is asked of it.
void create_device(DeviceOptions options);
FakeDevice& device();

// What the calling thread computes on.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
StreamId current_stream(c10::DeviceIndex device);
void set_current_stream(c10::DeviceIndex device, StreamId stream);
inline StreamId current_stream() { return current_stream(current_device()); }

// Lets this thread compute on a device while it lives; on the same as before for -1.
class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex index) : before_(current_device()) { set_current_device(index); }
  ~DeviceScope() { set_current_device(before_); }
  DeviceScope(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex before_;
};

// The host waits for the device. `why` is what the user's code did; with an event, for that, else for a stream or, if
// that is kNoStream, for all.
void synchronise(const char* why, StreamId stream = kNoStream, int64_t event = 0, int32_t flags = 0);

// Called for the line of the user's code that the host is at; set by Python.
void set_site_callback(std::function<std::string()> callback);
// From now on each allocation is recorded with that line, which takes the host some time.
void record_sites_of_allocations();
int32_t site_of_allocation();
// Called where the host reads what nobody has computed, with the number that it gets; nothing where that is no float, or
// are several. Set by Python.
void set_unknown_value_callback(std::function<void(std::optional<double>)> callback);
void unknown_value_read(std::optional<double> value);

}  // namespace refshard
