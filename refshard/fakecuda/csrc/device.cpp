#include "device.h"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>

#include "graphs.h"

namespace refshard {
namespace {

constexpr int kMostDevices = 64;
// 8 TiB of addresses a device: each expandable segment, one for each stream and pool, takes 9/8 of its memory.
constexpr size_t kSpan = size_t{1} << 43;

FakeDevice* the_device = nullptr;
std::function<std::string()> site_callback;
bool allocations_have_sites = false;
std::function<void(std::optional<double>)> unknown_value_callback;
thread_local c10::DeviceIndex this_device = 0;
thread_local std::array<StreamId, kMostDevices> this_stream{};

uintptr_t reserve_addresses() {
  // Pages come into being when they are written to; in a dry run that is those of small tensors alone.
  void* base = mmap(nullptr, kSpan, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(
      base != MAP_FAILED,
      "the fake device reserves 8 TiB of addresses (no memory), which this system refuses; raise `ulimit -v`, or set "
      "vm.overcommit_memory to 0 or 1");
  return reinterpret_cast<uintptr_t>(base);
}

}  // namespace

struct FakeDevice::Memory {
  Memory(const DeviceOptions& options, Streams& streams)
      : base(reserve_addresses()),
        allocator(base, kSpan, usable(options), options.allocator, streams,
                  [](int64_t delta) { recorder().segment(delta); }, options.total_memory) {}
  ~Memory() { munmap(reinterpret_cast<void*>(base), kSpan); }

  static size_t usable(const DeviceOptions& options) { return usable(options, options.total_memory); }
  static size_t usable(const DeviceOptions& options, size_t total) {
    if (!total) return 0;  // no limit
    TORCH_CHECK(total > options.context_memory, "a device must have more memory than its context takes");
    return total - options.context_memory;
  }

  uintptr_t base;
  CachingAllocator allocator;
  int communicators = 0;
};

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, position] : other) {
    auto& mine = clock[stream];
    mine = std::max(mine, position);
  }
}

StreamId Streams::from_pool(c10::DeviceIndex device, bool high_priority) {
  auto& pool = pools_[2 * device + (high_priority ? 1 : 0)];
  const auto turn = pool.handed_out++ % kPool;
  if (turn == pool.streams.size()) pool.streams.push_back(next_stream_++);
  return pool.streams[turn];
}

void Streams::launched(StreamId stream) { ++clocks_[stream][stream]; }

int64_t Streams::record(StreamId stream, int64_t event) {
  const auto id = event ? event : next_event_++;
  ++clocks_[stream][stream];  // so that two records of one stream differ
  events_[id] = clocks_[stream];
  return id;
}

void Streams::wait(StreamId stream, int64_t event) {
  ++clocks_[stream][stream];  // so that who waits for the stream from now on waits for the event too
  if (const auto found = events_.find(event); found != events_.end()) join(clocks_[stream], found->second);
}

void Streams::host_waits_for_stream(StreamId stream) { join(host_, clocks_[stream]); }

void Streams::host_waits_for_event(int64_t event) {
  if (const auto found = events_.find(event); found != events_.end()) join(host_, found->second);
}

bool Streams::recorded(int64_t event) const { return events_.contains(event); }

int64_t Streams::position(StreamId stream) { return clocks_[stream][stream]; }

bool Streams::passed(StreamId stream, int64_t ticket) { return host_[stream] >= ticket; }

void Streams::synchronise() {
  for (const auto& [stream, clock] : clocks_) join(host_, clock);
}

CachingAllocator& FakeDevice::memory(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < options.count, "no such CUDA device: ", int(index), " of ", options.count);
  if (memories_.empty()) memories_.resize(options.count);
  auto& found = memories_[index];
  if (!found) found = std::make_shared<Memory>(options, streams);
  return found->allocator;
}

std::unique_ptr<CachingAllocator> FakeDevice::allocator_like(c10::DeviceIndex index, Progress& progress,
                                                             std::function<void(int64_t)> on_segment, size_t total,
                                                             std::optional<bool> expandable) {
  auto& own = memory(index);
  auto settings = own.settings();
  settings.expandable_segments = expandable.value_or(settings.expandable_segments);
  auto made = std::make_unique<CachingAllocator>(kSpan, kSpan, Memory::usable(options, total), std::move(settings),
                                                 progress, std::move(on_segment), total);
  // Fractions are kept as bytes, and each rounding may lose one.
  if (made->memory_fraction() != own.memory_fraction()) made->set_memory_fraction(own.memory_fraction());
  return made;
}

c10::DeviceIndex FakeDevice::owner_of(const void* address) const {
  for (size_t index = 0; index < memories_.size(); ++index) {
    const auto& memory = memories_[index];
    const auto at = reinterpret_cast<uintptr_t>(address);
    if (memory && at >= memory->base && at < memory->base + kSpan) return static_cast<c10::DeviceIndex>(index);
  }
  return -1;
}

void FakeDevice::empty_caches(PoolId only) {
  for (const auto& memory : memories_) {
    if (memory) memory->allocator.empty_cache(only);
  }
}

void FakeDevice::add_communicator(c10::DeviceIndex index, int64_t group) {
  std::lock_guard lock(mutex);
  auto& allocator = memory(index);
  auto& communicators = memories_[index]->communicators;
  const auto size = communicators ? options.further_communicator : options.first_communicator;
  if (!size) return;
  try {
    allocator.take_outside(size);
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.message(index));
  }
  ++communicators;
  recorder().add({.kind = Kind::Communicator, .subject = group, .size = static_cast<int64_t>(size)});
}

void create_device(DeviceOptions options) {
  TORCH_CHECK(!the_device, "the fake CUDA device exists already; a process has one, made before torch is imported");
  TORCH_CHECK(options.count >= 1 && options.count <= kMostDevices, "1 to 64 devices, got ", options.count);
  the_device = new FakeDevice(std::move(options));  // never destroyed: tensors are freed as late as at exit
}

FakeDevice& device() {
  TORCH_CHECK(the_device, "the fake CUDA device does not exist yet; call refshard.fakecuda.activate() first");
  return *the_device;
}

c10::DeviceIndex current_device() { return this_device; }

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(
      index < device().options.count, "CUDA error: invalid device ordinal ", int(index), "; this process sees ",
      device().options.count, " GPUs");
  if (index >= 0) this_device = index;
}

StreamId current_stream(c10::DeviceIndex index) { return this_stream[index < 0 ? this_device : index]; }

void set_current_stream(c10::DeviceIndex index, StreamId stream) {
  this_stream[index < 0 ? this_device : index] = stream;
}

void synchronise(const char* why, StreamId stream, int64_t event, int32_t flags) {
  refuse_wait_in_capture(stream, event);
  {
    std::lock_guard guard(device().mutex);
    auto& streams = device().streams;
    if (event) {
      streams.host_waits_for_event(event);
    } else if (stream != kNoStream) {
      streams.host_waits_for_stream(stream);
    } else {
      streams.synchronise();
    }
  }
  if (!recorder().on) return;
  Event row{.kind = Kind::Synchronise, .name = recorder().names.code(why), .stream = stream, .subject = event};
  row.flags = flags;
  if (site_callback) row.site = recorder().sites.code(site_callback());
  recorder().add(row);
}

void set_site_callback(std::function<std::string()> callback) { site_callback = std::move(callback); }

void record_sites_of_allocations() { allocations_have_sites = true; }

int32_t site_of_allocation() {
  if (!allocations_have_sites || !recorder().on || !site_callback) return 0;
  return recorder().sites.code(site_callback());
}

void set_unknown_value_callback(std::function<void(std::optional<double>)> callback) {
  unknown_value_callback = std::move(callback);
}

void unknown_value_read(std::optional<double> value) {
  if (!recorder().on || !unknown_value_callback) return;
  StandIn stand_in;
  unknown_value_callback(value);
}

}  // namespace refshard
