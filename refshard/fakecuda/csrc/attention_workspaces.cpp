// Memory that attention kernels take for themselves.
#include <cmath>

#include "workspace_rules.h"

namespace refshard::workspace_rules {
namespace attention {

struct Shape {
  int64_t batch, heads, kv_heads, queries, keys, head_dim, value_dim;
  int64_t item;  // bytes of an element
};

bool heads_first(const OperatorCall& call) { return call.name.find("_scaled_dot_product") != call.name.npos; }

// A tensor as the kernels see it: batch, sequence, heads, head dimension.
TensorArgument as_kernel(const OperatorCall& call, const TensorArgument& tensor) {
  return heads_first(call) ? transposed(tensor, 1, 2) : tensor;
}

Shape shape_of(const OperatorCall& call, size_t first) {
  const auto query = as_kernel(call, call.inputs[first]);
  const auto key = as_kernel(call, call.inputs[first + 1]);
  const auto value = as_kernel(call, call.inputs[first + 2]);
  return {query.sizes[0], query.sizes[2], key.sizes[2],   query.sizes[1],
          key.sizes[1],   query.sizes[3], value.sizes[3], item_size(query.dtype)};
}

bool dense_call(const OperatorCall& call, size_t first) {
  return call.inputs.size() >= first + 3 && call.inputs[first].sizes.size() == 4;
}

// flash_api.cpp: head_size_rounded
int64_t padded_head_dim(int64_t head_dim) { return rounded_up(head_dim, head_dim <= 128 ? 32 : 64); }

// flash_api.cpp, num_splits_heuristic: the fewest splits of the keys that fill at least 85 % as much of the waves of
// thread blocks as the best number does.
int64_t splits(int64_t blocks, int64_t slots, int64_t key_blocks) {
  if (static_cast<float>(blocks) >= 0.8f * static_cast<float>(slots)) return 1;
  const auto most = std::min<int64_t>({128, slots, key_blocks});
  const auto eligible = [&](int64_t n) { return n == 1 || ceil_div(key_blocks, n) != ceil_div(key_blocks, n - 1); };
  const auto efficiency = [&](int64_t n) {
    const auto waves = static_cast<float>(blocks * n) / static_cast<float>(slots);
    return waves / std::ceil(waves);
  };
  float best = 0;
  for (int64_t n = 1; n <= most; ++n) {
    if (eligible(n)) best = std::max(best, efficiency(n));
  }
  for (int64_t n = 1; n <= most; ++n) {
    if (eligible(n) && efficiency(n) >= 0.85 * best) return n;
  }
  return 1;
}

// flash_api.cpp, mha_varlen_bwd: sequences of several lengths, packed.
void packed_flash_backward(const OperatorCall& call, const Capability& capability, Taken& taken) {
  const auto& query = call.inputs[1];
  const auto& key = call.inputs[2];
  const int64_t batch = call.inputs.size() > 6 ? numel(call.inputs[6]) - 1 : 0;
  if (query.sizes.size() != 3 || batch < 1) return;
  const auto heads = query.sizes[1], head_dim = query.sizes[2];
  const auto rows = query.sizes[0] + 128 * batch;
  const auto copies = call.scalars.deterministic ? ceil_div(capability.multiprocessors, batch * heads) : 1;
  taken.hold(contiguous_copy(call.inputs[0]), Moment::BeforeResults);
  taken.hold(contiguous_copy(call.inputs[4]), Moment::BeforeResults);
  taken.hold(heads * rows * 4);
  taken.hold(copies * rows * heads * padded_head_dim(head_dim) * 4);
  if (key.sizes[1] == heads) return;
  for (int tensor = 0; tensor < 2; ++tensor) taken.hold(key.sizes[0] * heads * head_dim * item_size(query.dtype));
}

// A tile of a memory-efficient backward kernel, for head dimensions up to `most`, and the shared memory of a block in
// bytes. In the order in which torch tries them (mem_eff_attention/kernels/cutlassB.h, compute capability 8.0 and on);
// shared memory as compiled into torch 2.13 for CUDA 13.0.
struct Tile {
  int64_t queries, keys, most;
  int shared_bytes;
  bool only_86_and_89 = false;
};

std::vector<Tile> tiles(at::ScalarType type, bool dropout) {
  constexpr int64_t any = 65536;
  if (type == at::kFloat) {
    return {{64, 64, 32, 53504},    {64, 64, 64, 53504},    {128, 64, 128, 121344},
            {64, 64, 128, 67840},   {128, 64, any, 121344}, {64, 64, any, 67840}};
  }
  const bool bf16 = type == at::kBFloat16;
  std::vector<Tile> found;
  if (dropout) {
    found = {{64, 64, 32, bf16 ? 39168 : 40192}, {64, 64, 64, bf16 ? 51456 : 52480},
             {128, 128, 128, bf16 ? 152064 : 162304}};
  } else {
    found = {{64, 64, 32, bf16 ? 34560 : 40192}, {64, 64, 64, bf16 ? 42240 : 44288}, {128, 64, 96, 91648, true},
             {128, 128, 128, bf16 ? 133632 : 154112}};
  }
  found.insert(found.end(), {{64, 64, 128, 34048}, {128, 64, any, 60928}, {64, 64, any, 34048}});
  return found;
}

std::optional<Tile> tile_for(const Shape& shape, at::ScalarType type, bool dropout, const Capability& capability) {
  if (capability.major < 8) return std::nullopt;
  for (const auto& tile : tiles(type, dropout)) {
    if (tile.only_86_and_89 && capability.number() != 86 && capability.number() != 89) continue;
    if (std::max(shape.head_dim, shape.value_dim) > tile.most) continue;
    if (tile.shared_bytes <= capability.shared_memory_per_block()) return tile;
  }
  return std::nullopt;
}

// mem_eff_attention/kernel_backward.h, Params::workspace_size; the number of splits from attention_backward.cu,
// _efficient_attention_backward.
int64_t efficient_backward_bytes(const Shape& shape, const Tile& tile, bool deterministic) {
  const bool half = shape.item == 2;
  const bool accumulates_keys = half && tile.most > tile.queries;  // else dK and dV stay in registers
  const auto pairs = shape.batch * shape.heads;
  int64_t splits = ceil_div(shape.keys, tile.keys);
  if (pairs >= 256 && shape.keys <= 2 * tile.keys) splits = 1;
  if (accumulates_keys) splits = std::min(splits, 200 / pairs);
  if (splits < 1 || deterministic) splits = 1;
  int64_t floats = 0;
  if (accumulates_keys) {
    floats += splits * tile.keys * rounded_up(shape.head_dim, tile.queries);
    floats += splits * tile.keys * rounded_up(shape.value_dim, tile.queries);
  }
  const auto blocks = ceil_div(shape.queries, tile.queries) * ceil_div(shape.head_dim, tile.keys);
  floats += blocks * (tile.queries * tile.keys + 4);  // a tile of dQ, its lock and its counter
  return pairs * rounded_up(floats, 4) * 4;
}

}  // namespace attention

// aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_fwd, set_params_splitkv: partial results, where
// so few thread blocks have work that the keys are split as well.
void flash_forward(const OperatorCall& call, const Capability& capability, Taken& taken) {
  using namespace attention;
  if (!dense_call(call, 0) || call.scalars.dropout > 0) return;
  auto shape = shape_of(call, 0);
  if (shape.queries == 1 && shape.heads > shape.kv_heads && shape.kv_heads > 0) {
    shape.queries = shape.heads / shape.kv_heads;
    shape.heads = shape.kv_heads;
  }
  const int64_t block = shape.head_dim <= 64 ? 256 : shape.head_dim <= 128 ? 128 : 64;
  const auto rows = shape.batch * shape.heads * shape.queries;
  const auto n = splits(shape.batch * shape.heads * ceil_div(shape.queries, 64), 2 * capability.multiprocessors,
                        ceil_div(shape.keys, block));
  if (n <= 1) return;
  taken.hold(n * rows * 4);
  taken.hold(n * rows * padded_head_dim(shape.head_dim) * 4);
}

// attention_backward.cu, _flash_attention_backward, and flash_attn/flash_api.cpp, mha_bwd: the row sums of dO * O, dQ
// in fp32 (one copy for each group of blocks that runs at a time if deterministic), and dK and dV of each query head
// where several share a key head.
void flash_backward(const OperatorCall& call, const Capability& capability, Taken& taken) {
  using namespace attention;
  if (!dense_call(call, 1) || call.inputs.size() < 5) {
    if (call.inputs.size() >= 5) packed_flash_backward(call, capability, taken);
    return;
  }
  const auto shape = shape_of(call, 1);
  const auto pairs = shape.batch * shape.heads;
  if (pairs == 0) return;
  const auto rows = rounded_up(shape.queries, 128);
  const auto copies = call.scalars.deterministic ? ceil_div(capability.multiprocessors, pairs) : 1;
  taken.hold(contiguous_copy(as_kernel(call, call.inputs[0])), Moment::BeforeResults);
  taken.hold(contiguous_copy(as_kernel(call, call.inputs[4])), Moment::BeforeResults);
  taken.hold(pairs * rows * 4);
  taken.hold(copies * pairs * rows * padded_head_dim(shape.head_dim) * 4);
  if (shape.kv_heads == shape.heads) return;
  for (int tensor = 0; tensor < 2; ++tensor) taken.hold(pairs * shape.keys * shape.head_dim * shape.item);
}

// attention.cu, _efficient_attention_forward: the result in fp32, where a head does not fit into registers
// (mem_eff_attention/kernel_forward.h, kNeedsOutputAccumulatorBuffer; kernels/cutlassF.h).
void efficient_forward(const OperatorCall& call, const Capability&, Taken& taken) {
  using namespace attention;
  if (!dense_call(call, 0)) return;
  const auto shape = shape_of(call, 0);
  if (shape.item == 2 && shape.value_dim > 128) {
    taken.hold(shape.batch * shape.queries * shape.heads * shape.value_dim * 4);
  }
}

// attention_backward.cu, _efficient_attention_backward: the row sums of dO * O, by several kernels in fp32, and dQ
// (and for large heads dK and dV) in fp32. Compute capabilities below 8.0 take a workspace that is not modelled.
void efficient_backward(const OperatorCall& call, const Capability& capability, Taken& taken) {
  using namespace attention;
  if (!dense_call(call, 1)) return;
  const auto shape = shape_of(call, 1);
  const auto rows = shape.batch * shape.heads * shape.queries;
  if (rows == 0 || shape.keys == 0) return;
  taken.hold(contiguous_copy(as_kernel(call, call.inputs[0])), Moment::BeforeResults);
  if (shape.item == 4) {
    const bool copied = shape.heads > 1 && shape.queries > 1;
    taken.hold_for(copied ? 2 : 1, rows * shape.value_dim * 4);
    if (copied) taken.hold_for(1, rows * 4);
  }
  taken.hold(rows * 4);
  const auto tile = tile_for(shape, call.inputs[1].dtype, call.scalars.dropout > 0, capability);
  if (tile) taken.hold(efficient_backward_bytes(shape, *tile, call.scalars.deterministic));
}

// aten/src/ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_bprop: one workspace, of which cudnn-frontend's part is dQ in fp32
// and the row sums of dO * O (node/scaled_dot_product_flash_attention.h, get_fe_workspace_size_node, versions 1.15 to
// 1.23). What the chosen cuDNN engine adds is not published and not in here; the forward's workspace is the engine's
// alone.
void cudnn_backward(const OperatorCall& call, const Capability&, Taken& taken) {
  using namespace attention;
  if (!dense_call(call, 1)) return;
  const auto& query = call.inputs[1];
  const auto rows = query.sizes[0] * query.sizes[1] * query.sizes[2];
  if (call.inputs[0].strides.back() != 1) taken.hold(bytes(call.inputs[0]));
  taken.hold(rows * query.sizes[3] * 4 + rows * 4);
}

}  // namespace refshard::workspace_rules
