// What the choice of kernels depends on: the GPU, and the CUDA libraries that torch's CUDA build of this version comes
// with.
#pragma once

#include <string>

namespace refshard {

struct Capability {
  std::string name = "NVIDIA H100 80GB HBM3";
  int major = 9, minor = 0;  // compute capability
  int multiprocessors = 132;
  bool cudnn = true;
  int cudnn_version = 92000;  // as cudnnGetVersion(); torch 2.13 for CUDA 13.0 requires nvidia-cudnn-cu13 9.20.0
  int cuda_version = 13000;   // as CUDA_VERSION: 12060 for CUDA 12.6

  int number() const { return major * 10 + minor; }
  // Inclusive, by compute capability: between(80, 121) for 8.0 to 12.1.
  bool between(int least, int most) const { return number() >= least && number() <= most; }

  // From the table of technical specifications per compute capability in the CUDA C++ Programming Guide.
  int threads_per_multiprocessor() const {
    if (number() == 75) return 1024;
    return number() == 86 || number() == 87 || number() == 89 || major == 12 ? 1536 : 2048;
  }
  // Bytes of shared memory that one block may ask for.
  int shared_memory_per_block() const {
    switch (number()) {
      case 70: case 72: return 96 << 10;
      case 75: return 64 << 10;
      case 80: case 87: return 163 << 10;
      case 86: case 89: case 120: case 121: return 99 << 10;
      default: return major >= 9 ? 227 << 10 : 48 << 10;
    }
  }
};

}  // namespace refshard
