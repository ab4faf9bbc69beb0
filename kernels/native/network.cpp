#include "network.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "cache.h"
#include "pack.h"

namespace foretoken {
namespace {

// Up to so many rows every thread prepares a linear's input for itself: cheaper than a phase of its own to share the work. Rows that become
// integers take three times as long.
constexpr int kPrivateRows = 16, kPrivateIntegerRows = 4;
constexpr int private_rows(Precision p) { return is_integer(p) ? kPrivateIntegerRows : kPrivateRows; }
// Of the next linear's weights about so much is fetched while the last panels before it are multiplied, and before it begins up to so much of
// them and of those of the linear behind it together: a part of L2.
constexpr int64_t kReadBehind = 36 * 1024, kReadAhead = 1024 * 1024;
constexpr int64_t kTaken = 1024;  // is taken of ReadAhead at a time, at most
// Up to so many rows a phase's units are reserved for threads, (nearly) all of them.
constexpr int kFewRows = 64;
// Row-local work is handed out in runs of about so many floats.
constexpr int kFloatsPerUnit = 1024;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }
// Of a prepared row.
int64_t row_bytes(const PackedLinear& weights) {
  const int64_t element = weights.precision == Precision::kFloat32 ? 4 : is_bfloat16(weights.precision) ? 2 : 1;
  const auto bytes = int64_t(round_up(size_t(weights.inputs * element), 64));
  return bytes % 4096 ? bytes : bytes + 64;  // else a column of rows would fall into one set of the cache
}
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

void Network::measure(const PackedLinear& weights, int groups) {
  most_.prepared = std::max(most_.prepared, size_t(groups) * size_t(row_bytes(weights)));
  most_.linear = std::max(most_.linear, linear_scratch(weights));
  most_.runs = std::max(most_.runs, size_t(groups));
  most_.groups = std::max(most_.groups, size_t(groups) * size_t(weights.inputs / kGroup));
}

void Network::set_shortlist(const PackedLinear* weights) {
  shortlist_ = weights;
  measure(*weights);
  find_narrow_buffers();
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
    worker.ahead = {};
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
  if (chooses && batch_.num_logits) {
    const auto links_phase = [&](PhaseKind kind, int units) {
      phases_.push_back({kind, 0, 0, false, Deal::kMostReserved, uint32_t(batch_.num_logits * units), 1});
    };
    if (shortens_) {
      links_phase(PhaseKind::kShorten, 1);
      links_phase(PhaseKind::kRefine, Shortlisted::kMost / Shortlisted::kRun);
    }
    links_phase(PhaseKind::kChoose, 1);
  }

  int next = -1;
  for (int i = int(phases_.size()) - 1; i >= 0; --i) {
    phases_[size_t(i)].next_panels = next;
    if (phases_[size_t(i)].kind == PhaseKind::kPanels) next = i;
  }
}

// A phase of few rows is over soon.
Deal Network::deal_of(int rows) { return rows <= kFewRows ? Deal::kReserved : Deal::kMostReserved; }

// float32 products without a norm read the buffer itself; for few rows each thread prepares them itself.
bool Network::prepares_together(const Op& op) const {
  if (op.kind != OpKind::kLinear || rows_of(op) <= private_rows(weights_of(op).precision)) return false;
  if (is_narrow_[size_t(op.inputs[0])]) return false;
  return op.normalise || weights_of(op).precision != Precision::kFloat32;
}

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

// If all threads keep in step. first: of the units of the run.
ReadBehind Network::read_behind(const Phase& phase, uint32_t first, int thread) const {
  const auto threads = uint32_t(workers_.size()), number = uint32_t(thread);
  const auto weights_at = [this](const Phase& of, uint32_t unit) {
    const PackedLinear& weights = weights_of(ops_[size_t(of.first_op)]);
    return static_cast<const char*>(weights.weights) + unit * packed_bytes(weights.precision, weights.inputs, kPanelsPerUnit * kPanel);
  };
  const auto share = ThreadPool::share(phase.units, phase.deal, threads);
  if (!share.reserved || first != number * share.reserved) return {};
  ReadBehind behind{};
  if (number * share.run < share.shared) {
    behind.panels = int(std::min(share.run, share.shared - number * share.run)) * kPanelsPerUnit;
    behind.more = weights_at(phase, phase.units - share.shared + number * share.run);
  }
  if (phase.next_panels >= 0) {
    const Phase& next = phases_[size_t(phase.next_panels)];
    behind.then = weights_at(next, number * ThreadPool::share(next.units, next.deal, threads).reserved);
  }
  return behind;
}

// Of the thread's parts of the two linears behind the phase. before: what was read ahead until now.
ReadAhead Network::read_ahead(const Phase& phase, int thread, const ReadAhead& before) const {
  const auto end_of_part = [this, thread](const Phase& panels, int64_t most, const char** begin) {
    const PackedLinear& weights = weights_of(ops_[size_t(panels.first_op)]);
    const uint32_t units = ThreadPool::share(panels.units, panels.deal, uint32_t(workers_.size())).reserved;
    const int64_t bytes = int64_t(units) * packed_bytes(weights.precision, weights.inputs, kPanelsPerUnit * kPanel);
    *begin = static_cast<const char*>(weights.weights) + thread * bytes;
    return *begin + std::min(bytes, most);
  };
  const Phase& next = phases_[size_t(phase.next_panels)];
  const char* begin;
  ReadAhead ahead{};
  ahead.end = end_of_part(next, kReadAhead, &begin);
  ahead.at = std::min(begin + kReadBehind, ahead.end);
  const int64_t left = kReadAhead - (ahead.end - begin);
  if (ahead.at < before.at && before.at < ahead.end + kTaken) ahead.at = std::min(before.at, ahead.end);
  if (next.next_panels >= 0) ahead.then_end = end_of_part(phases_[size_t(next.next_panels)], left, &ahead.then);
  return ahead;
}

void Network::run_panels(const Phase& phase, int first, int count, int thread) {
  Worker& worker = workers_[size_t(thread)];
  const Op& op = ops_[size_t(phase.first_op)];
  const PackedLinear& weights = weights_of(op);
  Epilogue epilogue = epilogue_of(op);
  if (op.is_head) {
    epilogue.out = logits_;
    epilogue.out_stride = vocab_size_;
    epilogue.out_rows = logits_rows_.data();
    epilogue.best = wants_best_ ? worker.best.data() : nullptr;
  } else {
    const Place output = place_of(op.output);
    epilogue.out = output.wide;
    epilogue.narrow_out = output.narrow;
    epilogue.out_stride = output.stride;
  }
  const int panels = weights.outputs / kPanel, group_panels = panels / op.groups;
  const int first_panel = first * kPanelsPerUnit, end_panel = std::min(first_panel + count * kPanelsPerUnit, panels);
  make_residual(phase.first_op, first_panel, end_panel - first_panel);
  const ReadBehind behind = read_behind(phase, uint32_t(first), thread);
  for (int panel = first_panel, next; panel < end_panel; panel = next) {
    const int group = panel / group_panels;
    next = std::min((group + 1) * group_panels, end_panel);
    const PreparedRows x = input_of(phase.first_op, group, worker);
    kernels_.linear(weights, x, epilogue, panel, next - panel, next < end_panel ? ReadBehind{} : behind, worker.linear.get<char>(0));
  }
  if (behind.then) worker.ahead = read_ahead(phase, thread, worker.ahead);
}

// What panels of a group read: its run of the input's columns.
PreparedRows Network::input_of(int number, int group, Worker& worker) {
  const Op& op = ops_[size_t(number)];
  const PackedLinear& weights = weights_of(op);
  const int rows = rows_of(op), stride = width(op.inputs[0]), column = group * (stride / op.groups);
  if (weights.precision == Precision::kFloat32 && !op.normalise) {
    return {buffer(op.inputs[0]) + column, int64_t(stride) * 4, nullptr, nullptr, rows};
  }
  if (const Place input = place_of(op.inputs[0]); input.narrow) return {input.narrow + column, input.stride * 2, nullptr, nullptr, rows};
  if (prepares_together(op)) return prepared_together(op, group);
  PreparedRows x = prepared_memory(weights, rows, worker.prepared, worker.scales, worker.input_sums);
  if (worker.prepared_op != number || worker.prepared_group != group) {
    prepare_rows(op, weights, buffer(op.inputs[0]) + column, 0, rows, x, nullptr);
    worker.prepared_op = number;
    worker.prepared_group = group;
  }
  return x;
}

// Memory that all threads share: the rows of a group behind those of the one before it.
PreparedRows Network::prepared_together(const Op& op, int group) {
  const int rows = rows_of(op), first = group * int(round_up(size_t(rows), 16));
  return rows_from(weights_of(op), prepared_memory(weights_of(op), rows, prepared_, scales_, input_sums_), first, rows);
}

// All but where the result goes.
Epilogue Network::epilogue_of(const Op& op) const {
  Epilogue epilogue{};
  if (op.residual >= 0) {
    epilogue.residual = buffer(op.residual);
    epilogue.residual_stride = width(op.residual);
  }
  epilogue.scale = op.scale;
  epilogue.softcap = op.softcap;
  epilogue.function = Function(op.function);
  epilogue.gated = op.gated != 0;
  epilogue.outputs = op.outputs;
  return epilogue;
}

// Rows first .. end - 1 of x: the op's input, or a group's run of its columns.
void Network::prepare_rows(const Op& op, const PackedLinear& weights, const float* x, int first, int end, PreparedRows& rows, ReadAhead* ahead) {
  Prepare prepare = prepare_of(weights, x, width(op.inputs[0]) / op.groups, rows);
  prepare.x_stride = width(op.inputs[0]);
  prepare.normalise = op.normalise != 0;
  prepare.centred = op.centred != 0;
  prepare.norm_weight = op.norm_weight;
  prepare.norm_bias = op.norm_bias;
  prepare.eps = op.eps;
  prepare.ahead = ahead;
  kernels_.prepare(prepare, first, end - first);
}

// Rows of x, one behind the other, as these weights read them.
Prepare Network::prepare_of(const PackedLinear& weights, const float* x, int width, const PreparedRows& rows) {
  Prepare prepare{};
  prepare.x = x;
  prepare.x_stride = prepare.width = width;
  prepare.precision = weights.precision;
  prepare.inputs = weights.inputs;
  prepare.data = const_cast<void*>(rows.data);
  prepare.stride = rows.stride;
  prepare.scales = const_cast<float*>(rows.scales);
  prepare.input_sums = const_cast<int32_t*>(rows.input_sums);
  return prepare;
}

PreparedRows Network::prepared_memory(const PackedLinear& weights, int rows, Scratch& data, Scratch& scales, Scratch& input_sums) {
  return {data.get<char>(0), row_bytes(weights), scales.get<float>(0), input_sums.get<int32_t>(0), rows};
}

PreparedRows Network::rows_from(const PackedLinear& weights, const PreparedRows& all, int first, int count) {
  const int64_t groups = has_codes(weights.precision) ? weights.inputs / kGroup : 1;
  return {static_cast<const char*>(all.data) + first * all.stride, all.stride, all.scales + first, all.input_sums + first * groups, count};
}

}  // namespace foretoken
