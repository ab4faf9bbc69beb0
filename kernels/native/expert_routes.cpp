#include "expert_routes.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace foretoken {

void ExpertRoutes::start(int rows, int top, int experts) {
  rows_ = rows, top_ = top, experts_ = experts;
  const size_t visits = size_t(rows) * size_t(top);
  if (chosen_.size() < visits) {
    chosen_.resize(visits);
    visits_.resize(visits);
    weights_.resize(visits);
    rows_of_.resize(visits);
  }
  busy_.reserve(size_t(experts));
  if (starts_.size() < size_t(experts) + 1) starts_.resize(size_t(experts) + 1);
}

namespace {

// The greatest first, of equals the lower one.
void rank(const float* keys, int count, int top, int* order) {
  std::iota(order, order + count, 0);
  std::partial_sort(order, order + top, order + count, [keys](int a, int b) { return keys[a] > keys[b] || (keys[a] == keys[b] && a < b); });
}

}  // namespace

void ExpertRoutes::route(int row, const float* logits, const Router& router, int* order, float* scores) {
  float *keys = scores + experts_, greatest = -INFINITY, spoiler = 0.0f;
  for (int i = 0; i < experts_; ++i) {
    greatest = std::max(greatest, logits[i]);  // no NaN, if it is the second
    spoiler += logits[i] * 0.0f;               // one that is not a number anywhere spoils the row, as a softmax over all would
  }
  const bool has_groups = router.top_groups < router.groups, by_logits = !router.sigmoid && !router.correction && !has_groups;
  for (int i = 0; i < experts_; ++i) scores[i] = router.sigmoid ? 1.0f / (1.0f + std::exp(-logits[i])) : std::exp(logits[i] - greatest);
  if (!router.sigmoid && !(by_logits && router.renormalise)) {
    float total = 0.0f;
    for (int i = 0; i < experts_; ++i) total += scores[i];
    for (int i = 0; i < experts_; ++i) scores[i] /= total;
  }
  for (int i = 0; i < experts_; ++i) {
    const float key = by_logits ? logits[i] : router.correction ? scores[i] + router.correction[i] : scores[i];
    keys[i] = std::isnan(key) ? -INFINITY : key;  // NaN is below everything, so that there is an order
  }
  if (has_groups) leave_groups_out(router, keys, keys + experts_, order);
  rank(keys, experts_, top_, order);
  float total = router.renormalise ? 0.0f : 1.0f;
  for (int i = 0; i < top_ && router.renormalise; ++i) total += scores[order[i]];
  total += spoiler;
  int* chosen = chosen_.data() + size_t(row) * size_t(top_);
  float* weights = weights_.data() + size_t(row) * size_t(top_);
  for (int i = 0; i < top_; ++i) {
    chosen[i] = order[i];
    weights[i] = scores[order[i]] / total * router.scale * (router.scales ? router.scales[order[i]] : 1.0f);
  }
}

// The keys of experts in other groups than the best become -infinity. A group is as good as its two best experts together.
void ExpertRoutes::leave_groups_out(const Router& router, float* keys, float* best, int* order) const {
  const int size = experts_ / router.groups;
  for (int group = 0; group < router.groups; ++group) {
    float first = -INFINITY, second = -INFINITY;
    for (const float *key = keys + group * size, *end = key + size; key < end; ++key) {
      second = std::max(second, std::min(first, *key));
      first = std::max(first, *key);
    }
    best[group] = first + second;
  }
  rank(best, router.groups, router.top_groups, order);
  for (int i = router.top_groups; i < router.groups; ++i) std::fill_n(keys + order[i] * size, size, -INFINITY);
}

void ExpertRoutes::group() {
  std::fill_n(starts_.begin(), experts_ + 1, 0);
  const int visits = num_visits();
  for (int i = 0; i < visits; ++i) ++starts_[size_t(chosen_[size_t(i)]) + 1];
  busy_.clear();
  for (int expert = 0; expert < experts_; ++expert) {
    if (starts_[size_t(expert) + 1]) busy_.push_back(expert);
    starts_[size_t(expert) + 1] += starts_[size_t(expert)];
  }
  for (int i = 0; i < visits; ++i) {
    const int visit = starts_[size_t(chosen_[size_t(i)])]++;
    visits_[size_t(i)] = visit;
    rows_of_[size_t(visit)] = i / top_;
  }
  for (int expert = experts_; expert > 0; --expert) starts_[size_t(expert)] = starts_[size_t(expert) - 1];  // as before the loop
  starts_[0] = 0;
}

}  // namespace foretoken
