#pragma once

#include <pybind11/pybind11.h>

namespace refshard {

// Capability; which attention kernel is chosen and why not another; what memory kernels take for themselves. All on
// plain values.
void bind_attention_choice(pybind11::module_& module);

}  // namespace refshard
