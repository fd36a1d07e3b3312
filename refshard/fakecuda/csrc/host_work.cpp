#include "host_work.h"

#include <Python.h>
#include <frameobject.h>

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <string_view>
#include <unordered_map>

namespace refshard {
namespace {

std::atomic<int32_t> operators{0}, dispatched{0}, nodes{0}, calls{0};
thread_local int stand_ins = 0;

// Python code that watches the script or stands in for torch's CUDA build: it does not run on a real device.
bool is_ours(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, bool>;  // used under Python's lock only
  const auto [found, fresh] = known->try_emplace(code, false);
  if (fresh) {
    Py_INCREF(code);  // keeps its address from being used again
    const char* text = PyUnicode_AsUTF8(code->co_filename);
    if (!text) PyErr_Clear();
    const std::string_view path = text ? text : "";
    found->second = path.find("/refshard/dryrun/") != path.npos || path.find("/refshard/fakecuda/") != path.npos;
  }
  return found->second;
}

int on_call(PyObject*, PyFrameObject* frame, int what, PyObject*) {
  if (what != PyTrace_CALL || stand_ins) return 0;
  auto* code = PyFrame_GetCode(frame);
  if (!is_ours(code)) ++calls;
  Py_DECREF(code);
  return 0;
}

void count_calls_of_this_thread() {
  const auto lock = PyGILState_Ensure();
  PyEval_SetProfile(on_call, nullptr);
  PyGILState_Release(lock);
}

std::unique_ptr<at::ObserverContext> on_function(const at::RecordFunction& function) {
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    ++nodes;
    thread_local bool counts_calls = false;
    if (!counts_calls && Py_IsInitialized()) {
      counts_calls = true;
      count_calls_of_this_thread();
    }
  } else if (!stand_ins && !std::string_view(function.name()).starts_with("autograd::engine::")) {  // a node's frame
    ++operators;
    if (c10::impl::TorchDispatchModeTLS::stack_len()) ++dispatched;
  }
  return nullptr;
}

}  // namespace

void count_host_work() {
  at::addGlobalCallback(at::RecordFunctionCallback(on_function)
                            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  count_calls_of_this_thread();
}

HostWork take_host_work() {
  return {operators.exchange(0), dispatched.exchange(0), nodes.exchange(0), calls.exchange(0)};
}

StandIn::StandIn() { ++stand_ins; }
StandIn::~StandIn() { --stand_ins; }

}  // namespace refshard
