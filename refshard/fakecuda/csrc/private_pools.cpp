// Private pools of the caching allocator: who allocates from them, and how they are set back to an earlier state.
#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "caching_allocator.h"

namespace refshard {
namespace {

[[noreturn]] void refuse(const char* call, PoolId id, const char* why) {
  std::ostringstream text;
  text << call << ": the memory pool (" << id.first << ", " << id.second << ") " << why;
  throw std::invalid_argument(text.str());
}

}  // namespace

void CachingAllocator::begin_allocate_to_pool(PoolId id, std::function<bool(StreamId)> takes) {
  for (const auto& [other, its] : taking_) {
    if (other == id) refuse("beginAllocateToPool", id, "takes allocations already");
  }
  retain_pool(id);
  taking_.emplace_back(id, std::move(takes));
}

void CachingAllocator::end_allocate_to_pool(PoolId id) {
  const auto is_it = [&](const auto& one) { return one.first == id; };
  if (!std::erase_if(taking_, is_it)) refuse("endAllocateToPool", id, "takes no allocations");
}

void CachingAllocator::retain_pool(PoolId id, bool splits, bool lends) {
  const auto [found, fresh] = pools_.try_emplace(id, id);
  if (fresh) {
    found->second.splits = splits;
    found->second.lends = lends;
  } else if (!found->second.users) {
    refuse("createOrIncrefPool", id, "has been released; keep one of its graphs, or its MemPool, alive");
  } else {
    ++found->second.users;
  }
}

void CachingAllocator::release_pool(PoolId id) {
  if (!users_of_pool(id)) refuse("releasePool", id, "has been released before");
  --pools_.at(id).users;
}

int CachingAllocator::users_of_pool(PoolId id) const {
  const auto found = pools_.find(id);
  if (found == pools_.end() || id == kOwnPool) refuse("getPoolUseCount", id, "does not exist");
  return found->second.users;
}

Checkpoint CachingAllocator::checkpoint(PoolId id) {
  if (!users_of_pool(id)) refuse("getCheckpointState", id, "has been released");
  defer_from_captures();
  Checkpoint found{id, {}};
  const Segment* before = nullptr;
  for (const auto& [address, block] : blocks_) {
    if (block.segment->owner != id) continue;
    if (std::exchange(before, block.segment) != block.segment) found.segments.emplace_back();
    found.segments.back().push_back({address, block.size, block.requested_size, block.state});
  }
  return found;
}

// As torch does it, for the statistics: frees all that the pool has, hands out every block of the checkpoint and frees
// those that were free. Segments that came later stay, free.
Restored CachingAllocator::restore(const Checkpoint& state) {
  if (!users_of_pool(state.pool)) refuse("setCheckpointPoolState", state.pool, "has been released");
  Restored found;
  for (const auto& [address, block] : blocks_) {
    if (block.segment->owner == state.pool && block.state == BlockState::Allocated) found.freed.push_back(block);
  }
  for (const auto& block : found.freed) free(block.address);
  const auto id_before = [&](const Block& block) {
    for (const auto& one : found.freed) {
      if (one.address == block.address && one.size == block.size) return one.id;
    }
    return block.id;
  };
  for (const auto& segment : state.segments) {
    for (const auto& wanted : segment) {
      if (wanted.state == BlockState::Unmapped) continue;
      auto& block = blocks_.at(wanted.address);
      take_from_pool(block);
      hand_out(block, wanted.size, wanted.size, block.size > wanted.size);
    }
    for (const auto& wanted : segment) {
      if (wanted.state == BlockState::Allocated) {
        auto& block = blocks_.at(wanted.address);
        block.id = id_before(block);
        found.held.push_back(block);
      } else if (wanted.state != BlockState::Unmapped) {
        free(wanted.address);
      }
    }
  }
  return found;
}

}  // namespace refshard
