// Which block a request gets, and what becomes of it when it is freed.
#include "caching_allocator.h"

#include <bit>
#include <iomanip>
#include <sstream>
#include <stdexcept>

#include "allocator_sizes.h"

namespace refshard {
namespace {

std::string format_bytes(size_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2);
  const auto amount = static_cast<double>(bytes);
  if (bytes <= 1024) {
    text << bytes << " bytes";
  } else if (bytes <= allocator_sizes::kMebibyte) {
    text << amount / 1024 << " KiB";
  } else if (bytes <= 1024 * allocator_sizes::kMebibyte) {
    text << amount / static_cast<double>(allocator_sizes::kMebibyte) << " MiB";
  } else {
    text << amount / static_cast<double>(1024 * allocator_sizes::kMebibyte) << " GiB";
  }
  return text.str();
}

// Up to the next of the `divisions` equal parts of a power of two; `divisions` is a power of two.
size_t round_to_part_of_power2(size_t bytes, size_t divisions) {
  if (std::has_single_bit(bytes)) return bytes;
  const auto power2 = std::bit_floor(bytes);
  const auto part = power2 / divisions;
  return part ? allocator_sizes::round_up(bytes, part) : 2 * power2;
}

}  // namespace

CachingAllocator::CachingAllocator(uintptr_t base, size_t span, size_t capacity, AllocatorSettings settings,
                                   Progress& progress, std::function<void(int64_t)> on_segment, size_t device_total)
    : settings_(std::move(settings)),
      progress_(progress),
      on_segment_(std::move(on_segment)),
      capacity_(capacity),
      device_total_(device_total ? device_total : capacity),
      addresses_(base, span),
      own_(pools_.emplace(kOwnPool, kOwnPool).first->second) {
  statistics_.max_split_size = static_cast<int64_t>(settings_.max_split_size);
  set_memory_fraction(settings_.per_process_memory_fraction);
}

void CachingAllocator::set_memory_fraction(double fraction) {
  if (!(fraction >= 0 && fraction <= 1)) {
    throw std::invalid_argument("invalid fraction: " + std::to_string(fraction) + ". Please set within [0, 1].");
  }
  limit_.reset();
  if (fraction < 1 && device_total_) limit_ = static_cast<size_t>(fraction * static_cast<double>(device_total_));
}

double CachingAllocator::memory_fraction() const {
  return limit_ ? static_cast<double>(*limit_) / static_cast<double>(device_total_) : 1.0;
}

Allocation CachingAllocator::allocate(size_t bytes, StreamId stream) {
  if (bytes == 0) return {};
  if (taking_.empty()) recycle_passed();  // no event can be queried in a capture
  const auto request = request_for(bytes, stream);
  auto* block = take_cached(request);
  if (!block) block = take_from_device(request);
  if (!block) {
    ++statistics_.num_ooms;
    throw out_of_memory(request.segment_size);
  }
  block = &hand_out(*block, bytes, request.size, should_split(*block, request.size));
  return {block->address, block->size, block->id};
}

CachingAllocator::Request CachingAllocator::request_for(size_t bytes, StreamId stream) {
  using namespace allocator_sizes;
  if (bytes >= kTooLarge) {  // before rounding could overflow
    OutOfMemory error;
    error.requested = bytes;
    throw error;
  }
  const auto size = rounded(bytes);
  const bool small = size <= kLargestSmall;
  const auto large_size = size < kLeastUnshared ? settings_.large_segment_size : round_up(size, kUnsharedUnit);
  const auto segment_size = small ? kSmallSegment : large_size;
  return {bytes, size, segment_size, stream, pools_for(stream).of(small)};
}

CachingAllocator::Pools& CachingAllocator::pools_for(StreamId stream) {
  for (auto it = taking_.rbegin(); it != taking_.rend(); ++it) {
    if (it->second(stream)) return pools_.at(it->first);
  }
  return own_;
}

size_t CachingAllocator::rounded(size_t bytes) const {
  using namespace allocator_sizes;
  if (bytes < kUnit) return kUnit;
  const auto divisions = settings_.divisions(bytes);
  if (divisions > 1 && bytes > kUnit * divisions) return round_to_part_of_power2(bytes, divisions);
  return round_up(bytes, kUnit);
}

Block* CachingAllocator::take_cached(const Request& request) {
  // The clock by which garbage collection tells how long a block has lain idle.
  if (collects_garbage()) ++request.pool.searches;
  const auto found = best_fit(request);
  if (found == request.pool.cached.end() || !acceptable(*found->second, request)) return nullptr;
  auto* block = found->second;
  request.pool.cached.erase(found);
  return block;
}

// The smallest block that is large enough; of equals, the lowest of the oldest segment. A block at the end of an
// expandable segment's memory counts as being as large as it could grow, so that growth is left for requests that need
// it.
CachingAllocator::BySize::iterator CachingAllocator::best_fit(const Request& request) {
  auto& cached = request.pool.cached;
  const auto usable = [&](auto it) { return it != cached.end() && it->second->stream == request.stream; };
  const auto expandable = [](auto it) { return it->second->segment->expandable; };
  const auto extent = [this](auto it) {
    const auto* next = right_of(*it->second);
    return it->second->size + (next && next->state == BlockState::Unmapped ? next->size : 0);
  };

  auto best = cached.lower_bound({request.stream, request.size, 0, 0});
  if (!usable(best) || !expandable(best)) return usable(best) ? best : cached.end();
  if (settings_.expandable_segments) {
    for (auto next = std::next(best); expandable(best) && usable(next) && extent(next) < extent(best); ++next) {
      best = next;
    }
    return best;
  }
  // Expandable segments were switched off after these were made: only other blocks will do.
  while (usable(best) && expandable(best)) ++best;
  return usable(best) ? best : cached.end();
}

// Oversize blocks are for oversize requests alone, which in turn must not waste too much of them.
bool CachingAllocator::acceptable(const Block& block, const Request& request) const {
  if (request.size < settings_.max_split_size) return block.size < settings_.max_split_size;
  return block.size < request.size + settings_.max_non_split_rounding_size;
}

bool CachingAllocator::should_split(const Block& block, size_t size) const {
  if (!pools_.at(block.segment->owner).splits) return false;
  const auto rest = block.size - size;
  if (block.segment->small || settings_.expandable_segments) return rest >= allocator_sizes::kUnit;
  return size < settings_.max_split_size && rest > allocator_sizes::kLargestSmall;
}

// Hands out a block that is in no pool, or its first `size` bytes.
Block& CachingAllocator::hand_out(Block& block, size_t bytes, size_t size, bool split) {
  const bool was_split = is_split(block);
  Block* rest = nullptr;
  if (split) {
    rest = &cut(block, size);
    put_in_pool(*rest);
  }
  block.state = BlockState::Allocated;
  block.requested_size = bytes;
  block.id = ++last_id_;
  count_handing_out(block, rest, was_split);
  return block;
}

void CachingAllocator::count_handing_out(const Block& block, const Block* rest, bool was_split) {
  const bool small = block.segment->small;
  // Pages of expandable segments can be released one by one, hence no part of them counts as stuck.
  if (!block.segment->expandable && was_split) {
    statistics_.inactive_split_bytes.decrease(small, block.size);
    if (!rest) statistics_.inactive_split.decrease(small, 1);
  } else if (!block.segment->expandable && rest) {
    statistics_.inactive_split_bytes.increase(small, rest->size);
    statistics_.inactive_split.increase(small, 1);
  }
  statistics_.allocation.increase(small, 1);
  statistics_.allocated_bytes.increase(small, block.size);
  statistics_.active.increase(small, 1);
  statistics_.active_bytes.increase(small, block.size);
  statistics_.requested_bytes.increase(small, block.requested_size);
  if (block.size >= settings_.max_split_size) statistics_.oversize_allocations.change(1);
}

int64_t CachingAllocator::free(uintptr_t address) {
  auto& block = held_block(address, "free");
  const auto id = block.id;
  statistics_.allocation.decrease(block.segment->small, 1);
  statistics_.allocated_bytes.decrease(block.segment->small, block.size);
  if (block.size >= settings_.max_split_size) statistics_.oversize_allocations.change(-1);
  if (block.used_on.empty()) {
    recycle(block);
  } else if (taking_.empty()) {
    defer(block);
  } else {
    block.state = BlockState::Pending;
    freed_in_captures_.push_back(&block);
  }
  return id;
}

void CachingAllocator::record_stream(uintptr_t address, StreamId stream) {
  auto& block = held_block(address, "record_stream");
  if (stream == block.stream) return;  // which is in order anyway
  block.used_on.insert(stream);
  if (!taking_.empty()) block.used_in_capture.insert(stream);
}

Block& CachingAllocator::held_block(uintptr_t address, const char* action) {
  const auto found = blocks_.find(address);
  if (found != blocks_.end() && found->second.state == BlockState::Allocated) return found->second;
  std::ostringstream text;
  text << action << ": no allocation of the fake device begins at 0x" << std::hex << address
       << "; it was freed before, or is another device's memory";
  throw std::invalid_argument(text.str());
}

const Block* CachingAllocator::find(uintptr_t address) const {
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  const auto& block = std::prev(after)->second;
  const bool inside = address < block.address + block.size;
  return inside && block.state == BlockState::Allocated ? &block : nullptr;
}

void CachingAllocator::defer(Block& block) {
  block.state = BlockState::Pending;
  block.waits_for = block.used_on.size();
  for (const auto stream : block.used_on) deferred_[stream].emplace_back(progress_.position(stream), &block);
  block.used_on.clear();
}

// What a stream does in a capture it has done, or does in replays, which the pool is kept for.
void CachingAllocator::defer_from_captures() {
  for (auto* block : std::exchange(freed_in_captures_, {})) {
    for (const auto stream : std::exchange(block->used_in_capture, {})) block->used_on.erase(stream);
    if (block->used_on.empty()) {
      recycle(*block);
    } else {
      defer(*block);
    }
  }
}

void CachingAllocator::recycle_passed() {
  defer_from_captures();
  for (auto it = deferred_.begin(); it != deferred_.end();) {
    auto& [stream, waiting] = *it;
    while (!waiting.empty() && progress_.passed(stream, waiting.front().first)) {
      auto& block = *waiting.front().second;
      waiting.pop_front();
      if (--block.waits_for == 0) recycle(block);
    }
    it = waiting.empty() ? deferred_.erase(it) : std::next(it);
  }
}

// Of one private pool alone, if it is named.
void CachingAllocator::recycle_all_deferred(PoolId only) {
  ++statistics_.num_sync_all_streams;
  defer_from_captures();
  if (deferred_.empty()) return;
  progress_.synchronise();
  for (auto& [stream, waiting] : std::exchange(deferred_, {})) {
    for (auto& [ticket, block] : waiting) {
      if (only != kOwnPool && block->segment->owner != only) {
        deferred_[stream].emplace_back(ticket, block);
      } else if (--block->waits_for == 0) {
        recycle(*block);
      }
    }
  }
}

void CachingAllocator::recycle(Block& block) {
  const bool small = block.segment->small;
  statistics_.active.decrease(small, 1);
  statistics_.active_bytes.decrease(small, block.size);
  statistics_.requested_bytes.decrease(small, block.requested_size);
  int64_t split_blocks = 0;
  int64_t split_bytes = 0;
  for (const auto* neighbour : {left_of(block), right_of(block)}) {
    if (!neighbour || neighbour->state != BlockState::Cached) continue;
    --split_blocks;
    split_bytes -= static_cast<int64_t>(neighbour->size);
  }

  block.state = BlockState::Cached;
  auto& united = unite(block);
  put_in_pool(united);
  if (united.segment->expandable) return;
  if (is_split(united)) {
    ++split_blocks;
    split_bytes += static_cast<int64_t>(united.size);
  }
  statistics_.inactive_split.change(small, split_blocks);
  statistics_.inactive_split_bytes.change(small, split_bytes);
}

CachingAllocator::SizeKey CachingAllocator::size_key(const Block& block) {
  return {block.stream, block.size, block.segment->serial, block.address};
}

Block* CachingAllocator::left_of(const Block& block) {
  const auto here = blocks_.find(block.address);
  if (here == blocks_.begin()) return nullptr;
  auto& left = std::prev(here)->second;
  return left.segment == block.segment ? &left : nullptr;
}

Block* CachingAllocator::right_of(const Block& block) {
  const auto right = std::next(blocks_.find(block.address));
  return right != blocks_.end() && right->second.segment == block.segment ? &right->second : nullptr;
}

Block& CachingAllocator::add_block(const Segment& segment, uintptr_t address, size_t size, BlockState state) {
  const Block block{.address = address, .size = size, .stream = segment.stream, .segment = &segment, .state = state};
  return blocks_.emplace(address, block).first->second;
}

// Shortens the block, and returns the rest as one that is in no pool yet.
Block& CachingAllocator::cut(Block& block, size_t size) {
  auto& rest = add_block(*block.segment, block.address + size, block.size - size, block.state);
  block.size = size;
  return rest;
}

// Joins a block that is in no pool with neighbours of its state, which leave theirs. Returns the block that remains.
Block& CachingAllocator::unite(Block& block) {
  if (auto* right = right_of(block); right && right->state == block.state) {
    take_from_pool(*right);
    block.size += right->size;
    blocks_.erase(right->address);
  }
  auto* left = left_of(block);
  if (!left || left->state != block.state) return block;
  take_from_pool(*left);
  left->size += block.size;
  blocks_.erase(block.address);
  return *left;
}

void CachingAllocator::put_in_pool(Block& block) {
  auto& pool = pool_of(block);
  block.id = 0;
  block.requested_size = 0;
  block.used_in_capture.clear();
  if (block.state == BlockState::Unmapped) {
    pool.unmapped.emplace(std::pair(block.stream, block.address), &block);
  } else {
    block.cached_since = pool.searches;
    pool.cached.emplace(size_key(block), &block);
  }
}

void CachingAllocator::take_from_pool(const Block& block) {
  auto& pool = pool_of(block);
  if (block.state == BlockState::Unmapped) {
    pool.unmapped.erase({block.stream, block.address});
  } else {
    pool.cached.erase(size_key(block));
  }
}

std::vector<SegmentInfo> CachingAllocator::snapshot(PoolId only) const {
  std::vector<SegmentInfo> segments;
  const Block* before = nullptr;
  for (const auto& [address, block] : blocks_) {
    const bool continues = before && before->segment == block.segment && before->state != BlockState::Unmapped;
    before = &block;
    if (block.state == BlockState::Unmapped || (only != kOwnPool && block.segment->owner != only)) continue;
    if (!continues) {
      const auto& of = *block.segment;
      segments.push_back({address, of.owner, block.stream, of.small, of.expandable});
    }
    auto& segment = segments.back();
    segment.blocks.push_back({address, block.size, block.requested_size, block.state});
    segment.total_size += block.size;
    if (block.state == BlockState::Allocated) segment.allocated_size += block.size;
    if (block.state == BlockState::Cached) continue;
    segment.active_size += block.size;
    segment.requested_size += block.requested_size;
  }
  return segments;
}

std::string OutOfMemory::message(int device_index) const {
  if (requested >= allocator_sizes::kTooLarge) return "CUDA out of memory. Tried to allocate more than 1EB memory.";
  if (rejected) {
    return "CUDA out of memory. Allocation was preemptively rejected because it would exceed"
           " per_process_memory_fraction limit. Requested size: " + format_bytes(requested);
  }
  std::ostringstream text;
  text << "CUDA out of memory. Tried to allocate " << format_bytes(requested)
       << (by_nccl ? " for an NCCL communicator" : "") << ". GPU " << device_index
       << " has a total capacity of " << format_bytes(total) << " of which " << format_bytes(free)
       << " is free. Including non-PyTorch memory, this process has " << format_bytes(total - free)
       << " memory in use. ";
  if (allowed) text << format_bytes(*allowed) << " allowed; ";
  text << "Of the allocated memory " << format_bytes(allocated + in_private_pools) << " is allocated by PyTorch, ";
  if (in_private_pools) {
    text << "with " << format_bytes(in_private_pools) << " allocated in private pools (e.g., CUDA Graphs), ";
  }
  text << "and " << format_bytes(reserved - allocated - in_private_pools)
       << " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting"
          " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory"
          " Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
          "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)";
  return text.str();
}

}  // namespace refshard
