// The allocator's settings, and the text that sets them: PYTORCH_ALLOC_CONF, once PYTORCH_CUDA_ALLOC_CONF.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace refshard {

// Defaults and meanings as in torch 2.13. Sizes are in bytes.
struct AllocatorSettings {
  bool expandable_segments = false;
  size_t large_segment_size = size_t{20} << 20;           // of segments for requests between 1 and 10 MiB
  size_t max_split_size = SIZE_MAX;                       // blocks from this size on are never split
  size_t max_non_split_rounding_size = size_t{20} << 20;  // by how much such a block may exceed its request
  double garbage_collection_threshold = 0;                // fraction of the memory limit; 0: never
  double per_process_memory_fraction = 1;                 // of the device's total memory; 1: no limit
  bool throw_on_cudamalloc_oom = false;                   // above that limit, refuse before anything is freed
  std::vector<size_t> roundup_power2_divisions;           // one for each power of two from 1 MiB on; empty: none

  // Into how many parts the power of two below `bytes` is divided for rounding; 0 or 1: round to 512 bytes.
  size_t divisions(size_t bytes) const;
};

// Reads settings such as "expandable_segments:True,max_split_size_mb:128". Like torch, it starts from `current` for
// expandable_segments, large_segment_size_mb, per_process_memory_fraction and throw_on_cudamalloc_oom, and from the
// defaults for the rest. Throws std::invalid_argument, which names the option, its value and the remedy, for what
// torch 2.13 refuses and for the backend cudaMallocAsync. Options of pinned memory, of locks and of CUDA graphs change
// nothing here; their values are checked, no more.
AllocatorSettings parse_allocator_settings(std::string_view text, const AllocatorSettings& current = {});

}  // namespace refshard
