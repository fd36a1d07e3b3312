// Choices from values that were not computed: which experts a token goes to, for one. An assumption makes them, and what
// follows from them is computed. docs/explanation/dryrun.md says what is assumed.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace refshard {

struct Routing {
  enum class Rule { Balanced, Zipf, Worst } rule = Rule::Balanced;
  double exponent = 0;  // of Zipf
  // Worst: experts lie on `ranks` ranks, each with as many, and all tokens go to those of `rank` first.
  int64_t rank = 0, ranks = 1;
};
void set_routing(const Routing& routing);

// What an operator is about to choose: out of `from` places, along a dimension of its first argument (none: over all).
struct Choosing {
  int64_t from;
  std::optional<int64_t> dim;
  enum class Gives { Some, Order, ZerosAndOnes } gives = Gives::Some;
};
// Nothing if the operator chooses nothing.
std::optional<Choosing> choosing(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first);

// Gives an operator's result the places that the assumption chooses, or nothing if it is of too many bytes.
void assume(std::string_view name, const Choosing& choosing, const at::Tensor& result);
// The choices of `count` places out of `from` for each of `rows`, without a place twice in a row.
std::vector<int64_t> chosen(const Routing& routing, int64_t rows, int64_t from, int64_t count);

// Whether an operator on assumed values gives this result values too: it must not take too long.
bool worth_computing(const at::Tensor& tensor);
size_t most_bytes(bool integers);
// An operator, a copy or a collective uses these values: if they are a choice, the answer names it.
void note_use(const at::Tensor& tensor);
// The host has read these values, or the size of a tensor depends on them. It counts if a module has chosen any.
void note_read(const at::Tensor& tensor);
// Ranks have exchanged values that follow from a choice.
void note_exchange(int64_t rank, int64_t ranks);

// For the answer. By operator and module: `count` of `from`, and how often.
using Choice = std::tuple<std::string, std::string, int64_t, int64_t, int64_t>;
struct Assumed {
  std::vector<Choice> choices;
  bool read = false;
  int64_t rank = 0, ranks = 1;  // in the group of the first exchange
};
Assumed assumed_so_far();

}  // namespace refshard
