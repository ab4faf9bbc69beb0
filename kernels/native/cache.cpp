#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace foretoken {
namespace {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int element_bytes(CacheType type) { return type == CacheType::kFloat32 ? 4 : type == CacheType::kBFloat16 ? 2 : 1; }

// Where the elements of one slot and head lie: `together` elements of one slot are neighbours in K; in V, elements
// of as many neighbouring slots are.
struct Slot {
  char* k;
  char* v;
  float* k_scale;  // int8 only
  float* v_scale;
};

class Layout {
 public:
  explicit Layout(const CacheLayer& layer)
      : layer_(layer), size_(element_bytes(layer.type)), together_(layer.type == CacheType::kFloat32 ? 1 : 2) {}

  Slot slot(int64_t index, int head) const {
    char* block = layer_.base + index / kBlockSize * layer_.block_bytes + head * layer_.head_bytes;
    const int lane = int(index % kBlockSize);
    char* v = block + int64_t(layer_.k_pad) * kBlockSize * size_;
    auto* scales = reinterpret_cast<float*>(v + int64_t(layer_.v_pad) * kBlockSize * size_);
    return {block + lane * together_ * size_, v + (int64_t(lane / together_) * layer_.v_pad * together_ + lane % together_) * size_,
            scales + lane, scales + kBlockSize + lane};
  }
  char* k(const Slot& slot, int d) const { return slot.k + (d / together_ * kBlockSize * together_ + d % together_) * size_; }
  char* v(const Slot& slot, int d) const { return slot.v + d * together_ * size_; }

 private:
  CacheLayer layer_;
  int size_, together_;
};

uint16_t to_bfloat16(float x) {  // to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return uint16_t(bits >> 16 | 0x40);  // quiet, lest a payload that rounds away leaves an infinity
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

// int8: x = scale * q. A vector that is not finite gets a scale that is not finite: it must not pass for a sane one.
float scale_of(const float* x, int n) {
  float greatest = 0.0f, poison = 0.0f;
  for (int i = 0; i < n; ++i) {
    greatest = std::max(greatest, std::fabs(x[i]));
    poison += x[i] - x[i];
  }
  return greatest / 127.0f + poison;
}

template <typename Place>
void store(CacheType type, const float* x, int dim, int pad, float* scale, Place place) {
  float inverse = 0.0f;
  if (type == CacheType::kInt8) {
    *scale = scale_of(x, dim);
    inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  }
  for (int d = 0; d < pad; ++d) {
    const float value = d < dim ? x[d] : 0.0f;
    if (type == CacheType::kFloat32) {
      std::memcpy(place(d), &value, 4);
    } else if (type == CacheType::kBFloat16) {
      const uint16_t rounded = to_bfloat16(value);
      std::memcpy(place(d), &rounded, 2);
    } else {
      const float q = std::nearbyint(value * inverse);
      *place(d) = char(q >= -127.0f && q <= 127.0f ? int8_t(q) : int8_t(0));
    }
  }
}

template <typename Place>
void fetch(CacheType type, float* x, int dim, const float* scale, Place place) {
  for (int d = 0; d < dim; ++d) {
    if (type == CacheType::kFloat32) {
      std::memcpy(&x[d], place(d), 4);
    } else if (type == CacheType::kBFloat16) {
      uint16_t value;
      std::memcpy(&value, place(d), 2);
      x[d] = from_bfloat16(value);
    } else {
      x[d] = *scale * float(int8_t(*place(d)));
    }
  }
}

// A slot's numbers lie `step` bytes apart in the cache, side by side in their copy.
template <typename Number>
char* copy_out(const char* place, int64_t step, int count, char* copy) {
  for (int i = 0; i < count; ++i) std::memcpy(copy + i * sizeof(Number), place + i * step, sizeof(Number));
  return copy + count * sizeof(Number);
}
template <typename Number>
const char* copy_in(const char* copy, char* place, int64_t step, int count) {
  for (int i = 0; i < count; ++i) std::memcpy(place + i * step, copy + i * sizeof(Number), sizeof(Number));
  return copy + count * sizeof(Number);
}

// Lane: what lies together in a row of K. Element: one number of V.
template <typename Lane, typename Element>
void move_slots(const CacheLayer& layer, const int64_t* src, const int64_t* dst, int n) {
  const Layout layout(layer);
  constexpr int64_t k_step = kBlockSize * sizeof(Lane), v_step = sizeof(Lane);
  const int k_count = layer.k_pad * int(sizeof(Element)) / int(sizeof(Lane)), v_count = layer.v_pad;
  const bool scaled = layer.type == CacheType::kInt8;
  const size_t head_bytes = size_t(k_count) * sizeof(Lane) + size_t(v_count) * sizeof(Element) + 2 * sizeof(float);
  std::vector<char> copies(size_t(n) * size_t(layer.kv_heads) * head_bytes);
  char* out = copies.data();
  for (int i = 0; i < n; ++i) {
    for (int head = 0; head < layer.kv_heads; ++head) {
      const Slot slot = layout.slot(src[i], head);
      out = copy_out<Lane>(slot.k, k_step, k_count, out);
      out = copy_out<Element>(slot.v, v_step, v_count, out);
      if (scaled) out = copy_out<float>(reinterpret_cast<const char*>(slot.k_scale), kBlockSize * sizeof(float), 2, out);
    }
  }
  const char* in = copies.data();
  for (int i = 0; i < n; ++i) {
    for (int head = 0; head < layer.kv_heads; ++head) {
      const Slot slot = layout.slot(dst[i], head);
      in = copy_in<Lane>(in, slot.k, k_step, k_count);
      in = copy_in<Element>(in, slot.v, v_step, v_count);
      if (scaled) in = copy_in<float>(in, reinterpret_cast<char*>(slot.k_scale), kBlockSize * sizeof(float), 2);
    }
  }
}

}  // namespace

CacheLayer make_cache_layer(CacheType type, int kv_heads, int k_dim, int v_dim, char* base) {
  CacheLayer layer{type, kv_heads, k_dim, v_dim, round_up(k_dim, 32), round_up(v_dim, 32), 0, 0, base};
  layer.head_bytes = int64_t(layer.k_pad + layer.v_pad) * kBlockSize * element_bytes(type);
  if (type == CacheType::kInt8) layer.head_bytes += 2 * kBlockSize * int64_t(sizeof(float));
  layer.block_bytes = kv_heads * layer.head_bytes;
  return layer;
}

void cache_write(const CacheLayer& layer, const int64_t* slots, int n, const float* k, const float* v) {
  const Layout layout(layer);
  for (int i = 0; i < n; ++i) {
    if (slots[i] < 0) continue;
    for (int head = 0; head < layer.kv_heads; ++head) {
      const Slot slot = layout.slot(slots[i], head);
      const int64_t row = int64_t(i) * layer.kv_heads + head;
      store(layer.type, k + row * layer.k_dim, layer.k_dim, layer.k_pad, slot.k_scale, [&](int d) { return layout.k(slot, d); });
      store(layer.type, v + row * layer.v_dim, layer.v_dim, layer.v_pad, slot.v_scale, [&](int d) { return layout.v(slot, d); });
    }
  }
}

void cache_gather(const CacheLayer& layer, const int64_t* slots, int n, float* k, float* v) {
  const Layout layout(layer);
  for (int i = 0; i < n; ++i) {
    for (int head = 0; head < layer.kv_heads; ++head) {
      const Slot slot = layout.slot(slots[i], head);
      const int64_t row = int64_t(i) * layer.kv_heads + head;
      fetch(layer.type, k + row * layer.k_dim, layer.k_dim, slot.k_scale, [&](int d) { return layout.k(slot, d); });
      fetch(layer.type, v + row * layer.v_dim, layer.v_dim, slot.v_scale, [&](int d) { return layout.v(slot, d); });
    }
  }
}

void cache_move(const CacheLayer& layer, const int64_t* src, const int64_t* dst, int n) {
  switch (layer.type) {
    case CacheType::kFloat32: return move_slots<uint32_t, uint32_t>(layer, src, dst, n);
    case CacheType::kBFloat16: return move_slots<uint32_t, uint16_t>(layer, src, dst, n);
    case CacheType::kInt8: return move_slots<uint16_t, uint8_t>(layer, src, dst, n);
  }
}

}  // namespace foretoken
