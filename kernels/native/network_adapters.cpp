// What rows' adapters add to products. Many rows are divided among the threads; of few each thread computes some columns, for else one
// would work and the others wait: the way down in a phase of its own, the way up beside the product, each thread for its own panels. A row's
// numbers are the same.
#include <algorithm>

#include "network.h"

namespace foretoken {
namespace {

constexpr int kFewRows = 16;
constexpr int kRowsTogether = 16;  // of many, that go over the factors while their inputs are in the core's own cache
constexpr int kRanksPerUnit = 4;

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
  const int units = (ranks_of(*ops_[size_t(number)].low_rank) + kRanksPerUnit - 1) / kRanksPerUnit;
  if (batch_.num_tokens) phases_.push_back({PhaseKind::kDown, number, number, false, Deal::kReserved, uint32_t(units), 0});
}

void Network::run_down(const Op& op, int first, int end) {
  go_down(op, 0, batch_.num_tokens, first * kRanksPerUnit, end * kRanksPerUnit);
}

// The residual of a product, for some of its panels, if it is for the product to make it.
void Network::make_residual(int product, int first_panel, int num_panels) {
  if (!product || !divides_columns(ops_[size_t(product) - 1])) return;
  const Op& op = ops_[size_t(product) - 1];
  const int first = first_panel * kPanel, end = std::min(first + num_panels * kPanel, width(op.output)), half = width(op.output) / 2;
  if (op.low_rank->gated) {
    go_up(op, 0, batch_.num_tokens, first / 2, end / 2);
    go_up(op, 0, batch_.num_tokens, half + first / 2, half + end / 2);
  } else {
    go_up(op, 0, batch_.num_tokens, first, end);
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
