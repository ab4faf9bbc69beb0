// What the executor asks of an instruction set: plain data in, one table of functions out.
//
// Every instruction set is one translation unit (isa_*.cpp) with its own copy of all functions in ops/; nothing inline is
// shared among them, because a linker would keep one copy and run it on machines that lack its instructions.
//
// The arithmetic is batch invariant: what a function computes for a row depends on that row alone. An output accumulates
// over its inputs in one order, whatever number of rows, panels or threads it is computed with.
#pragma once

#include <cstddef>
#include <cstdint>

namespace foretoken {

constexpr int kPanel = 16;       // outputs packed side by side: the lanes of a vector of floats
constexpr int kBlockSize = 16;   // slots of a cache block
constexpr int kSegment = 256;    // places attended to in one piece, from multiples of 256 on; decides rounding, so never tuned per call
constexpr int kGroup = 32;       // inputs of an int4 or int2 weight that share a scale
constexpr int kMaxTree = 64;     // tree tokens of a row
constexpr int kMaxHeadDim = 640; // k_dim and v_dim: what fits into kAttentionScratch
constexpr int kMaxTaps = 16;     // of a causal convolution
constexpr int kMemoryTile = 32;   // columns of a recurrent layer's memory that lie together: for k_dim 128 half of L1
constexpr int kMostInputs = 128 * 1024;  // of a linear layer: a row of them as floats fits into kLinearScratch

enum class Precision : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kInt2 = 4, kCompact = 5 };
enum class Function : int32_t {
  kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3, kRelu = 4, kSigmoid = 5, kRelu2 = 6,
  kClamped = 7  // only gates: see gated_of
};

constexpr bool is_bfloat16(Precision p) { return p == Precision::kBFloat16 || p == Precision::kCompact; }  // once they are read

// Inputs (K) are padded with zeros to a multiple of this, outputs (N) to a multiple of kPanel.
constexpr int input_multiple(Precision p) {
  return p == Precision::kFloat32 ? 1 : is_bfloat16(p) ? 32 : p == Precision::kInt2 ? 128 : 64;
}
// Those that multiply int8 activations, and among them those whose weights are codes of less than a byte, in groups with scales.
constexpr bool is_integer(Precision p) { return p == Precision::kInt8 || p == Precision::kInt4 || p == Precision::kInt2; }
constexpr bool has_codes(Precision p) { return p == Precision::kInt4 || p == Precision::kInt2; }

// A tile of codes: one panel of 16 outputs over so many groups that a byte holds a code of each; 512 bytes of codes, then the groups' scales.
constexpr int groups_of_tile(Precision p) { return input_multiple(p) / kGroup; }
constexpr int code_tile_bytes(Precision p) { return 512 + groups_of_tile(p) * kPanel; }

// A panel of bfloat16 in some 12 bits a weight, without loss: exponents are codes of four bits, for of 256 a panel has hardly more than 15, in a row.
// Behind this head come blocks of 8 inputs, 192 bytes each: 64 of codes (of the first half of the weights the low ones), then sign and
// mantissa of each weight, in the order in which interleaving bytes makes four vectors of bfloat16 of them (ops/linear_compact.h).
struct CompactHead {
  uint8_t high[16];             // by code, of the exponent: the seven bits that stand in a weight's upper byte, ...
  uint8_t low[16];              // ... and the one that stands in its lower, as it stands there. Code 0: exponent 0
  const int32_t* raw;           // ascending numbers of blocks with another exponent, then kNoBlock; behind them, from the next multiple
                                // of 64 bytes on, the weights of each as they are, 256 bytes. Then comes what the next panel has there
  int32_t num_raw;
  char unused[20];
};
static_assert(sizeof(CompactHead) == 64, "blocks begin at a line");
constexpr int kCompactInputs = 8, kCompactBlock = 192, kRawBlock = 256;
constexpr int32_t kNoBlock = INT32_MAX;
// From the numbers of a panel's raw blocks to the first of those, in bytes.
constexpr int64_t raw_list_bytes(int64_t blocks) { return (blocks + 1 + 15) / 16 * 64; }

// A weight [N, K] in the order in which it is read. Panel p holds outputs 16 p .. 16 p + 15 in one run of bytes:
//   float32   [K][16]
//   bfloat16  [K / 32] tiles of [16 input pairs][16 outputs][2]   (1 KB: the B operand of TDPBF16PS)
//   compact   a CompactHead, [K / 8] blocks: bfloat16 in less memory
//   int8      [K / 64] tiles of [16 input quads][16 outputs][4]   (1 KB: the B operand of TDPBSSD)
//   int4      [K / 64] tiles of code_tile_bytes: [8][16 outputs][4] bytes whose low nibble is the code of an input of the first group (quad
//             by quad) and whose high nibble that of the second, then uint8 scales [2 groups][16 outputs]
//   int2      [K / 128] tiles: the same, with codes of two bits of four groups in a byte, the lowest of the first
// int8: w = scales[n] * q.   int4: w = scales[n] * group_scale[k / 32][n] * (code - 8).   int2: ... * (2 * code - 3). Group scales are at
// most 16, so that what stands behind scales[n] is an int8 and its product with int8 activations exact in int32, whichever way it is computed.
// int2 is for what only ranks: half the reading of int4, with an error of a third of the weights' own spread.
struct PackedLinear {
  Precision precision;
  int32_t inputs;               // K, padded
  int32_t outputs;              // N, padded
  const void* weights;          // 64-byte aligned
  const float* scales;          // [N] of integers
  const float* bias;            // [N] or null
};

// Rows of activations as a PackedLinear of that precision reads them. Row r starts at data + r * stride bytes, is K (padded) long and
// zero in the padding; memory is readable up to the next multiple of 16 rows. float32: floats. bfloat16. Integers: int8 in -127..127
// with one scale a row.
struct PreparedRows {
  const void* data;
  int64_t stride;               // bytes, a multiple of 64 but for float32
  const float* scales;          // [rows] of integers
  const int32_t* input_sums;    // of the int8 values: int8 weights [rows], but not for AMX; codes [rows, K / 32]
  int32_t rows;
};

// What a thread will read in the next linear, behind what is fetched in the one before (ReadBehind), then in the linear behind it: a little at
// a time by whoever computes something else meanwhile.
struct ReadAhead {
  const char* at;
  const char* end;
  const char* then;  // null = nothing
  const char* then_end;
};

// Float rows -> PreparedRows, an RMSNorm on the way if `normalise` is set, a layer norm if `centred` is, too.
struct Prepare {
  const float* x;               // [rows, stride]
  int64_t x_stride;             // floats
  int32_t width;                // columns of x
  bool normalise;
  bool centred;
  const float* norm_weight;     // [width] or null (all ones)
  const float* norm_bias;       // [width] or null
  float eps;
  Precision precision;          // of the result
  int32_t inputs;               // padded columns of the result
  void* data;                   // as in PreparedRows
  int64_t stride;
  float* scales;
  int32_t* input_sums;
  ReadAhead* ahead;             // of the calling thread, or null
};

// What a thread will probably read when its panels of a linear are done: some more of them, then the next linear's.
struct ReadBehind {
  int32_t panels;               // of this weight, from ...
  const char* more;
  const char* then;             // null = that is not known
};

struct Best {
  float value;                  // greatest so far
  float poison;                 // 0, or NaN once a value was not finite
  int32_t index;                // lowest among equals
  int32_t unused;
};

// What happens to a linear's result before it is stored: + bias (PackedLinear's), + residual, * scale, softcap, activation.
struct Epilogue {
  const float* residual;        // [rows, residual_stride] or null; its columns stand as the panels do
  int64_t residual_stride;
  float scale;                  // 1 = none
  float softcap;                // cap * tanh(x / cap), 0 = none
  Function function;
  bool gated;                   // panels alternate gate, up; function(gate) * up is stored, half as many columns
  int32_t outputs;              // columns that exist (N without padding; before gating): only these are stored or compete for best
  float* out;                   // [rows, out_stride] or null
  uint16_t* narrow_out;         // the same as bfloat16, or null
  int64_t out_stride;           // elements
  const int32_t* out_rows;      // [rows] where row r is stored, -1 = nowhere; null = row r at r
  Best* best;                   // [rows] or null: updated with these panels' results
};

// What adapters add to a product, whose weights stand side by side (Factors of kernels/adapters.py). Slots are numbered from 1 on: 0 adds
// nothing.
struct LowRank {
  Precision precision;          // of the factors: float32 or bfloat16
  int32_t num_weights, num_slots;
  int32_t rank;                 // of a slot's memory
  int32_t inputs;
  int32_t gated;                // columns of the result stand as a gated product has its panels: whole ones, of gate and up by turns
  const int32_t* outputs;       // [weights]
  const int32_t* ranks;         // [weights][slots] leading rows of down and up that count
  const void* down;             // [weights][slots][rank][inputs]
  const void* const* ups;       // of each weight [slots][rank][its outputs]
};

enum class CacheType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

// One layer of the paged cache. A block of 16 slots holds for each kv head, in this order (k_pad, v_pad: dims padded to 32):
//   float32   K [k_pad][16], V [16][v_pad]
//   bfloat16  K [k_pad / 2][16][2], V [8 slot pairs][v_pad][2]
//   int8      as bfloat16 with one byte an element, then scales of K [16] and of V [16], float32, one a slot
struct CacheLayer {
  CacheType type;
  int32_t kv_heads, k_dim, v_dim, k_pad, v_pad;
  int64_t head_bytes;           // of one kv head in one block, a multiple of 64
  int64_t block_bytes;          // kv_heads * head_bytes
  char* base;                   // block 0
};

// One attention op over all tokens of a batch.
struct AttentionOp {
  CacheLayer cache;
  int32_t num_heads;            // query heads; 0 = only write k and v
  int32_t window;               // positions a token sees, 0 = all
  float scale, softcap;         // softcap 0 = none
  const float* sinks;           // [num_heads] scores that join each head's softmax, without a value; null = none
  const float* rope;            // [positions][2 * half]: cosines, then sines; null = no rotation
  int32_t rope_half;            // dims i and i + half turn together
  const float* growth;          // [positions]: what queries there are multiplied by; null = 1
  const float* q_norm;          // [k_dim] or null; RMSNorm of each head before the rotation (1 + w already added)
  const float* k_norm;
  float norm_eps;
  bool norm_last;               // behind the rotation instead
  const float* q;               // [T, q_stride]
  int64_t q_stride;
  const float* k;               // [T, kv_stride]; null = nothing is written: the layer is another network's
  const float* v;               // [T, kv_stride]; null = of each key as it is stored, the last v_dim numbers
  int64_t kv_stride;
  void* queries;                // scratch [kv_heads][T padded to 16][heads per kv head][k_pad], cache's type (int8: bfloat16), scaled by `scale`
  float* out;                   // [T, out_stride]: heads side by side, v_dim each; or ...
  uint16_t* narrow_out;         // ... the same as bfloat16, null = not
  int64_t out_stride;           // elements
  ReadAhead* ahead;             // of the calling thread, or null
};

// A depthwise convolution of tokens with those before them, weights [taps][width], the last for the token itself.
struct CausalConv {
  int32_t taps, width;
  const float* weights;
  const float* bias;            // [width] or null
  Function function;            // of the result
};

// One token of one head of a recurrent layer, whose memory is [v_dim / kMemoryTile, rounded up][k_dim][kMemoryTile] floats.
struct MemoryStep {
  const float* q;               // [k_dim], null = nothing is read for this token
  const float* k;               // [k_dim]
  const float* v;               // [v_dim]
  float decay, strength;
  float skip;                   // of v, added to what is read; the gated delta rule has none
  const float* from;            // the memory before ...
  float* to;                    // ... and behind the token: the same one, another, or null = nobody wants it
  float* copies[2];             // where the one behind it goes as well, or null
  bool leaves;                  // `to` is not read again soon; copies never are
  float* out;                   // [v_dim]
};

// Where rows have their recurrent states (see RowStates in layout.py).
struct RowStates {
  const int32_t* sources;       // [R]
  const int32_t* targets;       // [R]
  const int64_t* accepted;      // [R]
  const int32_t* num_known;     // [R]
  const int32_t* copy_places;   // [R]
  const int32_t* copy_slots;    // [R]
  const int32_t* chain_slots;   // [R, 2], null = no chains
};

// The rows of a step, as the C ABI passes them (see RaggedBatch in layout.py).
struct BatchView {
  int32_t num_tokens, num_rows, table_width, num_logits;
  const int64_t* token_ids;     // [T]
  const int64_t* positions;     // [T]
  const int64_t* slots;         // [T], -1 = written nowhere
  const int32_t* query_start;   // [R + 1]
  const int32_t* seq_lens;      // [R]
  const int32_t* block_tables;  // [R, table_width]
  const int32_t* num_causal;    // [R]
  const int64_t* tree_mask;     // [T]
  const int64_t* logits_indices;  // [N]
  const int32_t* first_places;  // [R] places before it are seen by nobody; null = all 0
  const int32_t* adapters;      // [R] slot of the row's adapter, 0 = none; null = all 0
  const RowStates* states;      // null = rows begin at place 0, and nothing is kept
};

// Some query vectors of a row against a run of segments, for one kv head. A tile is at most 16 vectors: heads of the group, token by token,
// from any of them on.
struct AttentionTask {
  int32_t row;                  // of the batch
  int32_t first_token;          // flat
  int32_t first_head;           // of that token, within the kv head's group of query heads
  int32_t num_vectors;
  int32_t first_segment, end_segment;   // [first, end) of the places' segments of kSegment
  int32_t kv_head;
  int32_t group;                // tasks of one group cover the segments of one tile: the last to finish folds them in order; -1 = it has all
  int32_t run;                  // CacheAhead's, that it reads
};

// Blocks [first, end) of a row that a thread reads for one task, or for several in a row.
struct CacheRun {
  int32_t row, kv_head;
  int32_t first, end;
};

// What a thread reads in a unit, and how far it has fetched that.
struct CacheAhead {
  const CacheRun* runs;         // in the order in which they are read
  int32_t num_runs;
  int32_t run, block;           // fetched: runs before it, of it the blocks before this one, ...
  int64_t offset;               // ... and so many bytes of that
};

struct SampleRow;               // sampling.h

// The functions of one instruction set.
struct Kernels {
  // Rows that are multiplied at once: those of a tile. 1 = every row takes its time.
  int tile_rows;
  // Prepare rows [first, first + count).
  void (*prepare)(const Prepare&, int first, int count);
  // Panels [first_panel, first_panel + num_panels) of x @ w.T for all rows, through the epilogue. With `gated` both are even.
  // behind: to be fetched on the way.
  // scratch: linear_scratch bytes of the calling thread.
  void (*linear)(const PackedLinear&, const PreparedRows&, const Epilogue&, int first_panel, int num_panels, const ReadBehind& behind,
                 void* scratch);
  // Rows of a packed weight as floats (a tied embedding): out[i] = scale * w[ids[i]], width columns.
  void (*unpack_rows)(const PackedLinear&, const int64_t* ids, int count, int width, float scale, float* out, int64_t out_stride);

  // Rows that have one adapter, in two steps: inner [rows][weights * rank] = x [rows][inputs] @ down.T, its columns [first, end), and
  // out = inner @ up, + residual if that is not null, of which columns [first, end) are made, from the first of a panel on.
  void (*low_rank_down)(const LowRank&, int slot, const float* x, int rows, int first, int end, float* inner);
  void (*low_rank_up)(const LowRank&, int slot, const float* inner, int rows, const float* residual, int first, int end, float* out);

  // RMSNorm of float rows: out = x / rms * weight + bias, centred: of x less its mean. x == out is allowed.
  void (*rms_norm)(const float* x, int64_t x_stride, int width, bool centred, const float* weight, const float* bias, float eps, float* out,
                   int64_t out_stride, int rows);
  // out = function(x), or with `up` the gated function of both.
  void (*activate)(Function, const float* gate, const float* up, float* out, int count);
  void (*softcap)(float cap, const float* x, float* out, int count);
  // Best of a row of logits and, if probability is not null, softmax(x)[best].
  void (*best_of_row)(const float* x, int count, Best* best, float* probability);
  // The `most` panels (up to 64) of a row of logits that have the greatest values, or all if there are fewer, in no order; of equals
  // the first. NaN is never greater. Returns how many.
  int (*best_panels)(const float* x, int count, int most, int32_t* panels);

  // Normalise, rotate and store token t's k and v of one kv head, and its queries of that group. ahead: as in attend.
  void (*rotate_and_write)(const AttentionOp&, const BatchView&, int token, int kv_head, CacheAhead& ahead);
  // Of a task, or two of one row, head and run: the partial state (see ops/attention.h) of each of its segments, or the finished
  // output if partials[i] is null. ahead: what the thread reads for these tasks and those around them, some of it fetched on the way.
  void (*attend)(const AttentionOp&, const BatchView&, const AttentionTask* tasks, int count, CacheAhead& ahead, float* const* partials,
                 void* scratch);
  // Folds the partial states of a tile's segments in their order into op.out.
  void (*fold)(const AttentionOp&, const BatchView&, const AttentionTask&, int segments, const float* partials);

  // Columns [first, first + count) of a token's convolution; newest_first: [taps] whole rows, the token's own and those before it.
  void (*causal_conv)(const CausalConv&, const float* const* newest_first, int first, int count, float* out);
  // out = x of that length, n floats.
  void (*to_length)(const float* x, int n, float length, float* out);
  // Tokens of a head, one after the other. corrects: v is what k shall recall (the gated delta rule), else it is added to that.
  void (*memory_steps)(bool corrects, const MemoryStep* steps, int count, int k_dim, int v_dim);
  // An RMSNorm of n floats times silu(gate), to out or as bfloat16 to narrow_out.
  void (*gated_norm)(const float* x, int n, const float* weight, float eps, const float* gate, float* out, uint16_t* narrow_out);

  // A token for each place; scratch: sample_scratch_bytes(vocab), 64-byte aligned. See sampling.h.
  void (*sample)(const SampleRow* rows, int count, int vocab, void* scratch, int64_t* tokens);
};

constexpr size_t kLinearScratch = 768 * 1024, kLinearSums = 256 * 1024;  // of any precision; what of it has sums
// What products with this weight need: many rows find two panels of compact ones unpacked behind the sums.
constexpr size_t linear_scratch(const PackedLinear& w) {
  const size_t unpacking = kLinearSums + size_t(w.inputs) * 2 * kPanel * 2;
  return w.precision == Precision::kCompact && unpacking > kLinearScratch ? unpacking : kLinearScratch;
}
constexpr size_t kAttentionScratch = 576 * 1024;

const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_vnni_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

}  // namespace foretoken
