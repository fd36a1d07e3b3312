// Device memory as torch sees it: the allocator of the device type CUDA, and the host's pinned memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <string_view>

#include "device.h"

namespace refshard {

// The allocator that torch asks for CUDA memory, by the current device and stream.
c10::DeviceAllocator& device_allocator();
// Page-locked host memory: plain host memory whose addresses are known.
c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

// Says for whom this thread allocates, as long as it lives.
class Allocating {
 public:
  Allocating(std::string_view operator_name, Category category = Category::Other);
  ~Allocating();
  Allocating(const Allocating&) = delete;

 private:
  std::string_view name_before_;
  Category category_before_;
};

// The block that holds this address; -1 if none does.
int64_t block_at(c10::DeviceIndex device, const void* address);
// Once freed, the block waits until `stream` has passed what it is asked now; record_stream() says so in the recording.
void keep_until_passed(c10::DeviceIndex device, const void* address, StreamId stream);
void record_stream(c10::DeviceIndex device, const void* address, StreamId stream);

// Whether the tensor's bytes exist. In host compute all do. In a dry run those of small tensors do, since frameworks read
// counts, shapes and flags back, and compute with integers what they then do; and those that are marked as real.
bool resident(const at::Tensor& tensor);

// What is known of a storage's values. Unknown: they come from ones that were never computed. Assumed: they follow from
// a choice that an assumption made (routing.h). Real: they exist, though the storage is large. Chosen: they are a choice
// that nothing has used yet.
enum class Mark : uint8_t { Unknown = 1, Assumed = 2, Real = 4, Chosen = 8 };
bool marked(const at::Tensor& tensor, Mark mark);
void set_mark(const at::Tensor& tensor, Mark mark, bool on);
inline bool unknown(const at::Tensor& tensor) { return marked(tensor, Mark::Unknown); }
inline void set_unknown(const at::Tensor& tensor, bool on) { set_mark(tensor, Mark::Unknown, on); }

// Lets a storage hold `size` bytes, keeping what is there; a size of 0 gives its memory back.
void resize_storage(c10::StorageImpl& storage, size_t size);

}  // namespace refshard
