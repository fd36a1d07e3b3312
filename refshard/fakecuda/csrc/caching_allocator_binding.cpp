#include "caching_allocator_binding.h"

#include <pybind11/functional.h>

#include <memory>

namespace refshard {
namespace {

namespace py = pybind11;

py::dict stat_dict(const Stat& stat) {
  py::dict found;
  found["current"] = stat.current;
  found["peak"] = stat.peak;
  found["allocated"] = stat.allocated;
  found["freed"] = stat.freed;
  return found;
}

py::dict stat_dict(const PoolStat& stat) {
  py::dict found;
  found["all"] = stat_dict(stat[0]);
  found["small_pool"] = stat_dict(stat[1]);
  found["large_pool"] = stat_dict(stat[2]);
  return found;
}

const char* state_name(BlockState state) {
  if (state == BlockState::Allocated) return "active_allocated";
  return state == BlockState::Pending ? "active_pending_free" : "inactive";
}

py::tuple as_tuple(const Allocation& made) { return py::make_tuple(made.address, made.size, made.id); }

// Lets Python classes say how far streams have come.
class PythonProgress final : public Progress {
 public:
  int64_t position(StreamId stream) override { PYBIND11_OVERRIDE_PURE(int64_t, Progress, position, stream); }
  bool passed(StreamId stream, int64_t ticket) override {
    PYBIND11_OVERRIDE_PURE(bool, Progress, passed, stream, ticket);
  }
  void synchronise() override { PYBIND11_OVERRIDE_PURE(void, Progress, synchronise, ); }
};

void bind_settings(py::module_& m) {
  py::class_<AllocatorSettings>(m, "AllocatorSettings", py::module_local())
      .def_readonly("expandable_segments", &AllocatorSettings::expandable_segments)
      .def_readonly("large_segment_size", &AllocatorSettings::large_segment_size)
      .def_readonly("max_split_size", &AllocatorSettings::max_split_size)
      .def_readonly("max_non_split_rounding_size", &AllocatorSettings::max_non_split_rounding_size)
      .def_readonly("garbage_collection_threshold", &AllocatorSettings::garbage_collection_threshold)
      .def_readonly("per_process_memory_fraction", &AllocatorSettings::per_process_memory_fraction)
      .def_readonly("throw_on_cudamalloc_oom", &AllocatorSettings::throw_on_cudamalloc_oom)
      .def_readonly("roundup_power2_divisions", &AllocatorSettings::roundup_power2_divisions)
      .def("divisions", &AllocatorSettings::divisions);
  m.def("parse_allocator_settings", &parse_allocator_settings, py::arg("text"),
        py::arg("current") = AllocatorSettings());
}

std::unique_ptr<CachingAllocator> make_allocator(Progress& progress, uintptr_t base, size_t span, size_t capacity,
                                                 const std::string& settings, std::function<void(int64_t)> on_segment,
                                                 size_t device_total) {
  return std::make_unique<CachingAllocator>(base, span, capacity, parse_allocator_settings(settings), progress,
                                            std::move(on_segment), device_total);
}

py::object found_block(const CachingAllocator& allocator, uintptr_t address) {
  const auto* block = allocator.find(address);
  return block ? py::object(py::make_tuple(block->address, block->size, block->id)) : py::none();
}

void set_settings(CachingAllocator& allocator, const std::string& text) {
  allocator.set_settings(parse_allocator_settings(text, allocator.settings()));
}

std::vector<uintptr_t> addresses(const std::vector<Block>& blocks) {
  std::vector<uintptr_t> found;
  for (const auto& block : blocks) found.push_back(block.address);
  return found;
}

void bind_allocator(py::module_& m) {
  py::class_<Checkpoint>(m, "Checkpoint", py::module_local());
  py::class_<Progress, PythonProgress>(m, "Progress", py::module_local()).def(py::init<>());
  py::class_<CachingAllocator>(m, "CachingAllocator", py::module_local())
      .def(py::init(&make_allocator), py::keep_alive<1, 2>(), py::arg("progress"), py::kw_only(), py::arg("base"),
           py::arg("span"), py::arg("capacity") = 0, py::arg("settings") = "",
           py::arg("on_segment") = std::function<void(int64_t)>(), py::arg("device_total") = 0)
      .def("allocate", [](CachingAllocator& self, size_t size, StreamId stream) {
        return as_tuple(self.allocate(size, stream));
      })
      .def("free", &CachingAllocator::free)
      .def("record_stream", &CachingAllocator::record_stream)
      .def("take_outside", &CachingAllocator::take_outside)
      .def("empty_cache", &CachingAllocator::empty_cache, py::arg("only") = kOwnPool)
      .def("begin_allocate_to_pool", &CachingAllocator::begin_allocate_to_pool)
      .def("end_allocate_to_pool", &CachingAllocator::end_allocate_to_pool)
      .def("retain_pool", &CachingAllocator::retain_pool, py::arg("id"), py::arg("splits") = true,
           py::arg("lends") = false)
      .def("release_pool", &CachingAllocator::release_pool)
      .def("users_of_pool", &CachingAllocator::users_of_pool)
      .def("checkpoint", &CachingAllocator::checkpoint)
      .def("restore", [](CachingAllocator& self, const Checkpoint& state) {
        const auto found = self.restore(state);
        return py::make_tuple(addresses(found.freed), addresses(found.held));
      })
      .def("find", &found_block)
      .def("set_settings", &set_settings)
      .def_property("memory_fraction", &CachingAllocator::memory_fraction, &CachingAllocator::set_memory_fraction)
      .def("statistics", [](const CachingAllocator& self) { return as_dict(self.statistics()); })
      .def("reset_peak_statistics", &CachingAllocator::reset_peak_statistics)
      .def("reset_accumulated_statistics", &CachingAllocator::reset_accumulated_statistics)
      .def("snapshot", &CachingAllocator::snapshot, py::arg("only") = kOwnPool);
}

}  // namespace

py::dict as_dict(const Statistics& from) {
  py::dict found;
  found["allocation"] = stat_dict(from.allocation);
  found["segment"] = stat_dict(from.segment);
  found["active"] = stat_dict(from.active);
  found["inactive_split"] = stat_dict(from.inactive_split);
  found["allocated_bytes"] = stat_dict(from.allocated_bytes);
  found["reserved_bytes"] = stat_dict(from.reserved_bytes);
  found["active_bytes"] = stat_dict(from.active_bytes);
  found["inactive_split_bytes"] = stat_dict(from.inactive_split_bytes);
  found["requested_bytes"] = stat_dict(from.requested_bytes);
  py::dict by_pool;
  for (const auto& [id, stat] : from.reserved_bytes_by_private_pools) by_pool[py::cast(id)] = stat_dict(stat);
  found["reserved_bytes_by_private_pools"] = by_pool;
  found["oversize_allocations"] = stat_dict(from.oversize_allocations);
  found["oversize_segments"] = stat_dict(from.oversize_segments);
  found["num_alloc_retries"] = from.num_alloc_retries;
  found["num_ooms"] = from.num_ooms;
  found["num_oom_rejections"] = from.num_oom_rejections;
  found["num_sync_all_streams"] = from.num_sync_all_streams;
  found["num_device_alloc"] = from.num_device_alloc;
  found["num_device_free"] = from.num_device_free;
  found["max_split_size"] = from.max_split_size;
  return found;
}

py::dict as_dict(const SegmentInfo& from) {
  py::list blocks;
  for (const auto& block : from.blocks) {
    py::dict found;
    found["address"] = block.address;
    found["size"] = block.size;
    found["requested_size"] = block.requested_size;
    found["state"] = state_name(block.state);
    found["frames"] = py::list();
    blocks.append(found);
  }
  py::dict found;
  found["address"] = from.address;
  found["total_size"] = from.total_size;
  found["allocated_size"] = from.allocated_size;
  found["active_size"] = from.active_size;
  found["requested_size"] = from.requested_size;
  found["stream"] = from.stream;
  found["segment_type"] = from.small ? "small" : "large";
  found["segment_pool_id"] = py::cast(from.pool);
  found["is_expandable"] = from.expandable;
  found["frames"] = py::list();
  found["blocks"] = blocks;
  return found;
}

void bind_caching_allocator(py::module_& m) {
  bind_settings(m);
  bind_allocator(m);
  static py::handle out_of_memory = py::exception<OutOfMemory>(m, "OutOfMemory", PyExc_MemoryError).release();
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const OutOfMemory& error) {
      PyErr_SetString(out_of_memory.ptr(), error.message(0).c_str());
    }
  });
}

}  // namespace refshard
