// What rows' adapters add to products. Many rows are divided among the threads; of few each thread computes some columns, for else one
// would work and the others wait. A row's numbers are the same.
#include <algorithm>

#include "network.h"

namespace foretoken {
namespace {

constexpr int kFewRows = 16;
constexpr int kRowsTogether = 16;  // of many, that go over the factors while their inputs are in the core's own cache
constexpr int kRanksPerUnit = 4, kColumnsPerUnit = 4 * kPanel;

int ranks_of(const LowRank& w) { return w.num_weights * w.rank; }

}  // namespace

// The adapter of each token, and memory for what lies between the factors.
void Network::enter_adapters() {
  slots_.assign(size_t(batch_.num_tokens), 0);
  for (int row = 0; batch_.adapters && row < batch_.num_rows; ++row) {
    std::fill(slots_.begin() + batch_.query_start[row], slots_.begin() + batch_.query_start[row + 1], batch_.adapters[row]);
  }
  low_rank_inner_.get<float>(slots_.size() * most_.ranks);
}

bool Network::divides_columns(const Op& op) const { return op.kind == OpKind::kLowRank && batch_.num_tokens <= kFewRows; }

void Network::plan_low_rank(int number) {
  if (!batch_.num_tokens) return;
  const auto phase = [&](PhaseKind kind, int columns, int per_unit) {
    phases_.push_back({kind, number, number, false, Deal::kReserved, uint32_t((columns + per_unit - 1) / per_unit), 0});
  };
  phase(PhaseKind::kDown, ranks_of(*ops_[size_t(number)].low_rank), kRanksPerUnit);
  phase(PhaseKind::kUp, width(ops_[size_t(number)].output), kColumnsPerUnit);
}

void Network::run_low_rank(const Phase& phase, int first, int end) {
  const Op& op = ops_[size_t(phase.first_op)];
  if (phase.kind == PhaseKind::kDown) {
    go_down(op, 0, batch_.num_tokens, first * kRanksPerUnit, end * kRanksPerUnit);
  } else {
    go_up(op, 0, batch_.num_tokens, first * kColumnsPerUnit, end * kColumnsPerUnit);
  }
}

void Network::run_low_rank_on_rows(const Op& op, int first, int end) {
  for (int next; first < end; first = next) {
    next = std::min(first + kRowsTogether, end);
    go_down(op, first, next, 0, ranks_of(*op.low_rank));
    go_up(op, first, next, 0, width(op.output));
  }
}

// act(slot, first, count) for each run of neighbours among the tokens that have the same adapter.
template <typename F>
void Network::for_slots(int first, int end, F&& act) const {
  for (int next; first < end; first = next) {
    for (next = first + 1; next < end && slots_[size_t(next)] == slots_[size_t(first)];) ++next;
    act(slots_[size_t(first)], first, next - first);
  }
}

void Network::go_down(const Op& op, int first, int end, int first_rank, int end_rank) {
  const LowRank& factors = *op.low_rank;
  float* inner = low_rank_inner_.get<float>(0);
  for_slots(first, end, [&](int slot, int row, int count) {
    const float* x = buffer(op.inputs[0]) + int64_t(row) * factors.inputs;
    kernels_.low_rank_down(factors, slot, x, count, first_rank, end_rank, inner + int64_t(row) * ranks_of(factors));
  });
}

void Network::go_up(const Op& op, int first, int end, int first_column, int end_column) {
  const LowRank& factors = *op.low_rank;
  const float* inner = low_rank_inner_.get<float>(0);
  for_slots(first, end, [&](int slot, int row, int count) {
    const int64_t at = int64_t(row) * width(op.output);
    const float* residual = op.residual < 0 ? nullptr : buffer(op.residual) + at;
    kernels_.low_rank_up(factors, slot, inner + int64_t(row) * ranks_of(factors), count, residual, first_column, end_column, buffer(op.output) + at);
  });
}

}  // namespace foretoken
