// Recurrent layers: a causal convolution in pieces of columns, so that threads share even one token; memories head by head, each head of
// a row a unit that goes through the row's tokens in their order. Nothing else decides about rounding, so a token's numbers
// depend on its sequence alone.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "network.h"

namespace foretoken {
namespace {

constexpr int kConvColumns = 512, kConvTokens = 32;  // of a unit
constexpr int kFetchAhead = 4;                       // tokens
constexpr int kScanRun = 64;                         // tokens made ready at once: a head's q, k and results of so many stay in L2

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int64_t memory_floats(int k_dim, int v_dim) { return k_dim * round_up(v_dim, kMemoryTile); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// What a slot holds, in floats: the state, then what is kept of each guess. A convolution has the inputs of the last tokens, oldest first,
// and of guesses; other layers the memories of their heads, and of a guess all heads' k | v | decay | strength.
struct SlotLayout {
  int64_t state, guess;
  int64_t bytes(int num_guesses) const { return (state + num_guesses * guess) * int64_t(sizeof(float)); }
};

SlotLayout layout_of(const Op& op, int width) {
  if (op.kind == OpKind::kCausalConv) return {round_up(int64_t(op.outputs - 1) * width, 16), round_up(width, 16)};
  const int64_t guess = int64_t(op.kv_heads) * op.k_dim + int64_t(op.num_heads) * (op.v_dim + 2);
  return {op.num_heads * memory_floats(op.k_dim, op.v_dim), round_up(guess, 16)};
}

// What is read soon, and so far from what was read before that no processor guesses it. (asm: gcc drops calls of functions that do nothing
// else.)
void fetch(const float* p, int count) {
  for (int i = 0; i < count; i += 16) asm volatile("prefetcht0 %0" ::"m"(p[i]));
}

// What an op reads of its tokens, for one value head; strides are of tokens. A state space has no gate and no strength.
struct HeadInputs {
  const float *q, *k, *v, *gate, *strength, *fade;
  int64_t stride, number_stride;  // of q, k and v; of strength and fade
};

}  // namespace

int64_t Network::state_slot_bytes(int layer, int num_guesses) const {
  for (const Op& op : ops_) {
    if (is_recurrent(op.kind) && op.layer == layer) return layout_of(op, width(op.output)).bytes(num_guesses);
  }
  return 0;
}

void Network::measure_recurrence(const Op& op) {
  if (op.kind == OpKind::kCausalConv) {
    most_.convolved = std::max(most_.convolved, size_t(width(op.output)));
  } else {
    most_.memory = std::max(most_.memory, size_t(memory_floats(op.k_dim, op.v_dim)));
    most_.head = std::max(most_.head, size_t(2 * round_up(op.k_dim, 16) + round_up(op.v_dim, 16)));
  }
}

// The plan of a pass, and memory for it.
void Network::enter_recurrence(const RunRequest& request) {
  states_ = request.states;
  num_guesses_ = request.num_guesses;
  recurrence_.build(batch_, states_ != nullptr, num_guesses_);
  std::fill_n(no_token_.get<float>(most_.convolved), most_.convolved, 0.0f);
  for (Worker& worker : workers_) worker.recurrence.get<float>(size_t(recurrence_.num_buffers()) * most_.memory + kScanRun * most_.head);
}

void Network::plan_recurrence(int number) {
  const Op& op = ops_[size_t(number)];
  const int rows = int(recurrence_.rows().size());
  if (!rows) return;
  const Deal deal = deal_of(batch_.num_tokens);
  if (op.kind == OpKind::kCausalConv) {
    const int pieces = (width(op.output) + kConvColumns - 1) / kConvColumns, runs = (batch_.num_tokens + kConvTokens - 1) / kConvTokens;
    phases_.push_back({PhaseKind::kConvolve, number, number, false, deal, uint32_t(pieces * runs), 0});
  } else {
    phases_.push_back({PhaseKind::kScan, number, number, false, deal, uint32_t(rows * op.num_heads), 0});
  }
}

float* Network::slot_of(const Op& op, int slot) const {
  return reinterpret_cast<float*>(states_[op.layer] + slot * layout_of(op, width(op.output)).bytes(num_guesses_));
}

float* Network::kept_guess(const Op& op, int slot, int guess) const {
  const SlotLayout layout = layout_of(op, width(op.output));
  return slot_of(op, slot) + layout.state + guess * layout.guess;
}

// ---- the convolution

void Network::convolve_causally(const Op& op, int unit) {
  const int columns = width(op.output), pieces = (columns + kConvColumns - 1) / kConvColumns;
  const int first = unit % pieces * kConvColumns, count = std::min(kConvColumns, columns - first);
  const int first_token = unit / pieces * kConvTokens, end = std::min(first_token + kConvTokens, batch_.num_tokens);
  const CausalConv conv{op.outputs, columns, op.norm_weight, op.norm_bias, Function(op.function)};
  const float* newest_first[kMaxTaps];
  for (int token = first_token; token < end; ++token) {
    const RecurrencePlan::Row& row = recurrence_.row_of(token);
    for (int age = 0, entry = token; age < conv.taps; ++age, entry = recurrence_.before(entry)) {
      newest_first[age] = convolved_at(op, row, entry);
    }
    kernels_.causal_conv(conv, newest_first, first, count, buffer(op.output) + int64_t(token) * columns);
    if (token == row.first) {  // whoever has this token does what is to be done once a row
      if (row.last >= 0) leave_tail(op, row, row.last, row.target, first, count);
      if (row.last_copied >= 0) leave_tail(op, row, row.last_copied, row.copy_slot, first, count);
    }
    if (token >= row.guesses && row.target >= 0) {
      std::memcpy(kept_guess(op, row.target, token - row.guesses) + first, newest_first[0] + first, size_t(count) * sizeof(float));
    }
  }
}

// The input of an entry, or of a token before the row's first.
const float* Network::convolved_at(const Op& op, const RecurrencePlan::Row& row, int entry) {
  const int64_t columns = width(op.output);
  if (entry < 0) return row.source < 0 ? no_token_.get<float>(0) : slot_of(op, row.source) + (op.outputs - 1 + entry) * columns;
  if (recurrence_.is_token(entry)) return buffer(op.inputs[0]) + entry * columns;
  const RecurrencePlan::Accepted& accepted = recurrence_.accepted(entry);
  return kept_guess(op, accepted.slot, accepted.guess);
}

// To a slot: the inputs up to an entry, some columns of them.
void Network::leave_tail(const Op& op, const RecurrencePlan::Row& row, int last, int slot, int first, int count) {
  for (int place = op.outputs - 2, entry = last; place >= 0; --place, entry = recurrence_.before(entry)) {
    float* to = slot_of(op, slot) + int64_t(place) * width(op.output) + first;
    std::memcpy(to, convolved_at(op, row, entry) + first, size_t(count) * sizeof(float));
  }
}

// ---- memories: the gated delta rule, and state spaces

void Network::scan(const Op& op, int unit, Worker& worker) {
  // Heads of a row are far apart, so that threads have equally much to do where one row is long.
  const int num_rows = int(recurrence_.rows().size()), head = unit / num_rows, k_dim = op.k_dim, v_dim = op.v_dim;
  const RecurrencePlan::Row& row = recurrence_.rows()[size_t(unit % num_rows)];
  const bool corrects = op.kind == OpKind::kGatedDelta;
  const int sharing = op.num_heads / op.kv_heads, key_head = head / sharing;  // value heads of a key head
  const int64_t keys = int64_t(op.kv_heads) * k_dim, values = int64_t(op.num_heads) * v_dim;
  const int64_t memory = memory_floats(k_dim, v_dim), k_stride = round_up(k_dim, 16), out_stride = round_up(v_dim, 16);

  const float* x = buffer(op.inputs[0]);
  HeadInputs in{};
  in.stride = width(op.inputs[0]);
  if (corrects) {
    in.q = x + key_head * k_dim, in.k = in.q + keys, in.v = x + 2 * keys + head * v_dim;
    in.gate = buffer(op.inputs[1]) + head * v_dim, in.strength = buffer(op.inputs[2]) + head;
    in.fade = op.num_inputs == 3 ? in.strength + op.num_heads : buffer(op.inputs[3]) + head;
    in.number_stride = width(op.inputs[2]);
  } else {
    in.v = x + head * v_dim, in.k = x + values + key_head * k_dim, in.q = in.k + keys;
    in.fade = buffer(op.inputs[1]) + head;
    in.number_stride = op.num_heads;
  }
  const Place out = place_of(op.output);

  float* const buffers = worker.recurrence.get<float>(0);
  float* const prepared = buffers + size_t(recurrence_.num_buffers()) * most_.memory;
  float* const results = prepared + kScanRun * 2 * k_stride;
  const auto memory_in = [&](int slot) { return slot_of(op, slot) + head * memory; };
  if (row.source < 0) std::fill_n(buffers, memory, 0.0f);

  MemoryStep steps[kScanRun];
  for (int first = row.first_step; first < row.end_step; first += kScanRun) {
    const int count = std::min(kScanRun, row.end_step - first);
    // 1. what each token brings
    for (int i = 0; i < count; ++i) {
      const RecurrencePlan::Step& planned = recurrence_.steps()[first + i];
      MemoryStep& step = steps[i];
      step = {};
      step.from = planned.from == kFromSource ? memory_in(row.source) : buffers + planned.from * memory;
      if (planned.to != kToNowhere) step.to = planned.to == kToTarget ? memory_in(row.target) : buffers + planned.to * memory;
      step.leaves = planned.to == kToTarget;
      if (planned.leaves_target) step.copies[0] = memory_in(row.target);
      if (planned.leaves_copy) step.copies[1] = memory_in(row.copy_slot);
      if (!recurrence_.is_token(planned.entry)) {
        const RecurrencePlan::Accepted& accepted = recurrence_.accepted(planned.entry);
        const float* kept = kept_guess(op, accepted.slot, accepted.guess);
        step.k = kept + key_head * k_dim, step.v = kept + keys + head * v_dim;
        step.decay = kept[keys + values + head], step.strength = kept[keys + values + op.num_heads + head];
        continue;
      }
      const int token = planned.entry;
      if (token + kFetchAhead < row.end) {
        const int64_t ahead = (token + kFetchAhead) * in.stride;
        fetch(in.q + ahead, k_dim), fetch(in.k + ahead, k_dim), fetch(in.v + ahead, v_dim);
        if (corrects) fetch(in.gate + (token + kFetchAhead) * values, v_dim);
      }
      step.q = in.q + token * in.stride, step.k = in.k + token * in.stride, step.v = in.v + token * in.stride;
      const float dt = softplus(in.fade[token * in.number_stride] + op.step[head]);
      if (corrects) {
        float *q = prepared + 2 * i * k_stride, *k = q + k_stride;
        kernels_.to_length(step.q, k_dim, 1.0f / std::sqrt(float(k_dim)), q);
        kernels_.to_length(step.k, k_dim, 1.0f, k);
        step.q = q, step.k = k;
        step.decay = std::exp(op.rate[head] * dt);
        step.strength = 1.0f / (1.0f + std::exp(-in.strength[token * in.number_stride]));
        step.out = results + i * out_stride;
      } else {
        step.strength = std::min(std::max(dt, op.least), op.most);
        step.decay = std::exp(op.rate[head] * step.strength);
        step.skip = op.skip[head];
        step.out = out.wide + token * out.stride + head * v_dim;
      }
      if (token >= row.guesses && row.target >= 0) {
        float* kept = kept_guess(op, row.target, token - row.guesses);
        if (head % sharing == 0) std::copy_n(step.k, k_dim, kept + key_head * k_dim);
        std::copy_n(step.v, v_dim, kept + keys + head * v_dim);
        kept[keys + values + head] = step.decay, kept[keys + values + op.num_heads + head] = step.strength;
      }
    }
    // 2. the memory
    kernels_.memory_steps(corrects, steps, count, k_dim, v_dim);
    // 3. what is read from it
    for (int i = 0; corrects && i < count; ++i) {
      const int token = recurrence_.steps()[first + i].entry;
      if (!recurrence_.is_token(token)) continue;
      const int64_t at = token * out.stride + head * v_dim;
      kernels_.gated_norm(steps[i].out, v_dim, op.norm_weight, op.eps, in.gate + token * values, out.wide + at,
                          out.narrow ? out.narrow + at : nullptr);
    }
  }
}

}  // namespace foretoken
