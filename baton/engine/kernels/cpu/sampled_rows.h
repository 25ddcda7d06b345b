// What a step's last layer computes: only logits are read of it, so of each row the tokens from the first sampled one on.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "model.h"

namespace baton {

struct SampledRows {
  std::vector<int64_t> tokens;   // packed indexes in the whole step, ascending
  std::vector<Row> rows;         // of these tokens, packed one after the other
  std::vector<int64_t> sampled;  // the step's sampled tokens, as indexes of `tokens`

  explicit SampledRows(const Step& step) {
    std::vector<int64_t> ascending(step.sampled, step.sampled + step.num_sampled);
    std::sort(ascending.begin(), ascending.end());
    for (int64_t r = 0; r < step.num_rows; ++r) {
      const Row& row = step.rows[r];
      const int64_t end = row.first + row.length;
      const auto first = std::lower_bound(ascending.begin(), ascending.end(), row.first);
      if (first == ascending.end() || *first >= end) continue;
      rows.push_back(Row{int64_t(tokens.size()), row.start + *first - row.first, end - *first, row.blocks});
      for (int64_t token = *first; token < end; ++token) tokens.push_back(token);
    }
    for (int64_t i = 0; i < step.num_sampled; ++i)
      sampled.push_back(std::lower_bound(tokens.begin(), tokens.end(), step.sampled[i]) - tokens.begin());
  }

  // A step of these tokens, for all that follows its embedding; it points into this object.
  Step of(Step step) const {
    step.num_tokens = tokens.size();
    step.num_rows = rows.size();
    step.rows = rows.data();
    step.sampled = sampled.data();
    return step;
  }

  // Moves these tokens' rows of x [tokens of the whole step, width] to the front.
  template <class E>
  void move_to_front(E* x, int64_t width) const {
    for (size_t i = 0; i < tokens.size(); ++i) std::memmove(x + i * width, x + tokens[i] * width, width * sizeof(E));
  }
};

}  // namespace baton
