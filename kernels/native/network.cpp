#include "network.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "cache.h"

namespace foretoken {
namespace {

// Up to so many rows a phase's units are reserved for threads, (nearly) all of them.
constexpr int kFewRows = 64;
// Row-local work is handed out in runs of about so many floats.
constexpr int kFloatsPerUnit = 1024;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int div_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

bool reads_other_rows(OpKind kind) { return kind == OpKind::kGatherRows || kind == OpKind::kLocalConv; }
bool is_row_local(OpKind kind) {
  return kind != OpKind::kLinear && kind != OpKind::kAttention && kind != OpKind::kExperts && !is_recurrent(kind);
}

}  // namespace

void* Scratch::reserve(size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = round_up(bytes, 4096);
    memory_.reset(std::aligned_alloc(64, bytes_));
    if (!memory_) {
      bytes_ = 0;
      throw std::bad_alloc();
    }
  }
  return memory_.get();
}

Network::Network(const NetworkSpec& spec, const Kernels& kernels)
    : ops_(spec.ops, spec.ops + spec.num_ops),
      widths_(spec.widths, spec.widths + spec.num_buffers),
      places_(spec.places, spec.places + spec.num_buffers),
      vocab_size_(spec.vocab_size),
      cache_type_(CacheType(spec.cache_type)),
      kernels_(kernels),
      buffers_(size_t(spec.num_buffers)),
      plan_of_op_(size_t(spec.num_ops)),
      place_widths_(size_t(spec.num_places)),
      arena_(size_t(spec.num_places)) {
  for (size_t i = 0; i < places_.size(); ++i) {
    int& widest = place_widths_[size_t(places_[i])];
    widest = std::max(widest, widths_[i]);
  }
  for (const Op& op : ops_) {
    if (op.kind == OpKind::kLinear) {
      measure(*op.weights, op.groups);
    } else if (op.kind == OpKind::kAttention) {
      most_.queries = std::max(most_.queries, size_t(std::max(op.num_heads, 1)) * round_up(size_t(op.k_dim), 32) * sizeof(float));
    } else if (op.kind == OpKind::kTopK) {
      most_.ranked = std::max(most_.ranked, size_t(width(op.inputs[0])));
    } else if (op.kind == OpKind::kLowRank) {
      most_.ranks = std::max(most_.ranks, size_t(op.low_rank->num_weights) * size_t(op.low_rank->rank));
    } else if (is_recurrent(op.kind)) {
      measure_recurrence(op);
    } else if (op.kind == OpKind::kExperts) {
      for (int i = 0; i < 2 * op.num_experts; ++i) measure(op.weights[i]);
      most_.ranked = std::max(most_.ranked, size_t(op.num_experts));
      most_.routed = std::max(most_.routed, size_t(op.num_experts));
      most_.experts = std::max(most_.experts, size_t(op.outputs));
      most_.expert_width = std::max(most_.expert_width, size_t(op.weights[0].outputs / 2));
      most_.expert_out = std::max(most_.expert_out, size_t(op.weights[op.num_experts].outputs));
    }
  }
  find_narrow_buffers();
}

Network::~Network() = default;

void Network::set_shortlist(const PackedLinear* weights) {
  shortlist_ = weights;
  measure(*weights);
  find_narrow_buffers();
}

// Experts are read by who goes to them: more tokens read more. Codes are unpacked for few rows sooner than for a tile.
int Network::most_at_once() const {
  const bool takes_time = std::any_of(ops_.begin(), ops_.end(), [](const Op& op) {
    if (op.kind != OpKind::kLinear) return op.kind == OpKind::kExperts;
    return op.weights->precision == Precision::kFloat32 || has_codes(op.weights->precision);
  });
  return takes_time ? 1 : kernels_.tile_rows;
}

// What is only read by products in bfloat16, and is as wide as they take, may be stored in it: the same rounding, sooner.
void Network::find_narrow_buffers() {
  may_be_narrow_.assign(buffers_.size(), false);
  for (const Op& op : ops_) {
    if (op.output < 0) continue;
    may_be_narrow_[size_t(op.output)] = (op.kind == OpKind::kLinear && !op.is_head) || (op.kind == OpKind::kAttention && op.num_heads) ||
                                       op.kind == OpKind::kGatedDelta;
  }
  for (const Op& op : ops_) {
    for (int i = 0; i < op.num_inputs; ++i) {
      const int id = op.inputs[i];
      const bool rounds = op.kind == OpKind::kLinear && !op.normalise && is_bfloat16(op.weights->precision) &&
                          !(op.is_head && shortlist_);
      if (!rounds || width(id) != op.groups * op.weights->inputs) may_be_narrow_[size_t(id)] = false;
    }
    if (op.residual >= 0) may_be_narrow_[size_t(op.residual)] = false;
  }
}

Network::Place Network::place_of(int id) const {
  const int columns = width(id);
  if (!is_narrow_[size_t(id)]) return {buffer(id), nullptr, columns};
  // else a column of rows would fall into one set of the cache
  return {nullptr, reinterpret_cast<uint16_t*>(buffer(id)), columns * 2 % 4096 ? columns : columns + 32};
}

// ---- one pass

void Network::run(const RunRequest& request) {
  const ThreadPool::Turn turn = ThreadPool::instance().take_turn();
  logits_ = request.logits;
  wants_best_ = true;
  shortens_ = false;
  logits_rows_.assign(size_t(request.batch.num_logits), -1);
  for (int i = 0; i < request.num_full; ++i) logits_rows_[size_t(request.full_logits[i])] = i;
  start(request, false);
  ThreadPool::instance().run(*this, turn);
  finish(request);
}

void Network::start(const RunRequest& request, bool chooses) {
  batch_ = request.batch;
  cache_ = request.cache;
  workers_.resize(size_t(ThreadPool::instance().size()));
  const size_t rows = round_up(size_t(std::max(batch_.num_tokens, batch_.num_logits)), 16);

  // 1. memory of the buffers: the caller's where it gave some
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const size_t place = size_t(places_[i]);
    buffers_[i] = arena_[place].get<float>(rows * size_t(place_widths_[place]));
  }
  is_narrow_ = may_be_narrow_;
  for (int i = 0; i < request.num_bound; ++i) {
    buffers_[size_t(request.bound[i])] = request.bound_memory[i];
    is_narrow_[size_t(request.bound[i])] = false;
  }

  // 2. memory that all threads share, made before any of them starts
  const size_t visits = rows * most_.experts, prepared = visits ? visits + 16 : rows;  // an expert's rows begin anywhere
  prepared_.get<char>(prepared * most_.prepared);
  scales_.get<float>(prepared * most_.runs);
  input_sums_.get<int32_t>(prepared * most_.groups + 1);
  expert_inner_.get<float>(visits * most_.expert_width);
  expert_results_.get<float>(visits * most_.expert_out);
  queries_.get<char>(rows * most_.queries + 1);
  if (most_.ranks) enter_adapters();
  for (Worker& worker : workers_) {
    worker.prepared_op = -1;
    worker.ahead = &ThreadPool::instance().ahead(int(&worker - workers_.data()));
    worker.attention_op = -1;
    worker.prepared.get<char>(kPrivateRows * most_.prepared);
    worker.scales.get<float>(kPrivateRows);
    worker.input_sums.get<int32_t>(kPrivateRows * most_.groups + 1);
    worker.linear.get<char>(most_.linear);
    worker.attention.get<char>(kAttentionScratch);
    worker.ranking.get<int>(most_.ranked);
    worker.scores.get<float>(3 * most_.routed);
    if (wants_best_) worker.best.assign(size_t(batch_.num_logits), Best{-INFINITY, 0.0f, -1, 0});
  }

  // 3. what to do, in phases
  if (most_.convolved || most_.memory) enter_recurrence(request);
  plan_attention();
  plan_phases(chooses);
}

void Network::plan_phases(bool chooses) {
  phases_.clear();
  auto rows_phase = [&](int first, int end, bool prepares, int rows, int floats) {
    if (!rows) return;
    const int per_unit = std::clamp(kFloatsPerUnit / std::max(floats, 1), 1, rows);
    phases_.push_back({PhaseKind::kRows, first, end, prepares, deal_of(rows), uint32_t(div_up(rows, per_unit)), per_unit});
  };
  const int num_ops = int(ops_.size());
  for (int i = 0; i < num_ops;) {
    // A run of row-local ops over the same rows; what reads rows that others made starts a new run.
    int end = i;
    int floats = 0;
    while (end < num_ops && is_row_local(ops_[size_t(end)].kind) && ops_[size_t(end)].for_logits == ops_[size_t(i)].for_logits &&
           !divides_columns(ops_[size_t(end)]) && (end == i || !reads_other_rows(ops_[size_t(end)].kind))) {
      floats += width(ops_[size_t(end)].output);
      ++end;
    }
    const bool prepares = end < num_ops && prepares_together(ops_[size_t(end)]);  // with the ops before it, row by row
    if (prepares) floats += width(ops_[size_t(end)].inputs[0]);
    if (end > i || prepares) rows_phase(i, end, prepares, rows_of(ops_[size_t(i)]), floats);
    i = end;
    if (i == num_ops) break;

    const Op& op = ops_[size_t(i)];
    if (op.kind == OpKind::kLinear) {
      const int panels = op.weights->outputs / kPanel;
      if (rows_of(op)) phases_.push_back({PhaseKind::kPanels, i, i, false, deal_of(rows_of(op)), uint32_t(div_up(panels, kPanelsPerUnit)), 0});
      ++i;
    } else if (op.kind == OpKind::kAttention) {
      const int rotations = batch_.num_tokens * op.kv_heads;
      const AttentionPlan* plan = plan_of_op_[size_t(i)];
      if (plan && plan->is_short()) {
        phases_.push_back({PhaseKind::kHeads, i, i, false, Deal::kReserved, uint32_t(op.kv_heads), 0});
      } else {
        phases_.push_back({PhaseKind::kRotate, i, i, false, deal_of(batch_.num_tokens), uint32_t(rotations), 0});
        if (plan) phases_.push_back({PhaseKind::kAttend, i, i, false, deal_of(batch_.num_tokens), uint32_t(plan->num_units()), 0});
      }
      ++i;
    } else if (op.kind == OpKind::kExperts) {
      plan_experts(i);
      ++i;
    } else if (op.kind == OpKind::kLowRank) {
      plan_low_rank(i);
      ++i;
    } else if (is_recurrent(op.kind)) {
      plan_recurrence(i);
      ++i;
    }
  }
  if (chooses && batch_.num_logits) plan_links();

  int next = -1;
  for (int i = int(phases_.size()) - 1; i >= 0; --i) {
    phases_[size_t(i)].next_panels = next;
    if (phases_[size_t(i)].kind == PhaseKind::kPanels) next = i;
  }
}

// A phase of few rows is over soon.
Deal Network::deal_of(int rows) { return rows <= kFewRows ? Deal::kReserved : Deal::kMostReserved; }

void Network::finish(const RunRequest& request) {
  for (int r = 0; r < batch_.num_logits; ++r) {
    Best best{-INFINITY, 0.0f, 0, 0};
    bool first = true;
    for (const Worker& worker : workers_) {
      const Best& other = worker.best[size_t(r)];
      best.poison += other.poison;
      if (other.index < 0) continue;
      if (first || other.value > best.value || (other.value == best.value && other.index < best.index)) {
        best.value = other.value;
        best.index = other.index;
        first = false;
      }
    }
    request.argmax[r] = best.index;
    request.top[r] = best.value + best.poison;
  }
}

// ---- phases

void Network::run(int phase_index, uint32_t first, uint32_t count, int thread) {
  const Phase& phase = phases_[size_t(phase_index)];
  Worker& worker = workers_[size_t(thread)];
  const Op& op = ops_[size_t(phase.first_op)];
  const int end = int(first + count);
  switch (phase.kind) {
    case PhaseKind::kRows: {
      const int rows = rows_of(op);
      run_rows(phase, int(first) * phase.rows_per_unit, std::min(end * phase.rows_per_unit, rows), worker);
      break;
    }
    case PhaseKind::kPanels:
      run_panels(phase, int(first), int(count), thread);
      break;
    case PhaseKind::kRotate: {
      const AttentionOp attention = attention_of(op, worker);
      if (worker.attention_op != phase.first_op) {
        const AttentionPlan* plan = plan_of_op_[size_t(phase.first_op)];
        worker.attention_op = phase.first_op;
        worker.cache_ahead = plan && plan->num_units() ? plan->ahead_of(first_unit(*plan, thread)) : CacheAhead{};
      }
      for (int i = int(first); i < end; ++i) {
        // Head by head: neighbouring tokens write the same lines of the cache, which two cores would take from each other.
        kernels_.rotate_and_write(attention, batch_, i % batch_.num_tokens, i / batch_.num_tokens, worker.cache_ahead);
      }
      break;
    }
    case PhaseKind::kAttend: {
      const AttentionPlan& plan = *plan_of_op_[size_t(phase.first_op)];
      for (int unit = int(first); unit < end; ++unit) {
        const bool is_known = worker.attention_op == phase.first_op && unit == first_unit(plan, thread);
        attend(phase, attention_of(op, worker), unit, is_known ? worker.cache_ahead : plan.ahead_of(unit), worker);
      }
      break;
    }
    case PhaseKind::kHeads: {
      const AttentionOp attention = attention_of(op, worker);
      for (int head = int(first); head < end; ++head) {
        CacheAhead ahead = plan_of_op_[size_t(phase.first_op)]->ahead_of(head);
        for (int token = 0; token < batch_.num_tokens; ++token) kernels_.rotate_and_write(attention, batch_, token, head, ahead);
        attend(phase, attention, head, ahead, worker);
      }
      break;
    }
    case PhaseKind::kDown:
      run_down(op, int(first), end);
      break;
    case PhaseKind::kConvolve:
      for (int unit = int(first); unit < end; ++unit) convolve_causally(op, unit);
      break;
    case PhaseKind::kScan:
      for (int unit = int(first); unit < end; ++unit) scan(op, unit, worker);
      break;
    case PhaseKind::kRoute:
    case PhaseKind::kGroup:
    case PhaseKind::kEnterExperts:
    case PhaseKind::kExpertsIn:
    case PhaseKind::kBetween:
    case PhaseKind::kExpertsOut:
    case PhaseKind::kMix:
      run_experts(phase, int(first), end, worker);
      break;
    case PhaseKind::kShorten:
      for (int row = int(first); row < end; ++row) shorten(row);
      break;
    case PhaseKind::kRefine:
      for (int unit = int(first); unit < end; ++unit) refine_run(unit, worker);
      break;
    case PhaseKind::kChoose:
      for (int row = int(first); row < end; ++row) choose(row, worker);
      break;
  }
}

}  // namespace foretoken
