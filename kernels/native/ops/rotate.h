// From the rows of q | k | v to what attention reads: heads normalised and rotated in float32, k and v in their cache slots, queries
// scaled and in the cache's type (bfloat16 for an int8 cache). Knows no places and no masks.

// The first dimensions of a head, in place.
inline void rotate(const AttentionOp& op, int64_t position, float* out) {
  const int half = op.rope_half;
  const float* cosines = op.rope + position * 2 * half;
  const float* sines = cosines + half;
  for (int i = 0; i < half; i += 16) {
    const int lanes = half - i;
    const Vec c = load_some(cosines + i, lanes), s = load_some(sines + i, lanes);
    const Vec a = load_some(out + i, lanes), b = load_some(out + half + i, lanes);
    store_some(out + i, mul_sub(a, c, b * s), lanes);
    store_some(out + half + i, mul_add(b, c, a * s), lanes);
  }
}

// A head of n floats through RMSNorm (weight null = none) and rotation, to out [pad], zero from n on. The rotation leaves its length as it is,
// so only the weight has to wait where the norm comes last.
inline void normalise_and_rotate(const AttentionOp& op, const float* x, const float* weight, int64_t position, int n, int pad, float* out) {
  if (weight) {
    Vec squares = zero();
    for (int i = 0; i < n; i += 16) {
      const Vec v = load_some(x + i, n - i);
      squares = mul_add(v, v, squares);
    }
    const __m128 mean = _mm_set_ss(sum_lanes(squares) / float(n) + op.norm_eps);
    const Vec inverse = splat(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(mean)));
    for (int i = 0; i < pad; i += 16) {
      const Vec v = load_some(x + i, n - i) * inverse;
      store(out + i, op.norm_last ? v : v * load_some(weight + i, n - i));
    }
  } else {
    for (int i = 0; i < pad; i += 16) store(out + i, load_some(x + i, n - i));
  }
  if (op.rope) rotate(op, position, out);
  if (!weight || !op.norm_last) return;
  for (int i = 0; i < n; i += 16) store(out + i, load(out + i) * load_some(weight + i, n - i));
}

// x = scale * q, q in -127..127. A vector that is not finite gets a scale that is not finite: it must not pass for a sane one.
inline float quantise(const float* x, int n, int8_t* q) {
  Vec greatest = zero(), poison = zero();
  for (int i = 0; i < n; i += 16) {
    const Vec v = load(x + i);
    greatest = max_of(greatest, abs_of(v));
    poison = poison + (v - v);
  }
  const float scale = max_lanes(greatest) / 127.0f + sum_lanes(poison);
  const Vec inverse = splat(scale > 0.0f ? 1.0f / scale : 0.0f);
  for (int i = 0; i < n; i += 16) {
    const Vec v = load(x + i) * inverse;
    // what does not fit (an infinite inverse, NaN) becomes 0
    const Mask fits = less(abs_of(v), splat(127.5f));
    store_bytes(q + i, narrow_bytes(to_ints(fits, v)));
  }
  return scale;
}

// One lane of the 16 of each row of K: `rows` elements of 4 or 2 bytes.
template <class Element>
inline void store_lane(char* keys, int lane, const void* x, int rows) {
  auto* to = reinterpret_cast<Element*>(keys) + lane;
  const auto* from = static_cast<const Element*>(x);
  for (int i = 0; i < rows; ++i) to[i * kBlockSize] = from[i];
}

// k [k_pad] and v [v_pad] to a slot. Only the slot's own bytes are written: other threads write its neighbours.
inline void write_slot(const CacheLayer& cache, char* block, int lane, const float* k, const float* v) {
  const int k_pad = cache.k_pad, v_pad = cache.v_pad;
  if (cache.type == CacheType::kFloat32) {
    store_lane<uint32_t>(block, lane, k, k_pad);
    float* values = reinterpret_cast<float*>(block) + (k_pad + lane * (v_pad / kBlockSize)) * kBlockSize;
    for (int i = 0; i < v_pad; i += 16) store(values + i, load(v + i));
    return;
  }
  alignas(64) uint16_t narrow[kMaxHeadDim];
  const bool odd = lane & 1;
  if (cache.type == CacheType::kBFloat16) {
    for (int i = 0; i < k_pad; i += 16) store_bf16(narrow + i, load(k + i));
    store_lane<uint32_t>(block, lane, narrow, k_pad / 2);
    auto* pairs = reinterpret_cast<uint16_t*>(block) + k_pad * kBlockSize + lane / 2 * v_pad * 2;
    for (int i = 0; i < v_pad; i += 16) {
      const Int x = widen(to_bf16(load(v + i)));
      store_every_second(pairs + 2 * i, odd, odd ? shift_left(x, 16) : x);
    }
    return;
  }
  auto* bytes = reinterpret_cast<int8_t*>(narrow);
  auto* scales = reinterpret_cast<float*>(block + (k_pad + v_pad) * kBlockSize);
  scales[lane] = quantise(k, k_pad, bytes);
  store_lane<uint16_t>(block, lane, bytes, k_pad / 2);
  scales[kBlockSize + lane] = quantise(v, v_pad, bytes);
  auto* pairs = reinterpret_cast<uint8_t*>(block) + k_pad * kBlockSize + lane / 2 * v_pad * 2;
  for (int i = 0; i < v_pad; i += 16) {
    const Halves x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)));
    store_every_second(pairs + 2 * i, odd, odd ? _mm256_slli_epi16(x, 8) : x);
  }
}

// Up to 16 columns of what comes out, `place` elements from its start.
inline void store_output(const AttentionOp& op, int64_t place, Vec v, int columns) {
  if (op.narrow_out) {
    store_some(op.narrow_out + place, to_bf16(v), columns);
  } else {
    store_some(op.out + place, v, columns);
  }
}

// Padding tokens attend to nothing: their output is set to zero here. A layer that another network writes has no k.
inline void rotate_and_write(const AttentionOp& op, const BatchView& batch, int token, int kv_head, CacheAhead& ahead) {
  const CacheLayer& cache = op.cache;
  const int k_dim = cache.k_dim, v_dim = cache.v_dim, k_pad = cache.k_pad;
  const int group = op.num_heads / cache.kv_heads;  // query heads of this kv head
  const int64_t position = batch.positions[token], slot = batch.slots[token];
  const float* q = op.q + token * op.q_stride + int64_t(kv_head) * group * k_dim;
  const float* k = op.k ? op.k + token * op.kv_stride + int64_t(kv_head) * k_dim : nullptr;
  const float* v = op.v ? op.v + token * op.kv_stride + int64_t(kv_head) * v_dim : nullptr;
  alignas(64) float head[kMaxHeadDim], values[kMaxHeadDim];
  if (token + 1 < batch.num_tokens) {  // the next token's: other cores have written much of it
    for (int i = 0; i < group * k_dim; i += 16) fetch_line(q + op.q_stride + i);
    for (int i = 0; k && i < k_dim; i += 16) fetch_line(k + op.kv_stride + i);
    for (int i = 0; v && i < v_dim; i += 16) fetch_line(v + op.kv_stride + i);
  }
  NextLines next{op, batch, ahead};
  next.fetch();
  next.fetch();

  if (slot >= 0 && k) {
    normalise_and_rotate(op, k, op.k_norm, position, k_dim, k_pad, head);
    if (!v) v = head + k_dim - v_dim;
    for (int i = 0; i < cache.v_pad; i += 16) store(values + i, load_some(v + i, v_dim - i));
    char* block = cache.base + slot / kBlockSize * cache.block_bytes + kv_head * cache.head_bytes;
    write_slot(cache, block, int(slot % kBlockSize), head, values);
  } else if (slot < 0 && group) {
    const int64_t out = token * op.out_stride + int64_t(kv_head) * group * v_dim;
    for (int i = 0; i < group * v_dim; i += 16) store_output(op, out + i, zero(), group * v_dim - i);
    return;
  }

  const int64_t rows = (batch.num_tokens + 15) / 16 * 16;
  const int64_t first = ((kv_head * rows + token) * group) * k_pad;
  const Vec scale = splat(op.growth ? op.scale * op.growth[position] : op.scale);
  for (int g = 0; g < group; ++g) {
    normalise_and_rotate(op, q + int64_t(g) * k_dim, op.q_norm, position, k_dim, k_pad, head);
    for (int i = 0; i < k_pad; i += 16) {
      const Vec x = load(head + i) * scale;
      if (cache.type == CacheType::kFloat32) {
        store(static_cast<float*>(op.queries) + first + g * k_pad + i, x);
      } else {
        store_bf16(static_cast<uint16_t*>(op.queries) + first + g * k_pad + i, x);
      }
    }
  }
}
