// Rows of floats -> the rows a packed weight of some precision multiplies, with an RMSNorm on the way. Included by isa_table.h.

// One row: 16 columns at a time as they enter the product, from width on 0.
struct RowReader {
  const float* x;
  int width;
  bool normalise;
  Vec inverse;
  const float* weight;
  const float* bias;

  Vec operator()(int i) const { return normalise ? normalised(x, i, width, inverse, weight, bias) : load_some(x + i, width - i); }
};

// The row's scale; *inverse is what to multiply by before rounding. A row with a NaN or an infinity gets the scale NaN, which
// every product of it inherits.
inline float scale_of(const RowReader& row, float* inverse) {
  Vec greatest = zero(), poison = zero();
  for (int i = 0; i < row.width; i += 16) {
    const Vec v = row(i);
    greatest = _mm512_max_ps(_mm512_abs_ps(v), greatest);
    poison = _mm512_fmadd_ps(v, zero(), poison);
  }
  const float bound = max_lanes(greatest), not_finite = sum_lanes(poison);
  const bool usable = bound > 1e-30f && not_finite == 0.0f;  // else 127 / bound is not finite
  *inverse = usable ? 127.0f / bound : 0.0f;
  return (usable ? bound / 127.0f : 0.0f) + not_finite;
}

inline void quantise_row(const RowReader& row, int inputs, float inverse, int8_t* out) {
  for (int i = 0; i < inputs; i += 16) {
    // a NaN times 0 would round to INT_MIN: keep the bytes of a poisoned row within -127..127
    Vec v = _mm512_mul_ps(row(i), splat(inverse));
    v = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
  }
}

inline Int sums_of_quads(const int8_t* row) { return dot_u8s8(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(row)); }

inline int32_t sum_row(const int8_t* row, int inputs) {
  Int quads = _mm512_setzero_si512();
  for (int i = 0; i < inputs; i += 64) quads = _mm512_add_epi32(quads, sums_of_quads(row + i));
  return _mm512_reduce_add_epi32(quads);
}

inline void sum_groups(const int8_t* row, int inputs, int32_t* sums) {
  for (int i = 0; i < inputs; i += 64) {
    const Int quads = sums_of_quads(row + i);
    sums[i / kGroup] = _mm512_mask_reduce_add_epi32(0x00ff, quads);
    sums[i / kGroup + 1] = _mm512_mask_reduce_add_epi32(0xff00, quads);
  }
}

inline void prepare(const Prepare& p, int first, int count) {
  for (int r = first; r < first + count; ++r) {
    const float* x = p.x + r * p.x_stride;
    char* out = static_cast<char*>(p.data) + r * p.stride;
    const float inverse = p.normalise ? inverse_rms(x, p.width, p.eps) : 1.0f;
    const RowReader row = {x, p.width, p.normalise, splat(inverse), p.norm_weight, p.norm_bias};
    switch (p.precision) {
      case Precision::kFloat32:
        for (int i = 0; i < p.inputs; i += 16) store_some(reinterpret_cast<float*>(out) + i, row(i), p.inputs - i);
        break;
      case Precision::kBFloat16:
        for (int i = 0; i < p.inputs; i += 16) store_bf16(reinterpret_cast<uint16_t*>(out) + i, row(i));
        break;
      case Precision::kInt8:
      case Precision::kInt4: {
        float to_integers;
        p.scales[r] = scale_of(row, &to_integers);
        quantise_row(row, p.inputs, to_integers, reinterpret_cast<int8_t*>(out));
        if (p.precision == Precision::kInt4) {
          sum_groups(reinterpret_cast<int8_t*>(out), p.inputs, p.input_sums + int64_t(r) * (p.inputs / kGroup));
        } else {
          p.input_sums[r] = sum_row(reinterpret_cast<int8_t*>(out), p.inputs);
        }
        break;
      }
    }
  }
}
