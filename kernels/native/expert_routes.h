// Which experts the rows of a pass have, and which rows an expert has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace foretoken {

// How scores become experts and weights, as Experts of program.py says.
struct Router {
  bool sigmoid, renormalise;
  int groups, top_groups;
  float scale;
  const float *correction, *scales;  // [experts] or null
};

// A visit is a row at one of its experts. Visits are ordered by expert, those of one expert by row: what it computes lies side by side.
class ExpertRoutes {
 public:
  // Every row will have `top` of so many experts. Memory for all, made before threads begin.
  void start(int rows, int top, int experts);

  // Row r's experts by the router's logits: the greatest first, of equals the lower one. Rows may be routed at the same time.
  // order: room for a number of each expert; scores: for three.
  void route(int row, const float* logits, const Router& router, int* order, float* scores);
  // All rows are routed: order the visits.
  void group();

  int num_visits() const { return rows_ * top_; }
  int num_busy() const { return int(busy_.size()); }   // experts that have rows
  int busy(int i) const { return busy_[std::size_t(i)]; }
  int first_visit(int expert) const { return starts_[std::size_t(expert)]; }
  int count(int expert) const { return starts_[std::size_t(expert) + 1] - starts_[std::size_t(expert)]; }
  int row_of(int visit) const { return rows_of_[std::size_t(visit)]; }
  int visit(int row, int rank) const { return visits_[at(row, rank)]; }
  float weight(int row, int rank) const { return weights_[at(row, rank)]; }

 private:
  void leave_groups_out(const Router& router, float* keys, float* best, int* order) const;
  std::size_t at(int row, int rank) const { return std::size_t(row) * std::size_t(top_) + std::size_t(rank); }

  int rows_ = 0, top_ = 0, experts_ = 0;
  std::vector<int> chosen_, visits_;   // [rows][top]
  std::vector<float> weights_;         // [rows][top]
  std::vector<int> rows_of_;           // [visits]
  std::vector<int> starts_, busy_;     // [experts + 1]; experts
};

}  // namespace foretoken
