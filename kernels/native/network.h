// A program bound to its packed weights, as Python hands it over: ops over numbered buffers. All structs are plain data.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "expert_routes.h"
#include "kernels.h"
#include "ngram_table.h"
#include "recurrence_plan.h"
#include "sampling.h"
#include "thread_pool.h"

namespace foretoken {

enum class OpKind : int32_t {
  kEmbed = 0,
  kNorm = 1,
  kLinear = 2,
  kAttention = 3,
  kActivation = 4,
  kAdd = 5,
  kConcat = 6,
  kGatherRows = 7,
  kScale = 8,
  kSoftcap = 9,
  kTopK = 10,
  kExperts = 11,
  kLocalConv = 12,
  kLowRank = 13,  // right before the product whose residual it is
  kCausalConv = 14,
  kGatedDelta = 15,
  kStateSpace = 16,
};

inline bool is_recurrent(OpKind kind) { return kind >= OpKind::kCausalConv && kind <= OpKind::kStateSpace; }

constexpr int kMaxInputs = 8;

// Panels of a unit of work: few, so that threads end together; a multiple of two, so that gate and up stay together.
constexpr int kPanelsPerUnit = 2;

// One op. Fields that its kind does not name are unused; buffers are numbers, -1 = none.
struct Op {
  OpKind kind;
  int32_t num_inputs;
  int32_t inputs[kMaxInputs];
  int32_t output;
  int32_t second_output;        // top-k: the values; columns go to output, both as floats
  int32_t residual;             // linear, low rank
  int32_t for_logits;           // 1: rows are those whose logits are wanted (N), not all tokens (T)
  int32_t is_head;              // linear: its result is the logits
  int32_t normalise;            // linear: an RMSNorm of the input comes first
  int32_t centred;              // norm, linear: it is a layer norm
  int32_t function;             // Function: of an activation or behind a linear
  int32_t gated;
  int32_t outputs;              // linear: columns that exist, before gating; top-k: k; experts: how many a row has; convolutions: taps
  int32_t num_experts;          // of experts; their weights: gate and up of each, then down of each
  int32_t renormalise;          // experts: the weights of a row's experts add up to 1, before they are scaled
  int32_t sigmoid;              // experts: scores are sigmoids, else a softmax
  int32_t top_groups;           // experts: a row's come from so many groups
  int32_t groups;               // norm, linear, concat: runs of columns, each by itself; experts: of neighbours; local conv: runs of columns that
                                // share a kernel, ...
  int32_t first_kernel;         // ... the kernels of the first tap being these columns of the second input
  float eps, scale, softcap;    // scale: embed, scale, attention, behind a linear, weights of experts
  float least, most;            // state space: of a token's step
  const float* norm_weight;     // norm, linear, gated delta; convolutions: [taps][width]; scale: [1] or null; experts: scales or null
  const float* norm_bias;       // norm, linear; causal conv: bias; experts: null, or what scores are corrected by for choosing
  const PackedLinear* weights;  // linear, embed, experts
  const LowRank* low_rank;
  int32_t layer, num_heads, kv_heads, k_dim, v_dim, window, rope_half;  // attention; memories: value heads and key heads
  const float* rope;            // [positions][2 * rope_half]
  const float* growth;          // [positions] or null
  const float* q_norm;
  const float* k_norm;
  int32_t norm_last;            // attention: these norms come behind the rotation
  int32_t values_in_keys;       // attention: as in KVLayerSpec
  const float* sinks;           // attention: [num_heads] or null
  const float* rate;            // gated delta, state space: [num_heads] of how fast its memory fades, ...
  const float* step;            // ... and what is added to each token's
  const float* skip;            // state space: [num_heads]
};

struct NetworkSpec {
  const Op* ops;
  int32_t num_ops;
  const int32_t* widths;        // [num_buffers] columns of each buffer
  const int32_t* places;        // [num_buffers] buffers of one place share memory, one after the other
  int32_t num_buffers;
  int32_t num_places;
  int32_t vocab_size;
  int32_t cache_type;           // CacheType
  int32_t isa;
};

// What one pass is asked for.
struct RunRequest {
  BatchView batch;
  char* const* cache;           // [layers] block 0 of each layer
  char* const* states;          // [recurrent layers] slot 0 of each, null = none are kept
  int32_t num_guesses;          // that a slot keeps
  int32_t num_bound;            // buffers in the caller's memory: filled by it, or to be read by it after the pass
  const int32_t* bound;         // [num_bound]
  float* const* bound_memory;   // [num_bound] [T][width]
  int32_t num_full;             // logits rows wanted whole
  const int64_t* full_logits;   // [num_full] indices into logits_indices
  float* logits;                // [num_full][vocab_size]
  int64_t* argmax;              // [N]
  float* top;                   // [N]
};

struct ChainRequest {
  RunRequest run;               // full_logits, logits, argmax and top are not used
  const int64_t* counts;        // [N] tokens wanted of each chain, at least 1
  int32_t steps;                // the largest of them
  int64_t* token_ids;           // [N][steps]
  float* confidence;            // [N][steps]
  int32_t choosable;            // token ids below it may be chosen
  const float* temperatures;    // [N], 0 = the best; null = the best for all
  const int64_t* streams;       // [N] noise of each chain, and ...
  const int64_t* first_positions;  // ... the absolute position of its first token
  float* logits;                // [N][steps][vocab_size] or null
  const int64_t* token_map;     // [vocab_size] token id of each column of the logits; null = the column
  int32_t limits_columns;       // whether some of these ids are not below choosable
  int32_t input, state;         // buffers: a token's row of `state` is the next one's row of `input`; -1 = no such buffers
};

// What else is wanted of chains: for each place so many of the best tokens but for the one that was chosen, in their order.
struct NextBest {
  int count = 0;
  int32_t* token_ids = nullptr;  // [N][steps][count], -1 = there is none
};

// One of them, verified beside the chain: another token in the place of one of its guesses.
struct Alternate {
  int32_t token;
  int32_t place;                // of that guess, from 0 on
};

// What a row may go on with: a chain, or anything that leaves it after some of its tokens.
struct Guess {
  const int32_t* token_ids = nullptr;
  int count = 0;
  int source = 0;         // RoundsSource
  float expected = 0.0f;  // how many will stand, by the table, ...
  float gain = 0.0f;      // ... and as far as that is trusted, beyond their price
  const Alternate* alternates = nullptr;
  int num_alternates = 0;
};

enum RoundsSource : int32_t { kFromPrediction = 0, kFromText = 1, kFromTable = 2, kFromDraft = 3 };

// One row of a call in rounds, in and out: ROW of kernels/rounds.py is its mirror.
struct RoundsRow {
  int32_t* text;                // [num_known + most_new] token ids: those that are known, and room for those that come
  const int32_t* table;         // [num_blocks] of the row's places
  const int32_t* prediction;    // [num_predicted]
  const int32_t* stops;         // [num_stops] tokens behind which nothing comes
  int32_t num_prompt;
  int32_t num_known;            // all but the last are in the cache
  int32_t most_new;             // tokens that may come, at least 1
  int32_t num_blocks;
  int32_t num_places;           // in these blocks, at least num_known
  int32_t num_stops;
  int32_t num_predicted;
  int32_t cursor;               // prediction's token that should come next; while lost, where it was left
  int32_t is_lost;
  int32_t num_followed;         // tokens that the cursor has seen
  int32_t predicted_k;          // most guesses from the prediction, ...
  int32_t lookup_k;             // ... and, where that has none, from the text, ...
  int32_t lookup_min, lookup_max;  // ... where its last n tokens were before: the longest n in this range, ...
  int32_t latest;               // ... there the first place, or the latest
  int32_t table_k;              // most guesses from the table, where more is expected of it than of the text
  float text_gain;              // tokens that a whole guess from the text brings beyond its price
  float trust;                  // of what the table expects to be accepted, the share that is
  int32_t draft_k;              // most guesses from the drafter; a row that has some has none from elsewhere
  int32_t adapter;              // slot of its adapter, 0 = none
  int32_t num_read;             // tokens whose entries are in the drafter's cache, in and out
  int32_t num_new;              // out: tokens that have come
  int32_t has_ended;            // out: with a stop, or with the last one that may come
  int32_t has_failed;           // out: behind these its logits were not finite
  SampleRow sampling;           // its key: the stream of the noise; its logits and places are filled in

  int length() const { return num_known + num_new; }
  // Guesses that its end and its places leave.
  int room() const { return std::max(0, std::min(most_new - num_new - 1, num_places - length())); }
};
static_assert(sizeof(RoundsRow) == 256, "kernels/rounds.py lays it out the same way");

// A guess, and what became of it: RECORD of kernels/rounds.py is its mirror.
struct RoundsDraft {
  int32_t row;
  int32_t source;               // RoundsSource
  int32_t first;                // how many tokens had come before it
  int32_t drafted, accepted;
  int32_t emitted;              // accepted ones before the row's end
  float expected;               // accepted ones, by the table; 0 = not from there
};

class Network;

// A network that guesses between the passes of rounds, in a cache of its own behind the rows' blocks.
struct RoundsDrafter {
  Network* network;
  char* const* cache;           // as in RunRequest
  int32_t choosable;            // token ids below it may be guessed
  int32_t readable;             // texts of ids below it can be read, ...
  int32_t max_length;           // ... and only if they are shorter than this
  int32_t samples;              // whether a row's guesses are drawn as its tokens are; else they are the best
  float threshold;              // the first guess less likely than this is the last of its chain
};

struct RoundsRequest {
  char* const* cache;           // as in RunRequest
  RoundsRow* rows;              // [num_rows]
  const RoundsDrafter* drafter;  // null = no row has a draft_k
  NgramTable table;             // of all rows
  const float* prices;          // [num_prices] of 0, 1, ... guesses from there: tokens that they must bring
  int32_t num_prices;           // no row has as many guesses from there
  int32_t num_rows;
  int32_t most_rounds;
  int32_t most_tokens;          // of one pass, at least num_rows
  double most_seconds;          // after which no further round begins
  int32_t ends_with_row;        // no further round, please, once a row has ended, ...
  const int32_t* interrupt;     // ... or this is not 0: another thread may write it
  RoundsDraft* drafts;          // [most_rounds * num_rows], out
  float* seconds;               // [most_rounds] of each pass, out
  float* draft_seconds;         // [most_rounds] of the drafter before it, out
  int32_t* tokens;              // [most_rounds] of each pass, out
  int32_t num_drafts, num_rounds;  // out
};

// Memory aligned to cache lines that only grows; new memory is not initialised.
class Scratch {
 public:
  template <typename T>
  T* get(size_t count) {
    return static_cast<T*>(reserve(count * sizeof(T)));
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  void* reserve(size_t bytes);
  std::unique_ptr<void, Free> memory_;
  size_t bytes_ = 0;
};

class Network : private Job {
 public:
  explicit Network(const NetworkSpec& spec, const Kernels& kernels);
  ~Network() override;

  // From now on the head of a chain is this one: weights of the head's own shape that take less reading. Where its scores are the
  // best, or decide a draw, they are computed again, from the head's own weights. In the caller's memory.
  void set_shortlist(const PackedLinear* weights);

  void run(const RunRequest& request);
  void run_chain(const ChainRequest& request);
  // Of at least one chain. wants_confidence: else that of a greedy token may be 1 wherever scores are finite.
  void run_chain(const ChainRequest& request, const ThreadPool::Turn& turn, bool wants_confidence = true, const NextBest& next_best = {});
  void run_rounds(RoundsRequest& request);
  // Tokens that a pass may have without taking much longer than with one.
  int most_at_once() const;

  // Bytes of a slot of one recurrent layer with so many guesses, a multiple of 64.
  int64_t state_slot_bytes(int layer, int num_guesses) const;

 private:
  // Up to so many rows every thread prepares a linear's input for itself: cheaper than a phase of its own to share the work. Rows that become
  // integers take three times as long.
  static constexpr int kPrivateRows = 16, kPrivateIntegerRows = 4;

  enum class PhaseKind {
    kRows, kPanels, kRotate, kAttend, kHeads,
    kDown,  // network_adapters.cpp
    kConvolve, kScan,  // network_recurrence.cpp
    kRoute, kGroup, kEnterExperts, kExpertsIn, kBetween, kExpertsOut, kMix,  // network_experts.cpp, in this order
    kShorten, kRefine, kChoose  // network_chain.cpp
  };
  struct Phase {
    PhaseKind kind;
    int first_op, end_op;  // kRows: row-local ops in a row, end_op itself a linear whose input is prepared with them if `prepares`
    bool prepares;
    Deal deal;
    uint32_t units;
    int rows_per_unit;
    int next_panels = -1;  // the next phase of kPanels, -1 = there is none
  };
  struct Worker {
    Scratch prepared, scales, input_sums, linear, attention, sampling, ranking, scores, by_token, panels, recurrence;
    int prepared_op = -1, prepared_group = 0;  // whose input `prepared` holds, and which run of its columns
    ReadAhead* ahead = nullptr;  // the pool's
    CacheAhead cache_ahead{};  // of the first unit of attention that the thread will probably run ...
    int attention_op = -1;     // ... for this op
    std::vector<Best> best;
  };

  // Packed weights.
  struct Part {
    const char* begin;
    int64_t bytes;
  };
  // Where a buffer lies, as floats or as bfloat16.
  struct Place {
    float* wide;
    uint16_t* narrow;
    int64_t stride;  // elements
  };

  int num_phases() const override { return int(phases_.size()); }
  uint32_t num_units(int phase) const override { return phases_[size_t(phase)].units; }
  Deal deal(int phase) const override { return phases_[size_t(phase)].deal; }
  void run(int phase, uint32_t first, uint32_t count, int thread) override;

  // A link of a chain: one token for each logits row.
  struct Link {
    int token;
    float confidence;
    float temperature;
    int64_t key;                        // of the noise, where the temperature is not 0
  };
  // Panels of a row whose scores by the shortlist are the best.
  struct Shortlisted {
    static constexpr int kMost = 64, kRun = 16;  // a run of them is a unit of work
    int count;
    int32_t panels[kMost];
  };
  // What a link chooses from.
  struct Choosable {
    const float* scores;
    int count;
  };

  void measure(const PackedLinear& weights, int groups = 1);
  void start(const RunRequest& request, bool chooses);
  void plan_phases(bool chooses);
  void plan_attention();
  void finish(const RunRequest& request);
  void run_rows(const Phase& phase, int first, int end, Worker& worker);
  void run_panels(const Phase& phase, int first, int count, int thread);
  Part part_of(const Phase& panels, int thread) const;
  ReadBehind read_behind(const Phase& phase, uint32_t first, int thread) const;
  ReadAhead read_ahead(const Phase& phase, int thread, const ReadAhead& before) const;
  void plan_experts(int op);
  void run_experts(const Phase& phase, int first, int end, Worker& worker);
  PreparedRows visits_from(const PackedLinear& weights, int visit, int count);
  void visit_experts(const Op& op, const PackedLinear* experts, bool gated, float* to, int first, int end, Worker& worker);
  void enter_adapters();
  bool divides_columns(const Op& op) const;
  void plan_low_rank(int op);
  void run_down(const Op& op, int first, int end);
  void make_residual(int product, int first_panel, int num_panels);
  void run_low_rank_on_rows(const Op& op, int first, int end);
  template <typename F>
  void for_slots(int first, int end, F&& act) const;
  void go_down(const Op& op, int first, int end, int first_rank, int end_rank);
  void go_up(const Op& op, int first, int end, int first_column, int end_column);
  void plan_links();
  void shorten(int row);
  void refine_run(int unit, Worker& worker);
  void choose(int row, Worker& worker);
  void find_next_best(int row, const Choosable& from, int chosen);
  void refine(int row, const int32_t* panels, int count, Worker& worker);
  int raced_with(int64_t token, int32_t* panels) const;
  Choosable choosable(int row, Worker& worker) const;
  int64_t draw(const Choosable& from, const Link& link, Worker& worker);
  void draw(const RoundsRow& row, const Guess& guess, const float* logits, int64_t* chosen);
  void convolve(const Op& op, int first, int end) const;
  void measure_recurrence(const Op& op);
  void enter_recurrence(const RunRequest& request);
  void plan_recurrence(int op);
  float* slot_of(const Op& op, int slot) const;
  void move_in_cache(int64_t from, int64_t to) const;
  float* kept_guess(const Op& op, int slot, int guess) const;
  void convolve_causally(const Op& op, int unit);
  void leave_tail(const Op& op, const RecurrencePlan::Row& row, int last, int slot, int first, int count);
  const float* convolved_at(const Op& op, const RecurrencePlan::Row& row, int entry);
  void scan(const Op& op, int unit, Worker& worker);
  void run_op_on_rows(const Op& op, int first, int end, Worker& worker);
  static Prepare prepare_of(const PackedLinear& weights, const float* x, int width, const PreparedRows& rows);
  void prepare_rows(const Op& op, const PackedLinear& weights, const float* x, int first, int end, PreparedRows& rows, ReadAhead* ahead);
  static PreparedRows prepared_memory(const PackedLinear& weights, int rows, Scratch& data, Scratch& scales, Scratch& input_sums);
  static PreparedRows rows_from(const PackedLinear& weights, const PreparedRows& all, int first, int count);
  PreparedRows prepared_together(const Op& op, int group);
  PreparedRows input_of(int number, int group, Worker& worker);
  Epilogue epilogue_of(const Op& op) const;
  bool is_frozen(const Op& op) const;
  AttentionOp attention_of(const Op& op, Worker& worker) const;
  int first_unit(const AttentionPlan& plan, int thread) const;
  void attend(const Phase& phase, const AttentionOp& op, int unit, CacheAhead ahead, Worker& worker);
  void find_narrow_buffers();
  const PackedLinear& weights_of(const Op& op) const { return op.is_head && shortens_ ? *shortlist_ : *op.weights; }
  int rows_of(const Op& op) const { return op.for_logits ? batch_.num_logits : batch_.num_tokens; }
  float* buffer(int id) const { return buffers_[size_t(id)]; }
  Place place_of(int id) const;
  int width(int id) const { return widths_[size_t(id)]; }
  bool prepares_together(const Op& op) const;
  static Deal deal_of(int rows);

  std::vector<Op> ops_;
  std::vector<int32_t> widths_, places_;
  int vocab_size_;
  CacheType cache_type_;
  const Kernels& kernels_;
  const PackedLinear* shortlist_ = nullptr;

  // of the pass that is running
  BatchView batch_{};
  char* const* cache_ = nullptr;
  std::vector<float*> buffers_;
  std::vector<Phase> phases_;
  std::vector<Worker> workers_;
  std::vector<int32_t> logits_rows_;  // [N] where each logits row is stored, -1 = nowhere
  float* logits_ = nullptr;
  bool wants_best_ = false;
  bool shortens_ = false;             // whether the head is the shortlist
  bool wants_confidence_ = true;      // of a chain's tokens
  int num_next_best_ = 0;             // as in NextBest
  std::vector<bool> is_narrow_;         // [num_buffers] whether it has bfloat16 now
  std::vector<int32_t> slots_;          // [T] of each token's adapter, 0 = none
  std::vector<AttentionPlan*> plan_of_op_;
  std::vector<AttentionPlan> plans_;
  ExpertRoutes routes_;                 // of the experts whose turn it is
  RecurrencePlan recurrence_;
  char* const* states_ = nullptr;       // as in RunRequest
  int num_guesses_ = 0;
  std::vector<Link> links_;             // [N] of a chain's step
  std::vector<Shortlisted> shortlisted_;  // [N]
  std::vector<int32_t> next_best_;      // [N][num_next_best]
  int choosable_ = 0;
  const int64_t* token_map_ = nullptr;
  bool limits_columns_ = false;
  std::vector<bool> may_be_narrow_;     // [num_buffers] whether nobody reads it but to round it to bfloat16
  std::vector<int> place_widths_;       // of the widest buffer of each place
  struct {
    size_t prepared = 0, queries = 0;   // bytes
    size_t linear = kLinearScratch;     // bytes of a thread, not of a row
    size_t runs = 1, groups = 0, ranked = 0, ranks = 0;  // numbers; runs: of columns that are prepared by themselves
    size_t experts = 0, expert_width = 0, expert_out = 0;  // numbers, of a row that has experts
    size_t routed = 0;                  // experts that there are
    size_t convolved = 0;               // columns
    size_t memory = 0, head = 0;        // numbers of a head with a memory: that, and q, k and results of a token
  } most_;                              // that any op needs for a row
  std::vector<Scratch> arena_;          // one a place
  Scratch prepared_, scales_, input_sums_, queries_, partials_, chain_logits_, chain_inputs_, chain_states_, rounds_logits_,
      rounds_sampling_, expert_inner_, expert_results_, low_rank_inner_, no_token_;
};

}  // namespace foretoken
