#include "memory.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "graphs.h"
#include "large_integers.h"

namespace refshard {
namespace {

// Floats of this many bytes are computed: scalars, and short lists of them. Integers of up to the second: a batch of
// token ids and what follows from it.
constexpr size_t kResidentFloats = 2048;
constexpr size_t kResidentIntegers = size_t{4} << 20;

thread_local size_t resident_integers = kResidentIntegers;

thread_local std::string_view allocating_name;
thread_local Category allocating_category = Category::Other;

// Leaked, since tensors are freed as late as at exit.
auto& pinned_addresses = *new std::unordered_map<const void*, int64_t>;  // where they lie in the recording
int64_t next_pinned = int64_t{1} << 62;
auto& pinned_mutex = *new std::mutex;
auto& marks = *new std::unordered_map<const void*, uint8_t>;  // by address of the storage
auto& marks_mutex = *new std::mutex;
std::atomic<int64_t> made_real = 0;  // ever: most scripts have none, and need not look

// The host gets its pages back, which the next tensor there need not have.
void give_back_pages(void* address, size_t size) {
  constexpr uintptr_t kPage = 4096;
  const auto from = (reinterpret_cast<uintptr_t>(address) + kPage - 1) / kPage * kPage;
  const auto to = (reinterpret_cast<uintptr_t>(address) + size) / kPage * kPage;
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
}

}  // namespace

void note_freed(const Block& block) {
  recorder().freed(block.id, static_cast<int64_t>(block.address), static_cast<int64_t>(block.size), block.stream);
  auto* address = reinterpret_cast<void*>(block.address);
  values_are_freed(address, block.size);
  std::lock_guard marks_guard(marks_mutex);
  const auto found = marks.find(address);
  if (found == marks.end()) return;
  const bool real = found->second & static_cast<uint8_t>(Mark::Real);
  if (real && block.size > kResidentIntegers) give_back_pages(address, block.size);
  marks.erase(found);
}

void note_allocated(const Block& block, int32_t site) {
  const bool is_private = block.segment->owner != kOwnPool;
  const int32_t flags = (is_private ? kPrivatePool : 0) | (capturing(block.stream) ? kCaptured : 0);
  recorder().allocated(block.id, static_cast<int64_t>(block.address), static_cast<int64_t>(block.size),
                       static_cast<int64_t>(block.requested_size), block.stream, allocating_name, allocating_category,
                       flags, site);
  // NCCL uses its own on another stream.
  const bool used_here = allocating_category == Category::Workspace && !allocating_name.starts_with("nccl::");
  if (used_here) capture_workspace(block.stream, block);
}

void free_block(void* address) {
  if (!address) return;
  std::lock_guard guard(device().mutex);
  const auto index = device().owner_of(address);
  if (index < 0) return;
  auto& memory = device().memory(index);
  const auto* found = memory.find(reinterpret_cast<uintptr_t>(address));
  TORCH_CHECK(found, "invalid device pointer: ", address);
  const auto block = *found;
  memory.free(block.address);
  note_freed(block);
}

void* allocate_block(size_t size, c10::DeviceIndex index, StreamId stream) {
  const auto site = site_of_allocation();  // before the lock, since it waits for Python's
  std::lock_guard guard(device().mutex);
  try {
    auto& memory = device().memory(index);
    const auto made = memory.allocate(size, stream);
    note_allocated(*memory.find(made.address), site);
    auto* address = reinterpret_cast<void*>(made.address);
    // What was there before must not look like a value; in host compute it shows as NaN.
    if (!device().dry()) std::memset(address, 0xff, made.size);
    if (device().dry() && size <= kResidentFloats) std::memset(address, 0, size);
    return address;
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.message(index));
  }
}

namespace {

c10::CachingDeviceAllocator::DeviceStats torch_statistics(const Statistics& from) {
  c10::CachingDeviceAllocator::DeviceStats to;
  const auto copy = [](auto& into, const auto& pools) {
    for (size_t pool = 0; pool < into.size(); ++pool) {
      into[pool].current = pools[pool].current;
      into[pool].peak = pools[pool].peak;
      into[pool].allocated = pools[pool].allocated;
      into[pool].freed = pools[pool].freed;
    }
  };
  copy(to.allocation, from.allocation);
  copy(to.segment, from.segment);
  copy(to.active, from.active);
  copy(to.inactive_split, from.inactive_split);
  copy(to.allocated_bytes, from.allocated_bytes);
  copy(to.reserved_bytes, from.reserved_bytes);
  copy(to.active_bytes, from.active_bytes);
  copy(to.inactive_split_bytes, from.inactive_split_bytes);
  copy(to.requested_bytes, from.requested_bytes);
  for (const auto& [id, pools] : from.reserved_bytes_by_private_pools) {
    copy(to.reserved_bytes_by_private_pools[id], pools);
  }
  to.num_alloc_retries = from.num_alloc_retries;
  to.num_ooms = from.num_ooms;
  to.num_oom_rejections = from.num_oom_rejections;
  to.num_sync_all_streams = from.num_sync_all_streams;
  to.num_device_alloc = from.num_device_alloc;
  to.num_device_free = from.num_device_free;
  to.max_split_size = from.max_split_size;
  return to;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const auto index = current_device();
    void* address = size ? allocate_block(size, index, current_stream(index)) : nullptr;
    return {address, address, &free_block, c10::Device(c10::DeviceType::CUDA, index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    if (!device().dry()) std::memcpy(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override {
    if (!capturing()) synchronise("empty_cache");
    std::lock_guard guard(device().mutex);
    device().empty_caches(pool);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data.device().index(), data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard guard(device().mutex);
    return torch_statistics(device().memory(index).statistics());
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard guard(device().mutex);
    device().memory(index).reset_accumulated_statistics();
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard guard(device().mutex);
    device().memory(index).reset_peak_statistics();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    std::lock_guard guard(device().mutex);
    const auto& options = device().options;
    const auto& memory = device().memory(index);
    const auto reserved = static_cast<size_t>(memory.statistics().reserved_bytes[0].current);
    const auto used = reserved + memory.outside() + options.context_memory;
    return {options.total_memory > used ? options.total_memory - used : 0, options.total_memory};
  }
};

struct PinnedMemory final : c10::Allocator {
  static void release(void* address) {
    {
      std::lock_guard guard(pinned_mutex);
      pinned_addresses.erase(address);
    }
    std::free(address);
  }
  c10::DataPtr allocate(size_t size) override {
    const auto whole = (std::max<size_t>(size, 1) + 63) / 64 * 64;
    void* address = std::aligned_alloc(64, whole);
    TORCH_CHECK_WITH(OutOfMemoryError, address, "the host has no ", size, " bytes of pinned memory left");
    std::lock_guard guard(pinned_mutex);
    pinned_addresses.emplace(address, next_pinned);
    next_pinned += static_cast<int64_t>(whole);
    return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* instance = new DeviceMemory;
  return *instance;
}

c10::Allocator& pinned_allocator() {
  static auto* instance = new PinnedMemory;
  return *instance;
}

bool is_pinned(const void* address) {
  std::lock_guard guard(pinned_mutex);
  return pinned_addresses.contains(address);
}

int64_t page_locked_at(const void* address) {
  std::lock_guard guard(pinned_mutex);
  const auto found = pinned_addresses.find(address);
  return found == pinned_addresses.end() ? 0 : found->second;
}

Allocating::Allocating(std::string_view operator_name, Category category)
    : name_before_(allocating_name), category_before_(allocating_category) {
  allocating_name = operator_name;
  allocating_category = category;
}

Allocating::~Allocating() {
  allocating_name = name_before_;
  allocating_category = category_before_;
}

int64_t block_at(c10::DeviceIndex index, const void* address) {
  std::lock_guard guard(device().mutex);
  const auto* block = device().memory(index).find(reinterpret_cast<uintptr_t>(address));
  return block ? block->id : -1;
}

void keep_until_passed(c10::DeviceIndex index, const void* address, StreamId stream) {
  std::lock_guard guard(device().mutex);
  auto& memory = device().memory(index);
  const auto* block = memory.find(reinterpret_cast<uintptr_t>(address));
  if (!block || block->stream == stream) return;
  memory.record_stream(block->address, stream);
  recorder().held(block->id, stream);
}

void record_stream(c10::DeviceIndex index, const void* address, StreamId stream) {
  if (!address) return;
  keep_until_passed(index, address, stream);
  recorder().add({.kind = Kind::Launch, .name = recorder().names.code("aten::record_stream"), .stream = stream,
                  .flags = kHostOnly});
}

bool resident(const at::Tensor& tensor) {
  if (!device().dry()) return true;
  const auto size = tensor.storage().nbytes();
  return size <= kResidentFloats ||
         (size <= resident_integers && c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true)) ||
         (made_real && marked(tensor, Mark::Real));
}

size_t keep_values(size_t most) { return std::exchange(resident_integers, most); }

size_t kept_values_limit() { return resident_integers; }

bool marked(const at::Tensor& tensor, Mark mark) {
  std::lock_guard guard(marks_mutex);
  const auto found = marks.find(tensor.storage().data());
  return found != marks.end() && (found->second & static_cast<uint8_t>(mark));
}

void set_mark(const at::Tensor& tensor, Mark mark, bool on) {
  const auto bit = static_cast<uint8_t>(mark);
  std::lock_guard guard(marks_mutex);
  if (on) {
    marks[tensor.storage().data()] |= bit;
    made_real += mark == Mark::Real;
  } else if (const auto found = marks.find(tensor.storage().data()); found != marks.end()) {
    found->second &= static_cast<uint8_t>(~bit);
    if (!found->second) marks.erase(found);
  }
}

void forget_value(c10::DeviceIndex index, const void* address) {
  const void* start = nullptr;
  {
    std::lock_guard guard(device().mutex);
    const auto* block = device().memory(index).find(reinterpret_cast<uintptr_t>(address));
    if (block) start = reinterpret_cast<const void*>(block->address);
  }
  std::lock_guard guard(marks_mutex);
  if (start) marks[start] |= static_cast<uint8_t>(Mark::Unknown);
}

void resize_storage(c10::StorageImpl& storage, size_t size) {
  const auto index = storage.device().index();
  DeviceScope scope(index);
  Allocating allocating("aten::resize_");
  auto fresh = device_allocator().allocate(size);
  const auto kept = std::min(size, storage.nbytes());
  if (kept && storage.data()) {
    if (device().dry() && kept <= kResidentIntegers) std::memcpy(fresh.get(), storage.data(), kept);
    device_allocator().copy_data(fresh.get(), storage.data(), kept);
    std::lock_guard guard(marks_mutex);
    if (const auto found = marks.find(storage.data()); found != marks.end()) {
      if (const auto mark = found->second & ~static_cast<int>(Mark::Real)) marks[fresh.get()] = mark;
    }
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}

}  // namespace refshard
