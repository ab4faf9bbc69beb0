// Layers of experts: rows find theirs, and each expert is read once for all rows that have it.
//
// Visits, a row at one of its experts each, are ordered by expert: what they read, their gated inner columns and their results lie side by
// side with those of the expert's other visits. Each row adds up its own results in the order of their ranks, so that nothing depends on
// who else is in the batch.
#include <algorithm>

#include "network.h"

namespace foretoken {
namespace {

int units_of(const PackedLinear& w) { return (w.outputs / kPanel + kPanelsPerUnit - 1) / kPanelsPerUnit; }

}  // namespace

void Network::plan_experts(int number) {
  const Op& op = ops_[size_t(number)];
  const int rows = rows_of(op), visits = rows * op.outputs, most_busy = std::min(visits, op.num_experts);
  if (!rows) return;
  routes_.start(rows, op.outputs, op.num_experts);
  const auto phase = [&](PhaseKind kind, Deal deal, int units) {
    phases_.push_back({kind, number, number, false, deal, uint32_t(units), 0});
  };
  phase(PhaseKind::kRoute, Deal::kMostReserved, rows);
  phase(PhaseKind::kGroup, Deal::kClaimed, 1);
  phase(PhaseKind::kEnterExperts, Deal::kMostReserved, visits);
  phase(PhaseKind::kExpertsIn, Deal::kClaimed, most_busy * units_of(op.weights[0]));
  phase(PhaseKind::kBetween, Deal::kMostReserved, visits);
  phase(PhaseKind::kExpertsOut, Deal::kClaimed, most_busy * units_of(op.weights[op.num_experts]));
  phase(PhaseKind::kMix, Deal::kMostReserved, rows);
}

void Network::run_experts(const Phase& phase, int first, int end, Worker& worker) {
  const Op& op = ops_[size_t(phase.first_op)];
  const PackedLinear *gates_ups = op.weights, *downs = op.weights + op.num_experts;
  const int in = width(op.inputs[0]), out = width(op.output), inner = gates_ups->outputs / 2;
  float *inside = expert_inner_.get<float>(0), *results = expert_results_.get<float>(0);
  switch (phase.kind) {
    case PhaseKind::kRoute: {
      const int experts = op.num_experts;
      const Router router{op.sigmoid != 0, op.renormalise != 0, op.groups, op.top_groups, op.scale, op.norm_bias, op.norm_weight};
      for (int row = first; row < end; ++row) {
        routes_.route(row, buffer(op.inputs[1]) + int64_t(row) * experts, router, worker.ranking.get<int>(0), worker.scores.get<float>(0));
      }
      break;
    }
    case PhaseKind::kGroup:
      routes_.group();
      break;
    case PhaseKind::kEnterExperts:
      for (int visit = first; visit < end; ++visit) {
        const float* x = buffer(op.inputs[0]) + int64_t(routes_.row_of(visit)) * in;
        kernels_.prepare(prepare_of(*gates_ups, x, in, visits_from(*gates_ups, visit, 1)), 0, 1);
      }
      break;
    case PhaseKind::kBetween:
      kernels_.prepare(prepare_of(*downs, inside, inner, visits_from(*downs, 0, end)), first, end - first);
      break;
    case PhaseKind::kExpertsIn:
      visit_experts(op, gates_ups, true, inside, first, end, worker);
      break;
    case PhaseKind::kExpertsOut:
      visit_experts(op, downs, false, results, first, end, worker);
      break;
    default:
      for (int row = first; row < end; ++row) {
        float* y = buffer(op.output) + int64_t(row) * out;
        for (int rank = 0; rank < op.outputs; ++rank) {
          const float weight = routes_.weight(row, rank);
          const float* result = results + int64_t(routes_.visit(row, rank)) * downs->outputs;
          for (int c = 0; c < out; ++c) y[c] = (rank ? y[c] : 0.0f) + weight * result[c];
        }
      }
  }
}

// What visits read, from one of them on.
PreparedRows Network::visits_from(const PackedLinear& weights, int visit, int count) {
  return rows_from(weights, prepared_memory(weights, count, prepared_, scales_, input_sums_), visit, count);
}

// Some units of an expert's product: its panels by turns with those of the other busy ones, for nobody knows in advance how many are.
void Network::visit_experts(const Op& op, const PackedLinear* experts, bool gated, float* to, int first, int end, Worker& worker) {
  const int turns = std::min(routes_.num_visits(), op.num_experts), panels = experts->outputs / kPanel;
  for (int unit = first; unit < end; ++unit) {
    if (unit % turns >= routes_.num_busy()) continue;
    const int expert = routes_.busy(unit % turns), visit = routes_.first_visit(expert), first_panel = unit / turns * kPanelsPerUnit;
    const int out = gated ? experts->outputs / 2 : experts->outputs;
    const PreparedRows x = visits_from(*experts, visit, routes_.count(expert));
    Epilogue epilogue{};
    epilogue.scale = 1.0f;
    epilogue.function = gated ? Function(op.function) : Function::kNone;
    epilogue.gated = gated;
    epilogue.outputs = experts->outputs;
    epilogue.out = to + int64_t(visit) * out;
    epilogue.out_stride = out;
    const int num_panels = std::min(kPanelsPerUnit, panels - first_panel);
    kernels_.linear(experts[expert], x, epilogue, first_panel, num_panels, {}, worker.linear.get<char>(0));
  }
}

}  // namespace foretoken
