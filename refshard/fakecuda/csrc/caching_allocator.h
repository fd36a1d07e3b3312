// torch's caching allocator of CUDA memory, simulated: which block each request gets, and when memory is taken from the
// device or given back, as in torch 2.13 (c10/cuda/CUDACachingAllocator.cpp). It hands out addresses and touches no
// memory. Sharing between processes and allocators of a pool's own are left out.
//
// Terms. A *segment* is memory taken from the device by one cudaMalloc, or, if expandable, a long range of addresses to
// which pages are mapped as needed. *Blocks* tile each segment. Small requests (up to 1 MiB) and large ones have a pool
// each, and no block changes stream. A *private pool*, of CUDA graphs or of a torch.cuda.MemPool, is another such pair
// with segments of its own; the device gets these back only once nobody uses the pool.
//
// Not thread-safe: the caller locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "address_space.h"
#include "allocator_settings.h"
#include "allocator_statistics.h"

namespace refshard {

using StreamId = int64_t;
using PoolId = std::pair<uint64_t, uint64_t>;  // as torch numbers private pools
constexpr PoolId kOwnPool{0, 0};               // the one that is not private

// How far streams have come. A block that record_stream() named a stream for comes free once that stream has passed
// what it had been asked when the block was freed.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual int64_t position(StreamId stream) = 0;              // ticket of everything asked of the stream so far
  virtual bool passed(StreamId stream, int64_t ticket) = 0;
  virtual void synchronise() = 0;                             // the host waits for the whole device
};

// Sizes in bytes.
class OutOfMemory : public std::exception {
 public:
  size_t requested = 0;           // from the device, hence rounded to a segment's size; if rejected, as asked
  size_t total = 0;               // memory of the device
  size_t free = 0;                // of it
  std::optional<size_t> allowed;  // by the memory fraction
  size_t allocated = 0;           // by blocks that the program holds
  size_t reserved = 0;            // by segments
  size_t in_private_pools = 0;    // of it, free in private pools
  bool rejected = false;          // by throw_on_cudamalloc_oom, before anything was tried
  bool by_nccl = false;           // asked for by NCCL, which fails on a GPU with an error of its own

  std::string message(int device_index) const;  // torch's text
  const char* what() const noexcept override { return "CUDA out of memory"; }
};

struct Segment {
  int64_t serial;  // in the order of their making
  PoolId owner;
  uintptr_t address;
  size_t size;  // if expandable, of the addresses, not all of which have memory
  StreamId stream;
  bool small;  // of the small pool
  bool expandable;
  size_t page_size;  // if expandable; mapped and unmapped as a whole
};

enum class BlockState {
  Cached,     // free, and in its pool
  Allocated,  // held by the program
  Pending,    // freed by the program, but streams may still use it
  Unmapped,   // addresses of an expandable segment without memory
};

struct Block {
  uintptr_t address;
  size_t size;
  StreamId stream;
  const Segment* segment;
  BlockState state;
  size_t requested_size = 0;
  int64_t id = 0;                   // of the allocation
  std::set<StreamId> used_on = {};  // streams other than its own, by record_stream()
  std::set<StreamId> used_in_capture = {};  // those of them that were named while a pool took allocations
  size_t waits_for = 0;             // so many of them, once freed
  int64_t cached_since = 0;         // its pool's count of searches, which serves as a clock for garbage collection
};

struct Allocation {
  uintptr_t address = 0;
  size_t size = 0;  // of the block
  int64_t id = 0;   // never used again
};

struct BlockInfo {
  uintptr_t address;
  size_t size;
  size_t requested_size;
  BlockState state;
};

// A segment or, if expandable, a stretch of one that has memory.
struct SegmentInfo {
  uintptr_t address;
  PoolId pool;
  StreamId stream;
  bool small;
  bool expandable;
  size_t total_size = 0;
  size_t allocated_size = 0;
  size_t active_size = 0;
  size_t requested_size = 0;
  std::vector<BlockInfo> blocks = {};
};

// Of a private pool: the blocks of each of its segments, in order. torch applies one before it captures another graph,
// so that the pool holds what tensors hold that replays made.
struct Checkpoint {
  PoolId pool;
  std::vector<std::vector<BlockInfo>> segments;
};

// What changed hands when a checkpoint was applied. A block that was held before and after keeps its id.
struct Restored {
  std::vector<Block> freed, held;
};

class CachingAllocator {
 public:
  // Hands out addresses from [base, base + span); released ones are used again, the lowest first, and an expandable
  // segment takes 9/8 of the device's memory. `capacity` bytes can be allocated, 0 meaning without limit, of a device
  // that has `device_total`, 0 meaning no more than that. `on_segment` is told how many bytes were taken from the
  // device, or, negative, given back.
  CachingAllocator(uintptr_t base, size_t span, size_t capacity, AllocatorSettings settings, Progress& progress,
                   std::function<void(int64_t)> on_segment, size_t device_total = 0);
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  // Throws OutOfMemory. A request of 0 bytes gets the address 0, which needs no free().
  Allocation allocate(size_t bytes, StreamId stream);
  // Returns the allocation's id. This and record_stream() throw std::invalid_argument unless a block that the program
  // holds begins there.
  int64_t free(uintptr_t address);
  void record_stream(uintptr_t address, StreamId stream);
  // Others take these bytes of the device, for good. Throws OutOfMemory.
  void take_outside(size_t bytes);
  size_t outside() const { return outside_; }
  // Of all pools that are in no use; of one private pool alone, if it is named and in no use.
  void empty_cache(PoolId only = kOwnPool);

  // Private pools. One exists from the first begin or retain on. From begin_allocate_to_pool() until
  // end_allocate_to_pool() it serves the allocations that `takes` says, by their stream; of several the last begun goes
  // first. Each begin and each retain is to be followed by a release. These throw std::invalid_argument for a pool
  // that is not in the state that they need.
  void begin_allocate_to_pool(PoolId id, std::function<bool(StreamId)> takes);
  void end_allocate_to_pool(PoolId id);
  // If `splits` is false, blocks are whole segments; if `lends`, the pool's free blocks serve what else is refused.
  void retain_pool(PoolId id, bool splits = true, bool lends = false);
  void release_pool(PoolId id);
  int users_of_pool(PoolId id) const;
  Checkpoint checkpoint(PoolId id);
  Restored restore(const Checkpoint& state);

  // The block held by the program that contains the address; null if there is none.
  const Block* find(uintptr_t address) const;

  // From now on; what is allocated stays as it is, and so does the memory fraction.
  void set_settings(AllocatorSettings settings) { settings_ = std::move(settings); }
  const AllocatorSettings& settings() const { return settings_; }
  // Limits what is reserved to a fraction of the device's memory, if that has a limit; 1 means no further one. Throws
  // std::invalid_argument for what is not between 0 and 1.
  void set_memory_fraction(double fraction);
  double memory_fraction() const;

  const Statistics& statistics() const { return statistics_; }
  void reset_peak_statistics() { statistics_.reset_peaks(); }
  void reset_accumulated_statistics() { statistics_.reset_accumulated(); }
  std::vector<SegmentInfo> snapshot(PoolId only = kOwnPool) const;  // by address; of all pools by default

 private:
  // Stream, size, the segment's serial number, address.
  using SizeKey = std::tuple<StreamId, size_t, int64_t, uintptr_t>;
  using BySize = std::map<SizeKey, Block*>;
  struct Pool {
    bool small;
    PoolId owner = kOwnPool;
    BySize cached = {};
    std::map<std::pair<StreamId, uintptr_t>, Block*> unmapped = {};
    int64_t searches = 0;
  };
  struct Pools {
    explicit Pools(PoolId id) : small{.small = true, .owner = id}, large{.small = false, .owner = id} {}
    Pool& of(bool is_small) { return is_small ? small : large; }
    Pool small, large;
    int users = 1;
    bool splits = true, lends = false;
  };
  struct Request {
    size_t bytes;         // as asked
    size_t size;          // of a block
    size_t segment_size;  // of a new segment
    StreamId stream;
    Pool& pool;
  };

  // Which block a request gets.
  Request request_for(size_t bytes, StreamId stream);
  Pools& pools_for(StreamId stream);
  size_t rounded(size_t bytes) const;
  Block* take_cached(const Request& request);
  BySize::iterator best_fit(const Request& request);
  bool acceptable(const Block& block, const Request& request) const;
  bool should_split(const Block& block, size_t size) const;
  Block& hand_out(Block& block, size_t bytes, size_t size, bool split);
  void count_handing_out(const Block& block, const Block* rest, bool was_split);

  // Blocks.
  Pool& pool_of(const Block& block) { return pools_.at(block.segment->owner).of(block.segment->small); }
  static SizeKey size_key(const Block& block);
  static bool is_split(const Block& block) { return block.size != block.segment->size; }
  Block* left_of(const Block& block);
  Block* right_of(const Block& block);
  Block& held_block(uintptr_t address, const char* action);
  Block& add_block(const Segment& segment, uintptr_t address, size_t size, BlockState state);
  Block& cut(Block& block, size_t size);
  Block& unite(Block& block);
  void put_in_pool(Block& block);
  void take_from_pool(const Block& block);

  // The way back into the pool.
  void recycle(Block& block);
  void defer(Block& block);
  void recycle_passed();
  void recycle_all_deferred(PoolId only = kOwnPool);
  void defer_from_captures();

  // Memory from the device.
  Block* take_from_device(const Request& request);
  Block* borrow(const Request& request);
  Block* grow(const Request& request);
  Block* grow_expandable(const Request& request);
  Block& expandable_room(const Request& request);
  Block& new_segment(const Request& request, size_t size, bool expandable);
  Block* map(Block& block, size_t size);
  bool has_room(size_t size) const;
  size_t unreserved() const;
  bool above_limit(size_t size) const;
  void count_reserved(const Segment& segment, int64_t delta);
  void reject_if_asked(const Request& request);
  OutOfMemory out_of_memory(size_t requested) const;

  // And back to it.
  bool collects_garbage() const;
  void collect_garbage();
  bool release_oversize(const Request& request);
  void release_cache();
  void release_unused_pools(PoolId only = kOwnPool);
  void release_cached(Pool& pool);
  void release(Block& block);
  void unmap(Block& block);
  void drop_segment(const Block& block);

  AllocatorSettings settings_;
  Progress& progress_;
  std::function<void(int64_t)> on_segment_;
  const size_t capacity_;
  size_t outside_ = 0;  // of the capacity, what others took
  const size_t device_total_;
  std::optional<size_t> limit_;

  AddressSpace addresses_;
  std::map<uintptr_t, Segment> segments_;
  std::map<uintptr_t, Block> blocks_;
  std::map<PoolId, Pools> pools_;
  Pools& own_;
  std::vector<std::pair<PoolId, std::function<bool(StreamId)>>> taking_;  // pools that take allocations, and which
  std::vector<Block*> freed_in_captures_;  // that streams still use, since no event can be recorded in a capture
  std::map<StreamId, std::deque<std::pair<int64_t, Block*>>> deferred_;  // tickets, in the order of free()
  int64_t last_id_ = 0;
  int64_t last_segment_ = 0;
  Statistics statistics_;
};

}  // namespace refshard
