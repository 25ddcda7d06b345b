#include "borrow.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <memory>
#include <mutex>
#include <vector>

namespace baton {
namespace {

constexpr int64_t MOST_UNITS = 2048, MOST_HELPERS = 128;
constexpr size_t X_BYTES = 16 << 20, Y_BYTES = 16 << 20;  // address space; only what is used is backed by memory
constexpr uint64_t FREE = 0, OWN = 1, HELPER = 2;          // + index of the helper

using Clock = std::chrono::steady_clock;

int64_t width_of(const Product& product) { return product.per_unit * GROUP / (product.into == Into::SWIGLU ? 2 : 1); }

// Helpers and what they share with the step. A product has a generation, odd while it is being written.
struct Helpers {
  struct One {
    Helpers* all;
    uint64_t who;
    pthread_t thread;
    Scratch y;
  };

  alignas(64) std::atomic<int32_t> active{0};  // steps in progress, or 1 to end
  std::atomic<bool> ends{false};
  alignas(64) std::atomic<uint64_t> generation{0};
  Product product;
  Scratch x;
  alignas(64) std::atomic<uint64_t> owner[MOST_UNITS];  // generation << 8 | FREE, OWN or HELPER + index
  alignas(64) std::atomic<uint64_t> done[MOST_UNITS];   // the generation whose result a helper has
  std::vector<std::unique_ptr<One>> each;
  std::atomic<int64_t> borrowed{0}, again{0};  // units that helpers computed; that the step computed in their place

  bool claim(int64_t unit, uint64_t number, uint64_t who) {
    uint64_t expected = number << 8 | FREE;
    return owner[unit].compare_exchange_strong(expected, number << 8 | who, std::memory_order_acq_rel);
  }

  void set_active(int32_t value) {
    active.store(value, std::memory_order_release);
    if (value) syscall(SYS_futex, reinterpret_cast<int32_t*>(&active), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  void help(One& one) {
    char* y = one.y.get(Y_BYTES);
    uint64_t seen = 0;
    while (!ends.load(std::memory_order_acquire)) {
      if (!active.load(std::memory_order_acquire)) {
        syscall(SYS_futex, reinterpret_cast<int32_t*>(&active), FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
        continue;
      }
      const uint64_t number = generation.load(std::memory_order_acquire);
      if (number == seen || number & 1) {
        _mm_pause();
        continue;
      }
      const Product now = product;
      std::atomic_thread_fence(std::memory_order_acquire);
      if (generation.load(std::memory_order_relaxed) != number) continue;
      seen = number;
      const int64_t width = width_of(now);
      for (int64_t unit = now.units() - 1; unit >= 0; --unit) {  // the step begins at the front
        if (!claim(unit, number, one.who)) {
          if (owner[unit].load(std::memory_order_relaxed) == (number << 8 | OWN)) break;
          if (generation.load(std::memory_order_relaxed) != number) break;
          continue;
        }
        const int64_t first = unit * now.per_unit, last = std::min(first + now.per_unit, now.groups);
        char* to = y + unit * now.rows * width * 4;
        const Into into = now.into == Into::ADD ? Into::FLOAT : now.into;
        const int64_t size = into == Into::FLOAT ? 4 : now.element_bytes;
        now.compute(now, x.get(X_BYTES), to - unit * width * size, width, into, first, last);
        done[unit].store(number, std::memory_order_release);
      }
    }
  }

  void compute(const Product& given, const void* from, void* y, int64_t ldy, int threads) {
    const uint64_t before = generation.load(std::memory_order_relaxed), number = before + 2;
    const int64_t units = given.units(), width = width_of(given);
    generation.store(before + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    product = given;
    std::memcpy(x.get(X_BYTES), from, given.rows * given.row_bytes);
    for (int64_t unit = 0; unit < units; ++unit) owner[unit].store(number << 8 | FREE, std::memory_order_relaxed);
    generation.store(number, std::memory_order_release);

    const auto began = Clock::now();
    auto own = [&](int64_t unit) {
      const int64_t first = unit * given.per_unit;
      given.compute(given, from, y, ldy, given.into, first, std::min(first + given.per_unit, given.groups));
    };
    std::atomic<int64_t> computed{0};
    parallel(units, threads, [&](int64_t unit) {
      if (!claim(unit, number, OWN)) return;
      own(unit);
      computed.fetch_add(1, std::memory_order_relaxed);
    });
    const auto ended = Clock::now();
    const auto late = ended + (ended - began) * 2 * threads / std::max<int64_t>(computed.load(), 1);
    for (int64_t unit = units - 1; unit >= 0; --unit) {
      const uint64_t who = owner[unit].load(std::memory_order_relaxed) & 0xff;
      if (who == OWN) continue;
      bool is_done;
      while (!(is_done = done[unit].load(std::memory_order_acquire) == number) && Clock::now() < late) _mm_pause();
      if (is_done) {
        const int64_t first = unit * given.per_unit, last = std::min(first + given.per_unit, given.groups);
        const char* result = each[who - HELPER]->y.get(Y_BYTES) + unit * given.rows * width * 4;
        given.take(given, result, y, ldy, first, last);
        borrowed.fetch_add(1, std::memory_order_relaxed);
      } else {
        own(unit);
        again.fetch_add(1, std::memory_order_relaxed);
      }
    }
  }
};

std::unique_ptr<Helpers> lent;
std::mutex in_step;
thread_local Helpers* current = nullptr;

void* run(void* one) {
  auto& helper = *static_cast<Helpers::One*>(one);
  helper.all->help(helper);
  return nullptr;
}

void end() {
  if (!lent) return;
  lent->ends.store(true, std::memory_order_release);
  lent->set_active(1);
  for (auto& one : lent->each) pthread_join(one->thread, nullptr);
  lent.reset();
}

int start(Helpers::One& one, int32_t core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(core, &cores);
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setaffinity_np(&attributes, sizeof(cores), &cores);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int failed = pthread_create(&one.thread, &attributes, run, &one);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  return failed;
}

}  // namespace

Borrowing::Borrowing() {
  if (current || !in_step.try_lock()) return;
  if (!lent) {
    in_step.unlock();
    return;
  }
  begun_ = true;
  current = lent.get();
  current->set_active(1);
}

Borrowing::~Borrowing() {
  if (!begun_) return;
  current->active.store(0, std::memory_order_release);
  current = nullptr;
  in_step.unlock();
}

int helpers() { return current ? int(current->each.size()) : 0; }

bool compute_with_helpers(const Product& product, const void* x, void* y, int64_t ldy, int threads) {
  const int64_t units = product.units();
  if (!current || units < 2 || units > MOST_UNITS) return false;
  if (size_t(product.rows * product.row_bytes) > X_BYTES) return false;
  if (size_t(units * product.rows * width_of(product) * 4) > Y_BYTES) return false;
  current->compute(product, x, y, ldy, threads);
  return true;
}

}  // namespace baton

using namespace baton;

extern "C" {

// Ends the helpers that there are, and starts one for each of the cores, `idle`: under SCHED_IDLE. Weights must outlive
// the helpers. Returns 0, or an errno value: then there are none.
int baton_borrow(const int32_t* cores, int64_t count, int idle) {
  const std::lock_guard<std::mutex> no_step(in_step);
  end();
  if (count == 0) return 0;
  if (count > MOST_HELPERS) return EINVAL;
  lent = std::make_unique<Helpers>();
  lent->x.get(X_BYTES);
  for (int64_t i = 0; i < count; ++i) {
    auto one = std::make_unique<Helpers::One>();
    one->all = lent.get();
    one->who = HELPER + uint64_t(i);
    one->y.get(Y_BYTES);
    int failed = start(*one, cores[i]);
    if (!failed) {
      const sched_param none{};
      const pthread_t thread = one->thread;
      lent->each.push_back(std::move(one));
      if (idle) failed = pthread_setschedparam(thread, SCHED_IDLE, &none);
    }
    if (failed) {
      end();
      return failed;
    }
  }
  return 0;
}

// The numbers of units that helpers have computed, and that the step computed in place of a preempted helper.
void baton_borrowed(int64_t* counts) {
  const std::lock_guard<std::mutex> no_step(in_step);
  counts[0] = lent ? lent->borrowed.load() : 0;
  counts[1] = lent ? lent->again.load() : 0;
}

}  // extern "C"
