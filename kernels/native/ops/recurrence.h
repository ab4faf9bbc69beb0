// Recurrent layers: the causal depthwise convolution of a token, and the memory of a head, token by token. Included by
// isa_table.h.

// Taps from the token itself backwards, each rounded once: one order for every token.
inline void causal_conv(const CausalConv& op, const float* const* newest_first, int first, int count, float* out) {
  const auto convolved = [&](int64_t i, int n) {
    const float* weights = op.weights + int64_t(op.taps) * op.width + i;
    Vec sum = zero();
    for (int age = 0; age < op.taps; ++age) {
      weights -= op.width;
      sum = mul_add(load_some(weights, n), load_some(newest_first[age] + i, n), sum);
    }
    return op.bias ? sum + load_some(op.bias + i, n) : sum;
  };
  int64_t i = first;
  for (; i + 32 <= first + count; i += 32) {  // two at a time: neither waits for the other
    const Vec one = convolved(i, 16), other = convolved(i + 16, 16);
    store(out + i, function_of(op.function, one));
    store(out + i + 16, function_of(op.function, other));
  }
  for (; i < first + count; i += 16) {
    const int n = int(first + count - i);
    store_some(out + i, function_of(op.function, convolved(i, n)), n);
  }
}

inline void to_length(const float* x, int n, float length, float* out) {
  Vec squares[2] = {zero(), zero()};
  for (int i = 0, turn = 0; i < n; i += 16, turn ^= 1) {
    const Vec v = load_some(x + i, n - i);
    squares[turn] = mul_add(v, v, squares[turn]);
  }
  const Vec factor = splat(length / __builtin_sqrtf(sum_lanes(squares[0] + squares[1]) + 1e-6f));
  for (int i = 0; i < n; i += 16) store_some(out + i, load_some(x + i, n - i) * factor, n - i);
}

// One token on one tile of a memory [k_dim][kMemoryTile], by the gated delta rule if kCorrects, else by that of a state space. Rows are summed in two interleaved runs: that order for every token.
enum class Stores { kNothing, kHere, kPastCaches };

template <bool kCorrects, bool kReads, Stores kStores>
inline void memory_tile(const MemoryStep& step, const float* from, float* to, int k_dim, int column, int columns) {
  constexpr int kVectors = kMemoryTile / 16;
  const float *k = step.k, *q = step.q;
  const int64_t whole = k_dim & ~1;  // 64 bits wide, for 32 would be widened anew in each turn of the loops
  Vec said[2][kVectors], read[2][kVectors], values[kVectors], change[kVectors];
  for (int run = 0; run < 2; ++run) {
    for (int j = 0; j < kVectors; ++j) said[run][j] = read[run][j] = zero();
  }
  const auto ask = [&](int64_t row, int run) {
    const Vec key = splat(k[row]);
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) said[run][j] = mul_add(key, load(from + row * kMemoryTile + 16 * j), said[run][j]);
  };
  if (kCorrects) {
    for (int64_t row = 0; row < whole; row += 2) {
      ask(row, 0);
      ask(row + 1, 1);
    }
    if (k_dim & 1) ask(whole, 0);
  }
  const Vec decay = splat(step.decay), strength = splat(step.strength);
  for (int j = 0; j < kVectors; ++j) {
    values[j] = load_some(step.v + column + 16 * j, columns - 16 * j);
    change[j] = strength * (kCorrects ? sub_mul(decay, said[0][j] + said[1][j], values[j]) : values[j]);
  }
  const auto learn = [&](int64_t row, int run) {
    const Vec key = splat(k[row]);
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      const Vec memory = mul_add(key, change[j], decay * load(from + row * kMemoryTile + 16 * j));
      if (kStores == Stores::kHere) store(to + row * kMemoryTile + 16 * j, memory);
      if (kStores == Stores::kPastCaches) store_once(to + row * kMemoryTile + 16 * j, memory);
      if (kReads) read[run][j] = mul_add(splat(q[row]), memory, read[run][j]);
    }
  };
  for (int64_t row = 0; row < whole; row += 2) {
    learn(row, 0);
    learn(row + 1, 1);
  }
  if (k_dim & 1) learn(whole, 0);
  if (!kReads) return;
  for (int j = 0; j < kVectors; ++j) {
    const Vec sum = read[0][j] + read[1][j];
    store_some(step.out + column + 16 * j, kCorrects ? sum : mul_add(splat(step.skip), values[j], sum), columns - 16 * j);
  }
}

// Tile by tile, so that a tile stays in L1 from one token to the next.
template <bool kCorrects>
inline void memory_steps_by(const MemoryStep* steps, int count, int k_dim, int v_dim) {
  const int64_t tile = int64_t(k_dim) * kMemoryTile;
  for (int column = 0, at = 0; column < v_dim; column += kMemoryTile, ++at) {
    const int columns = v_dim - column;
    for (int i = 0; i < count; ++i) {
      const MemoryStep& step = steps[i];
      const float* from = step.from + at * tile;
      float* to = step.to ? step.to + at * tile : nullptr;
      if (!step.q) {
        memory_tile<kCorrects, false, Stores::kHere>(step, from, to, k_dim, column, columns);
      } else if (!to) {
        memory_tile<kCorrects, true, Stores::kNothing>(step, from, to, k_dim, column, columns);
      } else if (step.leaves) {
        memory_tile<kCorrects, true, Stores::kPastCaches>(step, from, to, k_dim, column, columns);
      } else {
        memory_tile<kCorrects, true, Stores::kHere>(step, from, to, k_dim, column, columns);
      }
      for (float* copy : step.copies) {
        if (!copy) continue;
        for (int64_t j = 0; j < tile; j += 16) store_once(copy + at * tile + j, load(to + j));
      }
    }
  }
  finish_stores();
}

inline void memory_steps(bool corrects, const MemoryStep* steps, int count, int k_dim, int v_dim) {
  corrects ? memory_steps_by<true>(steps, count, k_dim, v_dim) : memory_steps_by<false>(steps, count, k_dim, v_dim);
}

// An RMSNorm of n floats times silu(gate).
inline void gated_norm(const float* x, int n, const float* weight, float eps, const float* gate, float* out, uint16_t* narrow_out) {
  const Spread spread = spread_of(x, n, false, eps);
  for (int i = 0; i < n; i += 16) {
    const Vec y = normalised(x, i, n, spread, weight, nullptr) * function_of(Function::kSilu, load_some(gate + i, n - i));
    if (narrow_out) {
      store_some(narrow_out + i, to_bf16(y), n - i);
    } else {
      store_some(out + i, y, n - i);
    }
  }
}
