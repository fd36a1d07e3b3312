#include "routing.h"

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

#include "memory.h"
#include "recorder.h"
#include "translation.h"

namespace refshard {
namespace {

// More experts than any model has. What chooses from more takes the likeliest token of a vocabulary, and no size
// depends on it.
constexpr int64_t kMostExperts = 8192;
// Above this, the values that follow from a choice take longer to compute than they are worth.
constexpr size_t kMostIntegers = size_t{256} << 20;
constexpr size_t kMostFloats = size_t{64} << 20;
// Where lengths vary from batch to batch, of which the choices are kept.
constexpr size_t kMostShapes = 64;

auto& routing_mutex = *new std::mutex;
auto& routing_now = *new Routing;
using ChoiceKey = std::tuple<int32_t, int32_t, int64_t, int64_t>;  // operator, module, count, from
auto& choices_made = *new std::map<ChoiceKey, int64_t>;
// By address of the storage. Others may never be used: max() gives places too, of which most callers take none.
auto& choices_unused = *new std::map<const void*, ChoiceKey>;
auto& noted = *new Assumed;
// A script that takes the likeliest class outside its modules counts how often it is right.
bool model_chooses = false;

// Each choice of a kind is the same: what is recomputed in backward must have the sizes that it had in forward.
auto& values_made = *new std::map<std::tuple<Choosing::Gives, int64_t, int64_t, int64_t>, at::Tensor>;

// The numbers from 0 on, in an order that is the same each time.
std::vector<int64_t> shuffled(int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(count);
  for (auto left = count; left > 1; --left) {
    std::swap(order[static_cast<size_t>(left - 1)], order[random() % static_cast<uint64_t>(left)]);
  }
  return order;
}

// How many rows choose each place: by its weight, at most once a row, in all `count` a row.
std::vector<int64_t> shares(const std::vector<double>& weights, int64_t rows, int64_t count) {
  const auto most = static_cast<double>(rows);
  std::vector<double> wanted(weights.size());
  std::vector<bool> full(weights.size());
  for (bool again = true; again;) {
    double left = most * static_cast<double>(count), weight = 0;
    for (size_t i = 0; i < weights.size(); ++i) full[i] ? left -= most : weight += weights[i];
    again = false;
    for (size_t i = 0; i < weights.size(); ++i) {
      wanted[i] = full[i] ? most : left * weights[i] / weight;
      if (wanted[i] > most) again = full[i] = true;
    }
  }
  std::vector<int64_t> given(weights.size());
  int64_t left = rows * count;
  for (size_t i = 0; i < weights.size(); ++i) left -= given[i] = static_cast<int64_t>(wanted[i]);
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return wanted[a] - std::floor(wanted[a]) > wanted[b] - std::floor(wanted[b]);
  });
  for (size_t i = 0; left > 0; i = (i + 1) % order.size()) {
    if (given[order[i]] == rows) continue;
    ++given[order[i]];
    --left;
  }
  return given;
}

int64_t first_of_rank(const Routing& routing, int64_t from) { return routing.rank * from / routing.ranks; }

// Each row begins with the place that it would choose alone, and goes on from there.
std::vector<int64_t> in_order(const Routing& routing, int64_t rows, int64_t from, int64_t count) {
  std::vector<int64_t> made;
  made.reserve(static_cast<size_t>(rows * count));
  for (const auto start : chosen(routing, rows, from, 1)) {
    for (int64_t i = 0; i < count; ++i) made.push_back((start + i) % from);
  }
  return made;
}

at::Tensor values_for(const Choosing& choosing, const Routing& routing, int64_t rows, int64_t count) {
  std::lock_guard guard(routing_mutex);
  if (values_made.size() > kMostShapes) values_made.clear();
  auto& values = values_made[{choosing.gives, rows, choosing.from, count}];
  if (values.defined()) return values;
  if (choosing.gives == Choosing::Gives::ZerosAndOnes) {
    const bool all = routing.rule == Routing::Rule::Worst;
    values = all ? at::ones({rows, count}, at::kLong) : at::arange(rows * count).remainder(2).view({rows, count});
  } else {
    const bool order = choosing.gives == Choosing::Gives::Order;
    const auto list = (order ? in_order : chosen)(routing, rows, choosing.from, count);
    values = at::tensor(list, at::kLong).view({rows, count});
  }
  return values;
}

}  // namespace

void set_routing(const Routing& routing) {
  std::lock_guard guard(routing_mutex);
  routing_now = routing;
  values_made.clear();
}

std::optional<Choosing> choosing(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  const std::string_view name = op.schema().name(), overload = op.schema().overload_name();
  const auto along = [&](const c10::IValue& dim, Choosing::Gives gives) -> Choosing {
    const auto& tensor = stack[first].toTensor();
    if (!dim.isInt()) return {tensor.numel(), std::nullopt, gives};
    const auto wrapped = at::maybe_wrap_dim(dim.toInt(), tensor.dim());
    return {tensor.dim() ? tensor.size(wrapped) : 1, wrapped, gives};
  };
  const bool stable = overload.starts_with("stable") || overload.starts_with("values_stable");
  if (name == "aten::topk") return along(stack[first + 2], Choosing::Gives::Some);
  if (name == "aten::argmax" || name == "aten::argmin") return along(stack[first + 1], Choosing::Gives::Some);
  if (name == "aten::max" || name == "aten::min") {
    if (!overload.starts_with("dim")) return std::nullopt;
    return along(stack[first + 1], Choosing::Gives::Some);
  }
  if (name == "aten::sort") return along(stack[first + (stable ? 2 : 1)], Choosing::Gives::Order);
  if (name == "aten::multinomial") return along(int64_t{-1}, Choosing::Gives::Some);
  const bool own = name == "aten::bernoulli" && (overload.empty() || overload == "out");
  if (own || (name == "aten::bernoulli_" && overload == "Tensor")) {
    return Choosing{2, std::nullopt, Choosing::Gives::ZerosAndOnes};
  }
  return std::nullopt;
}

std::vector<int64_t> chosen(const Routing& routing, int64_t rows, int64_t from, int64_t count) {
  std::vector<int64_t> made(static_cast<size_t>(rows * count));
  if (routing.rule == Routing::Rule::Worst) {
    const auto start = first_of_rank(routing, from);
    for (size_t i = 0; i < made.size(); ++i) {
      made[i] = (start + static_cast<int64_t>(i) % count) % from;
    }
    return made;
  }
  std::vector<double> weights(static_cast<size_t>(from), 1.0);
  if (routing.rule == Routing::Rule::Zipf) {
    for (size_t i = 0; i < weights.size(); ++i) weights[i] = std::pow(static_cast<double>(i + 1), -routing.exponent);
  }
  // Places lie one after the other, each as often as it is chosen, and are dealt to the rows in turn. As none is there
  // more often than there are rows, no row gets one twice. Rows and places are shuffled, so that each part of the rows
  // has about the shares of the whole, and a row's places have nothing to do with each other.
  const auto given = shares(weights, rows, count);
  const auto row_order = shuffled(rows);
  int64_t dealt = 0;
  for (const auto place : shuffled(from)) {
    for (int64_t i = 0; i < given[static_cast<size_t>(place)]; ++i, ++dealt) {
      made[static_cast<size_t>(row_order[static_cast<size_t>(dealt % rows)] * count + dealt / rows)] = place;
    }
  }
  return made;
}

void assume(std::string_view name, const Choosing& choosing, const at::Tensor& result) {
  if (!result.numel() || !worth_computing(result)) return set_mark(result, Mark::Unknown, true);
  if (!resident(result)) set_mark(result, Mark::Real, true);
  const bool places = choosing.gives != Choosing::Gives::ZerosAndOnes;
  const bool several = name == "aten::topk" || name == "aten::sort" || name == "aten::multinomial";
  const bool along = places && several && result.dim() > 0;
  auto host = on_host(result);
  const auto rows_last = along ? host.movedim(*choosing.dim, -1) : host;
  const auto count = along ? rows_last.size(-1) : 1;
  const auto rows = result.numel() / count;
  const bool repeats = count > choosing.from;  // multinomial with replacement
  const auto values = repeats ? values_for(choosing, routing_now, rows * count, 1) : values_for(choosing, routing_now, rows, count);
  rows_last.copy_(values.view(rows_last.sizes()));
  set_mark(result, Mark::Unknown, false);
  set_mark(result, Mark::Assumed, choosing.from <= kMostExperts);
  set_mark(result, Mark::Chosen, true);
  const auto operator_code = recorder().names.code(name);
  std::lock_guard guard(routing_mutex);
  choices_unused[result.storage().data()] = {operator_code, recorder().place().module, count, choosing.from};
}

void note_use(const at::Tensor& tensor) {
  // A backward of max() uses the places too, to tell what its gradient belongs to.
  if (!marked(tensor, Mark::Chosen) || recorder().place().phase == Phase::Backward) return;
  set_mark(tensor, Mark::Chosen, false);
  std::lock_guard guard(routing_mutex);
  const auto& key = choices_unused.at(tensor.storage().data());
  ++choices_made[key];
  model_chooses = model_chooses || std::get<1>(key) != 0;
}

size_t most_bytes(bool integers) { return integers ? kMostIntegers : kMostFloats; }

bool worth_computing(const at::Tensor& tensor) {
  const auto size = static_cast<size_t>(tensor.storage().nbytes());
  return size <= most_bytes(c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true));
}

void note_read(const at::Tensor& tensor) {
  note_use(tensor);
  if (!marked(tensor, Mark::Assumed)) return;
  std::lock_guard guard(routing_mutex);
  noted.read = noted.read || model_chooses;
}

void note_exchange(int64_t rank, int64_t ranks) {
  std::lock_guard guard(routing_mutex);
  if (noted.ranks == 1) std::tie(noted.rank, noted.ranks) = std::pair(rank, ranks);
}

Assumed assumed_so_far() {
  std::lock_guard guard(routing_mutex);
  auto found = noted;
  const auto names = recorder().names.texts(), modules = recorder().modules.texts();
  for (const auto& [key, times] : choices_made) {
    const auto [name, module, count, from] = key;
    found.choices.emplace_back(names[static_cast<size_t>(name)], modules[static_cast<size_t>(module)], count, from, times);
  }
  return found;
}

}  // namespace refshard
