// Runs random programs on lanes with real threads; built with a sanitizer by test_dispatcher.py.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "lanes.h"

using namespace tidegate;

namespace {

constexpr int kLanes = 4;

struct Board {
  std::vector<int> value;  // by op: what it wrote; lanes hand it over without another lock
  std::vector<PlannedOp> program;
};

std::vector<PlannedOp> random_program(std::mt19937& random) {
  std::vector<PlannedOp> program;
  int copies = 0;
  const int size = 1 + int(random() % 40);
  for (int i = 0; i < size; ++i) {
    PlannedOp op{int(random() % kLanes), random() % 2 ? Gate::Step : Gate::None, -1, false, false, {}};
    for (unsigned k = random() % 3; k > 0 && i > 0; --k) op.deps.push_back(int(random() % unsigned(i)));
    // A copy may be repeated until the step, so that nothing reads it before.
    for (const int dep : op.deps)
      if (program[size_t(dep)].copies_gradient) op.gate = Gate::Step;
    if (random() % 3 == 0) op = {op.lane, Gate::Gradient, copies++, true, false, {}};
    program.push_back(op);
  }
  return program;
}

// Reads what the op's dependencies wrote, so that a sanitizer sees a missing order.
void work(Board& board, int op) {
  int sum = 1;
  for (const int dep : board.program[size_t(op)].deps) sum += board.value[size_t(dep)];
  board.value[size_t(op)] = sum;
}

struct WorkTask : Task {
  WorkTask(Board& on, int of, bool good) : board(on), op(of), succeeds(good) {}
  TaskResult run(const std::function<void()>& queued) override {
    if (succeeds) {
      if (op % 2) queued();
      work(board, op);
    }
    return {0.0, 0.0, succeeds};
  }
  Board& board;
  const int op;
  const bool succeeds;
};

// Tasks for about half of the ops; one in eight of them fails.
Tasks random_tasks(Board& board, std::mt19937& random) {
  Tasks tasks;
  for (size_t op = 0; op < board.program.size(); ++op)
    if (!board.program[op].copies_gradient && random() % 2)
      tasks.emplace_back(int(op), std::make_shared<WorkTask>(board, int(op), random() % 8 != 0));
  return tasks;
}

void fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::abort();
}

}  // namespace

int main(int, char** arguments) {
  const int wanted = std::atoi(arguments[1]);
  std::mt19937 random(1);
  const std::vector<bool> ahead{false, true, false, true};
  Lanes lanes(ahead);
  Board board;
  std::atomic<long> ran{0};
  long tasks_ran = 0;
  std::vector<std::thread> threads;
  for (int lane = 0; lane < kLanes; ++lane)
    for (int turn = 0; turn < (ahead[size_t(lane)] ? 2 : 1); ++turn)
      threads.emplace_back([&, lane] {
        while (const auto begun = lanes.take(lane)) {
          if (begun->duty == Taken::Duty::Perform && lanes.perform(begun->op, begun->run)) continue;
          if (begun->run % 2) lanes.queued(begun->run);
          work(board, begun->op);
          ++ran;
          lanes.ended(begun->run, Outcome::Issued, begun->run % 3 == 0);
        }
      });
  for (int done = 0; done < wanted; ++done) {
    board.program = random_program(random);
    board.value.assign(board.program.size(), 0);
    lanes.start(board.program, random_tasks(board, random));
    std::vector<int> copies;
    for (size_t i = 0; i < board.program.size(); ++i)
      if (board.program[i].copies_gradient) copies.push_back(int(i));
    for (const int copy : copies) lanes.open_gradients({board.program[size_t(copy)].subgroup});
    std::vector<int> repeat;
    for (const int copy : copies)
      if (random() % 3 == 0) repeat.push_back(copy);
    while (!lanes.wait(Until::NotRunning, repeat, 1.0)) {
    }
    if (done % 7 == 0) {
      lanes.drop();
      while (!lanes.wait(Until::Idle, {}, 1.0)) {
      }
    } else {
      lanes.step(repeat);
      lanes.arm(random_tasks(board, random));
      size_t collected = 0;
      while (!lanes.wait(Until::Done, {}, 1e-5)) collected += lanes.issued_from(collected).size();
      for (size_t i = 0; i < board.program.size(); ++i)
        if (board.value[i] < 1 + int(board.program[i].deps.size())) fail("an op ran before its dependencies");
    }
    for (const IssuedRun& one : lanes.issued_from(0)) tasks_ran += one.start == one.start;  // NaN without a task
    lanes.forget();
  }
  lanes.close();
  if (!lanes.wait_for_tasks(1.0)) fail("a task runs although no op does");
  for (std::thread& thread : threads) thread.join();
  std::printf("programs %d ops %ld tasks %ld\n", wanted, ran.load(), tasks_ran);
  return 0;
}
