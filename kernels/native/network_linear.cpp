// Linears in a network: who multiplies which panels, the rows that they read, and weights that are fetched before they are.
#include <algorithm>

#include "network.h"
#include "pack.h"

namespace foretoken {
namespace {

// Of the next linear's weights about so much is fetched while the last panels before it are multiplied, and before it begins up to so much of
// them and of those of the linear behind it together: a part of L2.
constexpr int64_t kReadBehind = 36 * 1024, kReadAhead = 1024 * 1024;
// Bytes of a prepared row; of a unit of panels.
int64_t row_bytes(const PackedLinear& weights) {
  const int64_t element = weights.precision == Precision::kFloat32 ? 4 : is_bfloat16(weights.precision) ? 2 : 1;
  const int64_t bytes = (weights.inputs * element + 63) / 64 * 64;
  return bytes % 4096 ? bytes : bytes + 64;  // else a column of rows would fall into one set of the cache
}
int64_t unit_bytes(const PackedLinear& weights) { return packed_bytes(weights.precision, weights.inputs, kPanelsPerUnit * kPanel); }

}  // namespace

void Network::measure(const PackedLinear& weights, int groups) {
  most_.prepared = std::max(most_.prepared, size_t(groups) * size_t(row_bytes(weights)));
  most_.linear = std::max(most_.linear, linear_scratch(weights));
  most_.runs = std::max(most_.runs, size_t(groups));
  most_.groups = std::max(most_.groups, size_t(groups) * size_t(weights.inputs / kGroup));
}

// float32 products without a norm read the buffer itself; for few rows each thread prepares them itself.
bool Network::prepares_together(const Op& op) const {
  if (op.kind != OpKind::kLinear || rows_of(op) <= (is_integer(weights_of(op).precision) ? kPrivateIntegerRows : kPrivateRows)) return false;
  if (is_narrow_[size_t(op.inputs[0])]) return false;
  return op.normalise || weights_of(op).precision != Precision::kFloat32;
}

// What is reserved of a linear for a thread.
Network::Part Network::part_of(const Phase& panels, int thread) const {
  const auto run = ThreadPool::instance().reserved(panels.units, panels.deal, thread);
  const PackedLinear& weights = weights_of(ops_[size_t(panels.first_op)]);
  return {static_cast<const char*>(weights.weights) + run.first * unit_bytes(weights), run.count * unit_bytes(weights)};
}

// If all threads keep in step. first: of the units of the run.
ReadBehind Network::read_behind(const Phase& phase, uint32_t first, int thread) const {
  const ThreadPool& pool = ThreadPool::instance();
  const auto mine = pool.reserved(phase.units, phase.deal, thread);
  if (!mine.count || first != mine.first) return {};
  const PackedLinear& weights = weights_of(ops_[size_t(phase.first_op)]);
  const auto more = pool.claimed_next(phase.units, phase.deal, thread);
  ReadBehind behind{int(more.count) * kPanelsPerUnit, static_cast<const char*>(weights.weights) + more.first * unit_bytes(weights), nullptr};
  if (phase.next_panels >= 0) behind.then = part_of(phases_[size_t(phase.next_panels)], thread).begin;
  return behind;
}

// Of the thread's parts of the two linears behind the phase. before: what was read ahead until now.
ReadAhead Network::read_ahead(const Phase& phase, int thread, const ReadAhead& before) const {
  const Phase& next = phases_[size_t(phase.next_panels)];
  const auto [begin, bytes] = part_of(next, thread);
  ReadAhead ahead{begin + std::min(bytes, kReadBehind), begin + std::min(bytes, kReadAhead), nullptr, nullptr};
  if (ahead.at < before.at && before.at <= ahead.end) ahead.at = before.at;
  if (next.next_panels >= 0) {
    const Part second = part_of(phases_[size_t(next.next_panels)], thread);
    ahead.then = second.begin;
    ahead.then_end = second.begin + std::min(second.bytes, kReadAhead - std::min(bytes, kReadAhead));
  }
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
  if (behind.then) *worker.ahead = read_ahead(phase, thread, *worker.ahead);
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
  const int rows = rows_of(op), first = group * ((rows + 15) / 16 * 16);
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
