// What recurrent layers do with the rows of a pass (RowStates in layout.py says what that is): which tokens follow which, where memories
// come from and where they stay. Built once a pass for all layers. Knows no weights and no memory.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace foretoken {

// What a step's memory is read from or written to, if it is none of a worker's buffers 0, 1, ...
constexpr int kFromSource = -1, kToTarget = -2, kToNowhere = -3;

class RecurrencePlan {
 public:
  // An entry is a token: 0 .. T - 1 are the batch's, from T on the accepted guesses of all rows, which are computed anew.
  struct Step {
    int entry;
    int from, to;                       // buffers
    bool leaves_target, leaves_copy;    // the memory behind it goes from its buffer to the row's target, to the row's copy slot
  };
  struct Row {
    int first, guesses, end;            // tokens: known from `first` on, guesses from `guesses` on
    int source, target, copy_slot;      // -1 = none
    int last, last_copied;              // the entries behind which the target and the copy are written, -1 = none
    int first_step, end_step;
  };
  struct Accepted {
    int slot, guess;                    // where it is kept
  };

  // Raises std::invalid_argument for rows that want slots or guesses for which the cache has no room.
  void build(const BatchView& batch, bool keeps_states, int num_guesses);

  const std::vector<Row>& rows() const { return rows_; }                  // those that have tokens
  const Step* steps() const { return steps_.data(); }
  int num_buffers() const { return num_buffers_; }
  bool is_token(int entry) const { return entry < num_tokens_; }
  const Accepted& accepted(int entry) const { return accepted_[size_t(entry - num_tokens_)]; }
  // The entry before one in its sequence. Before the first of a row stand the tokens in its source: -1 is the last of them, -2 the one
  // before it, and so on.
  int before(int entry) const { return entry < 0 ? entry - 1 : before_[size_t(entry)]; }
  const Row& row_of(int token) const { return rows_[size_t(row_of_[size_t(token)])]; }

 private:
  void add_row(const BatchView& batch, int number, bool keeps_states, int num_guesses);
  void add_sure_steps(Row& row, int first_accepted, int copied_behind);
  void add_guesses(const Row& row, const BatchView& batch, int number);
  void walk(const Row& row, int parent, int buffer, int free_buffer);

  int num_tokens_ = 0, num_buffers_ = 1;
  std::vector<Row> rows_;
  std::vector<int> row_of_;             // [T]
  std::vector<int> before_;             // [entries]
  std::vector<Accepted> accepted_;
  std::vector<Step> steps_;
  std::vector<int> parents_, sizes_;    // of a row's guesses: the guess before, -1 = none of them; guesses from it on, itself included
};

}  // namespace foretoken
