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

void ExpertRoutes::route(int row, const float* logits, bool renormalise, int* order) {
  std::iota(order, order + experts_, 0);
  // NaN is below everything, so that there is an order; the row's weights are NaN then, whatever it chose.
  const auto key = [logits](int expert) { return std::isnan(logits[expert]) ? -INFINITY : logits[expert]; };
  std::partial_sort(order, order + top_, order + experts_, [&](int a, int b) { return key(a) > key(b) || (key(a) == key(b) && a < b); });
  const float greatest = logits[order[0]];
  float total = 0.0f;
  for (int i = 0; i < (renormalise ? top_ : experts_); ++i) total += std::exp(logits[renormalise ? order[i] : i] - greatest);
  if (renormalise) {  // one that is not a number anywhere spoils the row, as a softmax over all would
    for (int i = 0; i < experts_; ++i) total += logits[i] * 0.0f;
  }
  int* chosen = chosen_.data() + size_t(row) * size_t(top_);
  float* weights = weights_.data() + size_t(row) * size_t(top_);
  for (int i = 0; i < top_; ++i) {
    chosen[i] = order[i];
    weights[i] = std::exp(logits[order[i]] - greatest) / total;
  }
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
