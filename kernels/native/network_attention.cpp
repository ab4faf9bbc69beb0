// Attention in a network: layers of one shape share a plan of who weighs which places, and a thread fetches what it will read next of the cache.
#include <algorithm>

#include "cache.h"
#include "network.h"

namespace foretoken {

void Network::plan_attention() {
  // Layers of one shape and window share a plan. At most a handful differ, so a list will do.
  std::vector<const Op*> planned;
  plans_.resize(ops_.size());  // no reallocation below: plan_of_op_ points into it
  size_t partials = 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    plan_of_op_[i] = nullptr;
    if (op.kind != OpKind::kAttention || !op.num_heads) continue;
    size_t known = 0;
    while (known < planned.size() && !(planned[known]->window == op.window && planned[known]->num_heads == op.num_heads &&
                                       planned[known]->kv_heads == op.kv_heads && planned[known]->k_dim == op.k_dim &&
                                       planned[known]->v_dim == op.v_dim)) {
      ++known;
    }
    if (known == planned.size()) {
      planned.push_back(&op);
      plans_[known].build(batch_, op.num_heads / op.kv_heads, op.kv_heads, op.k_dim + op.v_dim, op.window, int(workers_.size()));
      partials = std::max(partials, plans_[known].partial_floats(op.v_dim));
    }
    plan_of_op_[i] = &plans_[known];
  }
  partials_.get<float>(partials + 1);
}

void Network::attend(const Phase& phase, const AttentionOp& op, int unit, CacheAhead ahead, Worker& worker) {
  plan_of_op_[size_t(phase.first_op)]->run(kernels_, op, batch_, unit, ahead, partials_.get<float>(0), worker.attention.get<char>(0));
}

// Whether it has queries and nothing to write.
bool Network::is_frozen(const Op& op) const {
  return op.kind == OpKind::kAttention && op.num_inputs == 1 && width(op.inputs[0]) == op.num_heads * op.k_dim;
}

// If all threads keep in step.
int Network::first_unit(const AttentionPlan& plan, int thread) const {
  const auto units = uint32_t(plan.num_units());
  return int(std::min(ThreadPool::instance().reserved(units, deal_of(batch_.num_tokens), thread).first, units - 1));
}

AttentionOp Network::attention_of(const Op& op, Worker& worker) const {
  AttentionOp attention{};
  attention.cache = make_cache_layer(cache_type_, op.kv_heads, op.k_dim, op.v_dim, cache_[op.layer]);
  attention.num_heads = op.num_heads;
  attention.window = op.window;
  attention.scale = op.scale;
  attention.softcap = op.softcap;
  attention.sinks = op.sinks;
  attention.rope = op.rope;
  attention.rope_half = op.rope_half;
  attention.growth = op.growth;
  attention.q_norm = op.q_norm;
  attention.k_norm = op.k_norm;
  attention.norm_eps = op.eps;
  attention.norm_last = op.norm_last != 0;
  attention.ahead = worker.ahead;
  const int q_width = op.num_heads * op.k_dim, last = op.inputs[op.num_inputs - 1];  // of one input, or of two: q, and what is written
  attention.q = buffer(op.inputs[0]);
  attention.q_stride = width(op.inputs[0]);
  attention.k = is_frozen(op) ? nullptr : buffer(last) + (op.num_inputs == 1 ? q_width : 0);
  attention.v = op.values_in_keys || !attention.k ? nullptr : attention.k + op.kv_heads * op.k_dim;
  attention.kv_stride = width(last);
  attention.queries = const_cast<Scratch&>(queries_).get<char>(0);
  if (op.num_heads) {
    const Place output = place_of(op.output);
    attention.out = output.wide;
    attention.narrow_out = output.narrow;
    attention.out_stride = output.stride;
  }
  return attention;
}

// What a token has in the cache, of every layer.
void Network::move_in_cache(int64_t from, int64_t to) const {
  for (const Op& op : ops_) {
    if (op.kind != OpKind::kAttention || is_frozen(op)) continue;
    cache_move(make_cache_layer(cache_type_, op.kv_heads, op.k_dim, op.v_dim, cache_[op.layer]), &from, &to, 1);
  }
}

}  // namespace foretoken
