// The part of NVIDIA's driver (libcuda.so.1) that torch calls to load and launch kernels, for the fake CUDA device in
// host-compute mode. The kernels of an emulated collective run on the host, in the host's memory, when they are launched.
// Their clock stands still until one of them waits: it then shows the end that was waited for.
//
// Each launch is a line in the file that FAKE_DRIVER_LOG names.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

using Number = unsigned long long;

enum Status { SUCCESS = 0, INVALID_IMAGE = 200, NOT_FOUND = 500 };

std::mutex mutex;
Number now = 1000000;

template <typename T>
T argument(void** arguments, int index) {
  return *static_cast<T*>(arguments[index]);
}

void start(void** arguments) {
  auto* free_at = argument<Number*>(arguments, 0) + argument<int>(arguments, 2);
  *free_at = std::max(*free_at, now) + 10ull * argument<int>(arguments, 3);
  *argument<Number*>(arguments, 1) = *free_at + 10ull * argument<int>(arguments, 4);
}

void hold(void** arguments) {
  const auto end = *argument<Number*>(arguments, 0);
  auto* counts = argument<Number*>(arguments, 1);
  counts[0] += 1;
  if (now > end) {
    counts[1] += 1;
    counts[2] += now - end;
  }
  now = std::max(now, end);
}

struct Kernel {
  std::string name;
  void (*run)(void**);
};

std::map<std::string, Kernel> kernels = {
    {"refshard_emulated_start", {"start", start}},
    {"refshard_emulated_hold", {"hold", hold}},
};

}  // namespace

extern "C" {

int cuGetErrorString(int status, const char** message) {
  *message = status == INVALID_IMAGE ? "no binary for a GPU" : status == NOT_FOUND ? "no such kernel" : "no error";
  return SUCCESS;
}

int cuModuleLoadData(void** module, const void* image) {
  *module = const_cast<void*>(image);
  return std::memcmp(image, "\177ELF", 4) ? INVALID_IMAGE : SUCCESS;
}

int cuModuleGetFunction(void** function, void*, const char* name) {
  const auto found = kernels.find(name);
  if (found == kernels.end()) return NOT_FOUND;
  *function = &found->second;
  return SUCCESS;
}

int cuLaunchKernel(void* function, unsigned grid, unsigned, unsigned, unsigned block, unsigned, unsigned, unsigned,
                   void* stream, void** arguments, void**) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto* kernel = static_cast<Kernel*>(function);
  kernel->run(arguments);
  if (const char* path = std::getenv("FAKE_DRIVER_LOG")) {
    std::FILE* log = std::fopen(path, "a");
    std::fprintf(log, "%s %u %u %s\n", kernel->name.c_str(), grid, block, stream ? "side" : "default");
    std::fclose(log);
  }
  return SUCCESS;
}

}
