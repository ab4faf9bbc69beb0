// Ops that are computed row by row, in runs that a thread takes over some rows from the first op to the last.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "network.h"

namespace foretoken {

void Network::run_rows(const Phase& phase, int first, int end, Worker& worker) {
  for (int i = phase.first_op; i < phase.end_op; ++i) run_op_on_rows(ops_[size_t(i)], first, end, worker);
  if (phase.prepares) {
    const Op& linear = ops_[size_t(phase.end_op)];
    const PackedLinear& weights = weights_of(linear);
    for (int group = 0; group < linear.groups; ++group) {
      PreparedRows rows = prepared_together(linear, group);
      const float* x = buffer(linear.inputs[0]) + group * (width(linear.inputs[0]) / linear.groups);
      prepare_rows(linear, weights, x, first, end, rows, worker.ahead);
    }
  }
}

void Network::run_op_on_rows(const Op& op, int first, int end, Worker& worker) {
  const int rows = end - first;
  const int in = op.num_inputs ? width(op.inputs[0]) : 0;
  const int out = width(op.output);
  const float* x = op.num_inputs ? buffer(op.inputs[0]) + int64_t(first) * in : nullptr;
  float* y = buffer(op.output) + int64_t(first) * out;
  switch (op.kind) {
    case OpKind::kEmbed:
      kernels_.unpack_rows(*op.weights, batch_.token_ids + first, rows, out, op.scale, y, out);
      break;
    case OpKind::kNorm:
      for (int column = 0, size = in / op.groups; column < in; column += size) {
        const auto part = [column](const float* weight) { return weight ? weight + column : nullptr; };
        kernels_.rms_norm(x + column, in, size, op.centred != 0, part(op.norm_weight), part(op.norm_bias), op.eps, y + column, out, rows);
      }
      break;
    case OpKind::kActivation:
      for (int r = 0; r < rows; ++r, x += in, y += out) {
        const float* up = op.gated ? (op.num_inputs == 2 ? buffer(op.inputs[1]) + int64_t(first + r) * out : x + out) : nullptr;
        if (op.num_inputs == 2 && in < out) {  // one gate for the whole row
          float gate;
          kernels_.activate(Function(op.function), x, nullptr, &gate, 1);
          for (int i = 0; i < out; ++i) y[i] = gate * up[i];
        } else {
          kernels_.activate(Function(op.function), x, up, y, out);
        }
      }
      break;
    case OpKind::kAdd: {
      const float* other = buffer(op.inputs[1]) + int64_t(first) * in;
      for (int64_t i = 0; i < int64_t(rows) * in; ++i) y[i] = x[i] + other[i];
      break;
    }
    case OpKind::kConcat:
      for (int input = 0, column = 0; input < op.num_inputs; ++input) {
        const int part = width(op.inputs[input]) / op.groups;
        const float* from = buffer(op.inputs[input]) + int64_t(first) * op.groups * part;
        for (int run = 0; run < rows * op.groups; ++run) {
          std::memcpy(y + int64_t(run) * (out / op.groups) + column, from + int64_t(run) * part, size_t(part) * sizeof(float));
        }
        column += part;
      }
      break;
    case OpKind::kGatherRows:
      for (int r = 0; r < rows; ++r, y += out) {
        std::memcpy(y, buffer(op.inputs[0]) + batch_.logits_indices[first + r] * in, size_t(in) * sizeof(float));
      }
      break;
    case OpKind::kScale: {
      const float scale = op.norm_weight ? op.scale * *op.norm_weight : op.scale;
      for (int64_t i = 0; i < int64_t(rows) * in; ++i) y[i] = x[i] * scale;
      break;
    }
    case OpKind::kSoftcap:
      kernels_.softcap(op.softcap, x, y, rows * in);
      break;
    case OpKind::kTopK: {
      const int k = op.outputs;
      float* values = buffer(op.second_output) + int64_t(first) * k;
      int* order = worker.ranking.get<int>(0);
      for (int r = 0; r < rows; ++r, x += in, y += k, values += k) {
        std::iota(order, order + in, 0);
        std::partial_sort(order, order + k, order + in, [x](int a, int b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
        for (int i = 0; i < k; ++i) {
          y[i] = float(order[i]);
          values[i] = x[order[i]];
        }
      }
      break;
    }
    case OpKind::kLocalConv:
      convolve(op, first, end);
      break;
    case OpKind::kLowRank:
      run_low_rank_on_rows(op, first, end);
      break;
    case OpKind::kLinear:
    case OpKind::kAttention:
    case OpKind::kExperts:
    case OpKind::kCausalConv:
    case OpKind::kGatedDelta:
    case OpKind::kStateSpace:
      break;  // not row-local
  }
}

void Network::convolve(const Op& op, int first, int end) const {
  const int columns = width(op.output), group = columns / op.groups, taps = op.outputs;
  const int32_t* row = std::upper_bound(batch_.query_start, batch_.query_start + batch_.num_rows, first);  // the next row's start
  for (int token = first; token < end; ++token) {
    while (token == *row) ++row;
    const float* const kernels = buffer(op.inputs[1]) + int64_t(token) * width(op.inputs[1]) + op.first_kernel;
    float* const y = buffer(op.output) + int64_t(token) * columns;
    std::fill_n(y, columns, 0.0f);
    for (int tap = 0; tap < taps && token - tap >= row[-1]; ++tap) {
      const float* const x = buffer(op.inputs[0]) + int64_t(token - tap) * columns;
      const float* const fixed = op.norm_weight + int64_t(tap) * columns;
      for (int g = 0; g < op.groups; ++g) {
        const float dynamic = kernels[tap * op.groups + g];
        for (int c = g * group; c < (g + 1) * group; ++c) y[c] += (fixed[c] + dynamic) * x[c];
      }
    }
  }
}

}  // namespace foretoken
