// Addresses of the device: which are taken, and which are free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>

namespace refshard {

// Hands out the lowest range that fits, and takes ranges back for others. Sizes are rounded up to 2 MiB, the size of
// the device's pages. Where a real driver puts segments is not known; torch's choices do not depend on it.
class AddressSpace {
 public:
  AddressSpace(uintptr_t base, size_t span) : free_{{base, span}} {}

  uintptr_t take(size_t size) {
    size = whole_pages(size);
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      const auto [address, free] = *range;
      if (free < size) continue;
      free_.erase(range);
      if (free > size) free_[address + size] = free - size;
      return address;
    }
    throw std::runtime_error("the fake device has no " + std::to_string(size) + " addresses in a row left; each "
                             "expandable segment takes 9/8 of the device's memory: use fewer streams, or set "
                             "PYTORCH_ALLOC_CONF=expandable_segments:False");
  }

  void give_back(uintptr_t address, size_t size) {
    auto range = free_.emplace(address, whole_pages(size)).first;
    if (const auto next = std::next(range); next != free_.end() && end_of(*range) == next->first) {
      range->second += next->second;
      free_.erase(next);
    }
    if (range == free_.begin()) return;
    if (const auto before = std::prev(range); end_of(*before) == range->first) {
      before->second += range->second;
      free_.erase(range);
    }
  }

 private:
  static constexpr size_t kPage = size_t{2} << 20;
  static size_t whole_pages(size_t size) { return (size + kPage - 1) / kPage * kPage; }
  static uintptr_t end_of(const std::pair<const uintptr_t, size_t>& range) { return range.first + range.second; }

  std::map<uintptr_t, size_t> free_;  // size by address; no two adjoin
};

}  // namespace refshard
