// Sizes by which the allocator decides, in bytes; from torch 2.13's c10/core/AllocatorConfig.h.
#pragma once

#include <cstddef>

namespace refshard::allocator_sizes {

constexpr size_t kMebibyte = size_t{1} << 20;
constexpr size_t kUnit = 512;                     // every block is a multiple of it, unless rounded otherwise
constexpr size_t kLargestSmall = 1 * kMebibyte;   // larger requests go to the large pool
constexpr size_t kSmallSegment = 2 * kMebibyte;   // of the small pool; the size of its pages if expandable
constexpr size_t kLeastUnshared = 10 * kMebibyte; // requests from this size on get a segment of their own ...
constexpr size_t kUnsharedUnit = 2 * kMebibyte;   // ... rounded up to this
constexpr size_t kTooLarge = size_t{1} << 60;     // requests that torch refuses outright
constexpr size_t kUnlimitedMemory = size_t{128} << 30;  // by which a device without limit sizes expandable segments
constexpr size_t kMostAddresses = size_t{512} << 30;  // of an expandable segment; 9/8 of any GPU's memory is less

constexpr size_t round_down(size_t bytes, size_t unit) { return bytes / unit * unit; }
constexpr size_t round_up(size_t bytes, size_t unit) { return round_down(bytes + unit - 1, unit); }

}  // namespace refshard::allocator_sizes
