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
// Where the page-locked block that begins here lies in the recording; 0 if none does. No other block ever has these
// addresses, since torch hands page-locked memory on only after all copies to and from it have ended.
int64_t page_locked_at(const void* address);
// Blocks by their address; they are in the recording.
void* allocate_block(size_t size, c10::DeviceIndex device, StreamId stream);
void free_block(void* address);
// Puts into the recording what the allocator did.
void note_allocated(const Block& block, int32_t site = 0);
void note_freed(const Block& block);

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
// The most bytes of integers that have their values in memory, for this thread from now on. Returns what it was.
size_t keep_values(size_t most);
size_t kept_values_limit();

// What is known of a storage's values. Unknown: they come from ones that were never computed. Assumed: they follow from
// a choice that an assumption made (routing.h). Real: they exist, though the storage is large. Chosen: they are a choice
// that nothing has used yet.
enum class Mark : uint8_t { Unknown = 1, Assumed = 2, Real = 4, Chosen = 8 };
bool marked(const at::Tensor& tensor, Mark mark);
void set_mark(const at::Tensor& tensor, Mark mark, bool on);
inline bool unknown(const at::Tensor& tensor) { return marked(tensor, Mark::Unknown); }
inline void set_unknown(const at::Tensor& tensor, bool on) { set_mark(tensor, Mark::Unknown, on); }
// Marks the block that holds this address, if any does, as unknown.
void forget_value(c10::DeviceIndex device, const void* address);
// What a float reads as that nobody has computed. No check has it as its boundary: it is a share, its logarithm, its
// inverse and what it lacks to 1 are finite and not 0, and bf16 and fp8 hold it exactly.
constexpr double kPlaceholder = 0.8125;

// Lets a storage hold `size` bytes, keeping what is there; a size of 0 gives its memory back.
void resize_storage(c10::StorageImpl& storage, size_t size);

}  // namespace refshard
