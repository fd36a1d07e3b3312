// What the allocator counts, named as torch.cuda.memory_stats() names it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace refshard {

struct Stat {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0;  // all increases since the last reset
  int64_t freed = 0;      // all decreases

  void change(int64_t amount) {
    current += amount;
    peak = std::max(peak, current);
    (amount > 0 ? allocated : freed) += amount > 0 ? amount : -amount;
  }
  void reset_peak() { peak = current; }
  void reset_accumulated() { allocated = freed = 0; }
};

// Of all memory, of the small pool, of the large pool.
struct PoolStat : std::array<Stat, 3> {
  void change(bool small, int64_t amount) {
    (*this)[0].change(amount);
    (*this)[small ? 1 : 2].change(amount);
  }
  void increase(bool small, size_t amount) { change(small, static_cast<int64_t>(amount)); }
  void decrease(bool small, size_t amount) { change(small, -static_cast<int64_t>(amount)); }
};

struct Statistics {
  // Counts: blocks that the program holds; segments; blocks that it holds or streams still use; free parts of segments.
  PoolStat allocation, segment, active, inactive_split;
  // Bytes of the same; of requests before rounding.
  PoolStat allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes;
  std::map<std::pair<uint64_t, uint64_t>, PoolStat> reserved_bytes_by_private_pools;
  Stat oversize_allocations, oversize_segments;  // blocks and segments of at least max_split_size
  int64_t num_alloc_retries = 0;                 // requests that needed the whole cache to be released
  int64_t num_ooms = 0;
  int64_t num_oom_rejections = 0;    // by throw_on_cudamalloc_oom
  int64_t num_sync_all_streams = 0;  // waits for all streams, to release the cache
  int64_t num_device_alloc = 0;      // calls of cudaMalloc, or mappings of pages
  int64_t num_device_free = 0;
  int64_t max_split_size = 0;

  void reset_peaks() {
    for (auto* stat : pool_stats()) for (auto& each : *stat) each.reset_peak();
    for (auto& [id, stat] : reserved_bytes_by_private_pools) for (auto& each : stat) each.reset_peak();
    oversize_allocations.reset_peak();
    oversize_segments.reset_peak();
  }
  void reset_accumulated() {
    for (auto* stat : pool_stats()) for (auto& each : *stat) each.reset_accumulated();
    for (auto& [id, stat] : reserved_bytes_by_private_pools) for (auto& each : stat) each.reset_accumulated();
    oversize_allocations.reset_accumulated();
    oversize_segments.reset_accumulated();
    num_alloc_retries = num_ooms = num_oom_rejections = num_sync_all_streams = num_device_alloc = num_device_free = 0;
  }

 private:
  std::array<PoolStat*, 9> pool_stats() {
    return {&allocation,     &segment,      &active,          &inactive_split, &allocated_bytes, &reserved_bytes,
            &active_bytes, &inactive_split_bytes, &requested_bytes};
  }
};

}  // namespace refshard
