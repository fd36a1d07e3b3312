// The allocator's face to Python, and how its figures look there: as those of torch._C._cuda_memoryStats() and
// torch._C._cuda_memorySnapshot(). Needs pybind11 alone, not torch.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "caching_allocator.h"

namespace refshard {

// Defines CachingAllocator, Progress (to be derived from), AllocatorSettings, parse_allocator_settings() and the
// exception OutOfMemory.
void bind_caching_allocator(pybind11::module_& module);

pybind11::dict as_dict(const Statistics& statistics);
pybind11::dict as_dict(const SegmentInfo& segment);

}  // namespace refshard

// Functions that return statistics or segments return dictionaries to Python.
namespace pybind11::detail {

template <>
struct type_caster<refshard::Statistics> {
  PYBIND11_TYPE_CASTER(refshard::Statistics, const_name("dict"));
  bool load(handle, bool) { return false; }
  static handle cast(const refshard::Statistics& statistics, return_value_policy, handle) {
    return refshard::as_dict(statistics).release();
  }
};

template <>
struct type_caster<refshard::SegmentInfo> {
  static constexpr auto name = const_name("dict");
  static handle cast(const refshard::SegmentInfo& segment, return_value_policy, handle) {
    return refshard::as_dict(segment).release();
  }
};

}  // namespace pybind11::detail
