#include "guard.h"

namespace refshard {

const Guard& guard() {
  static const Guard instance;
  return instance;
}

}  // namespace refshard

namespace c10::impl {
using RefshardGuard = refshard::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, RefshardGuard)
}  // namespace c10::impl
