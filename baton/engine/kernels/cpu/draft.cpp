// Drafting: several passes of a small model, each on the tokens of the previous one, in one call.
//
// Between passes only the last token changes, so the Python code around a pass would cost more than the pass. A draft
// token need only be likely: if a draw is too close to decide here, the largest logit is used.
#include <vector>

#include "model.h"
#include "sampling.h"

namespace baton {

// `count` tokens to draft for row `row` of the first pass; `draw` is the first token's. Packed by sampler.py.
struct Wanted {
  Draw draw;
  int64_t row, count;
};

namespace {

int64_t propose(const float* logits, int64_t vocab, Draw draw, int64_t depth) {
  draw.output_index += uint32_t(depth);
  const int64_t token = choose_token(logits, vocab, draw);
  if (token != UNDECIDED) return token;
  draw.temperature = 0.0;
  return std::max<int64_t>(choose_token(logits, vocab, draw), 0);
}

}  // namespace
}  // namespace baton

using namespace baton;

// The first pass is `step`, whose sampled positions are those of `wanted`, in order; its x has room for at least
// `number` rows. draft_tokens [number, most]: entries beyond a row's count are not written.
extern "C" void baton_propose(
    const Model* model, const Step* step, const Wanted* wanted, int64_t number, int64_t most, int64_t* draft_tokens) {
  const int64_t vocab = model->head.n;
  std::vector<int64_t> going(number), tokens(number), sampled(number);
  std::vector<Row> rows(number);
  for (int64_t i = 0; i < number; ++i) {
    const Row& row = step->rows[wanted[i].row];
    going[i] = i;
    sampled[i] = i;
    rows[i] = Row{i, row.start + row.length, 1, row.blocks};
  }
  Step pass = *step;
  for (int64_t depth = 0;; ++depth) {
    baton_forward(model, &pass, 0, model->num_layers);
    int64_t left = 0;
    for (size_t i = 0; i < going.size(); ++i) {
      const int64_t at = going[i];
      const int64_t token = propose(step->logits + int64_t(i) * vocab, vocab, wanted[at].draw, depth);
      draft_tokens[at * most + depth] = token;
      if (depth + 1 == wanted[at].count) continue;
      Row next = rows[i];
      next.first = left;
      next.start += depth > 0;
      rows[left] = next;
      tokens[left] = token;
      going[left++] = at;
    }
    if (left == 0) return;
    going.resize(left);
    pass.num_tokens = pass.num_rows = pass.num_sampled = left;
    pass.tokens = tokens.data();
    pass.sampled = sampled.data();
    pass.rows = rows.data();
  }
}
