// When the allocator takes memory from the device, and when it gives memory back.
#include <algorithm>

#include "allocator_sizes.h"
#include "caching_allocator.h"

namespace refshard {

Block* CachingAllocator::take_from_device(const Request& request) {
  if (collects_garbage()) collect_garbage();
  if (auto* block = grow(request)) return block;
  if (auto* block = borrow(request)) return block;
  if (release_oversize(request)) {
    if (auto* block = grow(request)) return block;
  }
  if (!taking_.empty()) return nullptr;  // no memory can be given back in a capture
  release_cache();
  ++statistics_.num_alloc_retries;
  return grow(request);
}

// A free block of a private pool that lends, for a request that none serves.
Block* CachingAllocator::borrow(const Request& request) {
  if (request.pool.owner != kOwnPool) return nullptr;
  for (auto& [id, pools] : pools_) {
    if (!pools.lends || !pools.users) continue;
    if (auto* block = take_cached({request.bytes, request.size, request.segment_size, request.stream,
                                   pools.of(request.pool.small)})) {
      return block;
    }
  }
  return nullptr;
}

Block* CachingAllocator::grow(const Request& request) {
  if (above_limit(request.segment_size)) return nullptr;
  reject_if_asked(request);
  if (settings_.expandable_segments) return grow_expandable(request);
  if (!has_room(request.segment_size)) return nullptr;
  auto& block = new_segment(request, request.segment_size, /*expandable=*/false);
  statistics_.segment.increase(request.pool.small, 1);
  if (request.segment_size >= settings_.max_split_size) statistics_.oversize_segments.change(1);
  ++statistics_.num_device_alloc;
  count_reserved(*block.segment, static_cast<int64_t>(request.segment_size));
  return &block;
}

// Maps as many pages as make a block large enough. If memory runs out on the way, what was mapped stays, cached.
Block* CachingAllocator::grow_expandable(const Request& request) {
  auto* block = &expandable_room(request);
  if (block->state == BlockState::Unmapped) block = map(*block, std::min(block->size, request.size));
  while (block && block->size < request.size) {
    auto& unmapped = *right_of(*block);  // expandable_room() saw to it
    block = map(unmapped, std::min(unmapped.size, request.size - block->size));
  }
  if (block) take_from_pool(*block);
  return block;
}

// The lowest free or unmapped block from which on enough addresses are free, with or without memory.
Block& CachingAllocator::expandable_room(const Request& request) {
  const auto is_free = [](const Block* block) {
    return block && (block->state == BlockState::Cached || block->state == BlockState::Unmapped);
  };
  const auto has_addresses = [&](const Block* block) {
    size_t found = 0;
    for (; found < request.size && is_free(block); block = right_of(*block)) found += block->size;
    return found >= request.size;
  };
  auto& unmapped = request.pool.unmapped;
  for (auto it = unmapped.lower_bound({request.stream, 0}); it != unmapped.end(); ++it) {
    auto* block = it->second;
    if (block->stream != request.stream) break;
    if (auto* left = left_of(*block); is_free(left)) block = left;
    if (has_addresses(block)) return *block;
  }
  // As torch does: more than the device has, since pages may move from a segment's middle to its end.
  const auto page_size = request.pool.small ? allocator_sizes::kSmallSegment : settings_.large_segment_size;
  const auto memory = device_total_ ? device_total_ : allocator_sizes::kUnlimitedMemory;
  const auto usual = std::min(memory + memory / 8, allocator_sizes::kMostAddresses);
  const auto size = std::max(usual, request.size);  // a device without limit may be asked for a larger block
  auto& block = new_segment(request, allocator_sizes::round_up(size, page_size), /*expandable=*/true);
  put_in_pool(block);
  return block;
}

// A segment of one block, which is in no pool yet.
Block& CachingAllocator::new_segment(const Request& request, size_t size, bool expandable) {
  const auto page_size = request.pool.small ? allocator_sizes::kSmallSegment : settings_.large_segment_size;
  const auto address = addresses_.take(size);
  const auto& [small, owner, cached, unmapped, searches] = request.pool;
  const Segment made{++last_segment_, owner, address, size, request.stream, small, expandable, page_size};
  const auto& segment = segments_.emplace(address, made).first->second;
  return add_block(segment, address, size, expandable ? BlockState::Unmapped : BlockState::Cached);
}

// Gives memory to the first pages of an unmapped block: as many as `size` bytes take. Returns the cached block that
// they and their neighbours make up, null if the device has no room for them.
Block* CachingAllocator::map(Block& block, size_t size) {
  size = allocator_sizes::round_up(size, block.segment->page_size);
  if (!has_room(size)) return nullptr;
  take_from_pool(block);
  if (size < block.size) put_in_pool(cut(block, size));
  block.state = BlockState::Cached;
  auto& united = unite(block);
  put_in_pool(united);
  ++statistics_.num_device_alloc;
  count_reserved(*united.segment, static_cast<int64_t>(size));
  return &united;
}

bool CachingAllocator::has_room(size_t size) const {
  return !capacity_ || size <= unreserved();
}

// What the device has left.
size_t CachingAllocator::unreserved() const {
  return (capacity_ ? capacity_ : device_total_) - outside_ - static_cast<size_t>(statistics_.reserved_bytes[0].current);
}

void CachingAllocator::take_outside(size_t bytes) {
  if (!has_room(bytes)) {
    auto error = out_of_memory(bytes);
    error.by_nccl = true;
    throw error;
  }
  outside_ += bytes;
}

bool CachingAllocator::above_limit(size_t size) const {
  return limit_ && static_cast<size_t>(statistics_.reserved_bytes[0].current) + size > *limit_;
}

void CachingAllocator::count_reserved(const Segment& segment, int64_t delta) {
  statistics_.reserved_bytes.change(segment.small, delta);
  if (segment.owner != kOwnPool) {
    statistics_.reserved_bytes_by_private_pools[segment.owner].change(segment.small, delta);
  }
  if (on_segment_) on_segment_(delta);
}

// The setting's fraction counts here, whatever set_memory_fraction() said.
void CachingAllocator::reject_if_asked(const Request& request) {
  const auto most = settings_.per_process_memory_fraction * static_cast<double>(device_total_);
  const auto wanted = static_cast<size_t>(statistics_.reserved_bytes[0].current) + request.segment_size;
  if (!settings_.throw_on_cudamalloc_oom || !device_total_ || wanted <= static_cast<size_t>(most)) return;
  ++statistics_.num_oom_rejections;
  auto error = out_of_memory(request.bytes);
  error.rejected = true;
  throw error;
}

OutOfMemory CachingAllocator::out_of_memory(size_t requested) const {
  OutOfMemory error;
  error.requested = requested;
  error.total = device_total_;
  error.reserved = static_cast<size_t>(statistics_.reserved_bytes[0].current);
  error.allocated = static_cast<size_t>(statistics_.allocated_bytes[0].current);
  error.free = unreserved();
  error.allowed = limit_;
  for (const auto& [id, pools] : pools_) {
    if (id == kOwnPool) continue;
    for (const auto* pool : {&pools.small, &pools.large}) {
      for (const auto& [key, block] : pool->cached) error.in_private_pools += block->size;
    }
  }
  return error;
}

bool CachingAllocator::collects_garbage() const { return limit_ && settings_.garbage_collection_threshold > 0; }

// Releases unsplit large blocks that have lain idle for longer than the average, until reserved memory is back at the
// threshold.
void CachingAllocator::collect_garbage() {
  const auto threshold = static_cast<size_t>(settings_.garbage_collection_threshold * static_cast<double>(*limit_));
  const auto reserved = static_cast<size_t>(statistics_.reserved_bytes[0].current);
  if (reserved <= threshold) return;
  const auto age = [this](const Block& block) { return own_.large.searches - block.cached_since; };
  std::vector<Block*> idle;
  int64_t total_age = 0;
  for (const auto& [key, block] : own_.large.cached) {
    if (is_split(*block)) continue;
    idle.push_back(block);
    total_age += age(*block);
  }
  size_t released = 0;
  for (bool progress = true; progress && released < reserved - threshold && !idle.empty();) {
    const auto average = static_cast<double>(total_age) / static_cast<double>(idle.size());
    const auto is_old = [&](Block* block) {
      return !block->segment->expandable && static_cast<double>(age(*block)) >= average;
    };
    progress = std::erase_if(idle, [&](Block* block) {
      if (!is_old(block)) return false;
      released += block->size;
      total_age -= age(*block);
      release(*block);
      return true;
    }) > 0;
  }
}

// Releases one cached oversize block of the stream that the request would fit, else as many as together would do, the
// largest first. Returns whether that was enough. Oversize blocks are whole segments, unless max_split_size was lowered
// meanwhile; torch would then give cudaFree the middle of one, which fails.
bool CachingAllocator::release_oversize(const Request& request) {
  if (settings_.max_split_size == SIZE_MAX) return false;
  auto& cached = request.pool.cached;
  const auto wanted = std::max(request.size, settings_.max_split_size);
  auto it = cached.lower_bound({request.stream, wanted, 0, 0});
  const auto releasable = [](const Block& block) { return !block.segment->expandable && !is_split(block); };
  if (it != cached.end() && it->second->stream == request.stream && releasable(*it->second)) {
    release(*it->second);
    return true;
  }
  size_t released = 0;
  while (released < wanted && it != cached.begin()) {
    auto* block = std::prev(it)->second;
    if (block->stream != request.stream || block->size < settings_.max_split_size) break;
    if (!releasable(*block)) {
      --it;
      continue;
    }
    released += block->size;
    release(*block);
  }
  return released >= wanted;
}

void CachingAllocator::empty_cache(PoolId only) {
  if (only == kOwnPool && taking_.empty()) {
    release_cache();
  } else {
    release_unused_pools(only);
  }
}

void CachingAllocator::release_cache() {
  recycle_all_deferred();
  release_cached(own_.large);
  release_cached(own_.small);
  release_unused_pools();
}

// Private pools without users, or the named one if it is one of them. One that has no segment left is gone.
void CachingAllocator::release_unused_pools(PoolId only) {
  for (auto it = pools_.begin(); it != pools_.end();) {
    auto& [id, pools] = *it++;
    if (pools.users || (only != kOwnPool && only != id)) continue;
    if (only == id) recycle_all_deferred(id);
    release_cached(pools.small);
    release_cached(pools.large);
    const auto owner = id;
    const auto is_its = [&](const auto& segment) { return segment.second.owner == owner; };
    if (std::none_of(segments_.begin(), segments_.end(), is_its)) pools_.erase(owner);
  }
}

void CachingAllocator::release_cached(Pool& pool) {
  std::vector<Block*> blocks;
  for (const auto& [key, block] : pool.cached) blocks.push_back(block);
  for (auto* block : blocks) {
    if (block->segment->expandable) {
      unmap(*block);
    } else if (!is_split(*block)) {
      release(*block);
    }
  }
}

// Returns a whole segment to the device; cudaFree waits for everything that runs on it.
void CachingAllocator::release(Block& block) {
  progress_.synchronise();
  ++statistics_.num_device_free;
  statistics_.segment.decrease(block.segment->small, 1);
  if (block.size >= settings_.max_split_size) statistics_.oversize_segments.change(-1);
  count_reserved(*block.segment, -static_cast<int64_t>(block.size));
  take_from_pool(block);
  drop_segment(block);
}

// Takes the memory from the pages that lie wholly within a cached block of an expandable segment.
void CachingAllocator::unmap(Block& block) {
  const auto& segment = *block.segment;
  const auto begin = allocator_sizes::round_up(block.address - segment.address, segment.page_size);
  const auto end = allocator_sizes::round_down(block.address + block.size - segment.address, segment.page_size);
  if (begin >= end) return;
  progress_.synchronise();  // torch waits for the segment's stream, the host's only way to know that it is done
  take_from_pool(block);
  auto* whole_pages = &block;
  if (const auto before = segment.address + begin - block.address) {
    whole_pages = &cut(block, before);
    put_in_pool(block);
  }
  if (whole_pages->size > end - begin) put_in_pool(cut(*whole_pages, end - begin));
  whole_pages->state = BlockState::Unmapped;
  auto& unmapped = unite(*whole_pages);
  put_in_pool(unmapped);
  ++statistics_.num_device_free;
  count_reserved(segment, -static_cast<int64_t>(end - begin));
  if (is_split(unmapped)) return;
  take_from_pool(unmapped);
  drop_segment(unmapped);
}

// Forgets a segment and the one block that it consists of.
void CachingAllocator::drop_segment(const Block& block) {
  const auto segment = *block.segment;
  addresses_.give_back(segment.address, segment.size);
  blocks_.erase(segment.address);
  segments_.erase(segment.address);
}

}  // namespace refshard
