// torch's caching allocator of CUDA memory, simulated: which block each request gets, and when memory is taken from the
// device or given back, as in torch 2.13 (c10/cuda/CUDACachingAllocator.cpp). It hands out addresses and touches no
// memory. Private pools, CUDA graphs and sharing between processes are left out.
//
// Terms. A *segment* is memory taken from the device by one cudaMalloc, or, if expandable, a long range of addresses to
// which pages are mapped as needed. *Blocks* tile each segment. Small requests (up to 1 MiB) and large ones have a pool
// each, and no block changes stream.
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
  bool rejected = false;          // by throw_on_cudamalloc_oom, before anything was tried

  std::string message(int device_index) const;  // torch's text
  const char* what() const noexcept override { return "CUDA out of memory"; }
};

struct Segment {
  int64_t serial;  // in the order of their making
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
  StreamId stream;
  bool small;
  bool expandable;
  size_t total_size = 0;
  size_t allocated_size = 0;
  size_t active_size = 0;
  size_t requested_size = 0;
  std::vector<BlockInfo> blocks = {};
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
  void empty_cache();

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
  std::vector<SegmentInfo> snapshot() const;  // by address

 private:
  // Stream, size, the segment's serial number, address.
  using SizeKey = std::tuple<StreamId, size_t, int64_t, uintptr_t>;
  using BySize = std::map<SizeKey, Block*>;
  struct Pool {
    bool small;
    BySize cached = {};
    std::map<std::pair<StreamId, uintptr_t>, Block*> unmapped = {};
    int64_t searches = 0;
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
  size_t rounded(size_t bytes) const;
  Block* take_cached(const Request& request);
  BySize::iterator best_fit(const Request& request);
  bool acceptable(const Block& block, const Request& request) const;
  bool should_split(const Block& block, size_t size) const;
  Allocation hand_out(Block& block, const Request& request);
  void count_handing_out(const Block& block, const Block* rest, bool was_split);

  // Blocks.
  Pool& pool_of(const Block& block) { return block.segment->small ? small_ : large_; }
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
  void recycle_all_deferred();

  // Memory from the device.
  Block* take_from_device(const Request& request);
  Block* grow(const Request& request);
  Block* grow_expandable(const Request& request);
  Block& expandable_room(const Request& request);
  Block& new_segment(const Request& request, size_t size, bool expandable);
  Block* map(Block& block, size_t size);
  bool has_room(size_t size) const;
  bool above_limit(size_t size) const;
  void count_reserved(bool small, int64_t delta);
  void reject_if_asked(const Request& request);
  OutOfMemory out_of_memory(const Request& request) const;

  // And back to it.
  bool collects_garbage() const;
  void collect_garbage();
  bool release_oversize(const Request& request);
  void release_cache();
  void release_pool(Pool& pool);
  void release(Block& block);
  void unmap(Block& block);
  void drop_segment(const Block& block);

  AllocatorSettings settings_;
  Progress& progress_;
  std::function<void(int64_t)> on_segment_;
  const size_t capacity_;
  const size_t device_total_;
  std::optional<size_t> limit_;

  AddressSpace addresses_;
  std::map<uintptr_t, Segment> segments_;
  std::map<uintptr_t, Block> blocks_;
  Pool small_{.small = true};
  Pool large_{.small = false};
  std::map<StreamId, std::deque<std::pair<int64_t, Block*>>> deferred_;  // tickets, in the order of free()
  int64_t last_id_ = 0;
  int64_t last_segment_ = 0;
  Statistics statistics_;
};

}  // namespace refshard
