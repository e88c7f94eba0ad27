// SPDX-License-Identifier: Apache-2.0
// The ops that make, run and free programs. They have no specification in core: a handle has no
// dtype, no shape and no reference.
#include <mutex>
#include <unordered_map>

#include "ipex/glue/tensor_pool.h"
#include "program/program.h"

namespace ipex::program {
namespace {

// Programs by handle. A handle is never used twice.
class Registry {
 public:
  int64_t add(std::shared_ptr<const Program> program) {
    std::lock_guard lock(mutex_);
    programs_.emplace(++last_, std::move(program));
    return last_;
  }

  // Shared, so that a program can be freed while another thread runs it.
  std::shared_ptr<const Program> get(int64_t handle) {
    std::lock_guard lock(mutex_);
    const auto found = programs_.find(handle);
    IPEX_CHECK(found != programs_.end(), "program_run: handle must be one of program_create, got ",
               handle);
    return found->second;
  }

  std::shared_ptr<const Program> remove(int64_t handle) {
    std::lock_guard lock(mutex_);
    const auto node = programs_.extract(handle);
    IPEX_CHECK(!node.empty(), "program_free: handle must be one of program_create, got ", handle);
    return node.mapped();  // destroyed by the caller, outside the lock
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<const Program>> programs_;
  int64_t last_ = 0;
};

// Never destroyed: at the end of the process torch may be gone before the tensors of a program.
Registry& registry() {
  static Registry& programs = *new Registry;
  return programs;
}

int64_t create(const Tensor& code, const Tensor& text, const std::vector<Tensor>& constants) {
  return registry().add(decode(code, text, constants));
}

void check_inputs(const Program& program, const std::vector<Tensor>& tensors,
                  const std::vector<int64_t>& integers) {
  IPEX_CHECK(tensors.size() == program.inputs.size(), "program_run: tensors must have ",
             program.inputs.size(), " elements, got ", tensors.size());
  IPEX_CHECK(integers.size() == program.integers, "program_run: integers must have ",
             program.integers, " elements, got ", integers.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    IPEX_CHECK(tensors[i].is_cpu(), "program_run: tensor ", i, " must be on the CPU");
}

void execute(const Program& program, OptionalTensor* registers, const int64_t* integers) {
  // The pool and what is in it end with the run, also with a failed one.
  TensorPool pool;
  const Frame frame{registers, integers};
  size_t at = 0;
  try {
    for (const size_t end = program.instructions.size(); at < end; ++at) {
      const Instruction& one = program.instructions[at];
      one.function(frame, one.arguments.data(), one.results.data());
      for (const Free& free : one.frees) {
        OptionalTensor& dead = registers[free.index];
        if (free.recycle) pool.give(std::move(*dead));
        dead.reset();
      }
    }
  } catch (const std::exception& error) {
    fail("program: instruction ", at, " (", program.instructions[at].op, "): ", error.what());
  }
}

// To gather the threads at the end of a run costs about what it costs at the end of a loop.
constexpr int64_t kLoopsWorthTeam = 8;

// Calls f(), with a team unless the last run of this program had few loops for it.
template <class F>
void run_with_team(const Program& program, const F& f) {
  const int64_t before = parallel_loops();
  if (!program.has_team || program.loops.load(std::memory_order_relaxed) < kLoopsWorthTeam)
    f();
  else
    with_team(f);
  program.loops.store(parallel_loops() - before, std::memory_order_relaxed);
}

std::vector<Tensor> run(int64_t handle, std::vector<Tensor> tensors,
                        const std::vector<int64_t>& integers) {
  const std::shared_ptr<const Program> held = registry().get(handle);
  const Program& program = *held;
  check_inputs(program, tensors, integers);
  std::vector<OptionalTensor> registers(program.registers);
  for (size_t i = 0; i < tensors.size(); ++i)
    registers[static_cast<size_t>(program.inputs[i])] = std::move(tensors[i]);
  run_with_team(program, [&] { execute(program, registers.data(), integers.data()); });
  std::vector<Tensor> outputs;
  outputs.reserve(program.outputs.size());
  for (const Output& output : program.outputs)
    outputs.push_back(output.constant ? **output.constant
                                      : *registers[static_cast<size_t>(output.index)]);
  return outputs;
}

void free_program(int64_t handle) { registry().remove(handle); }

}  // namespace
}  // namespace ipex::program

// For every device: a call without a tensor has none.
STABLE_TORCH_LIBRARY_IMPL(ipex, CompositeExplicitAutograd, m) {
  m.impl("program_create", TORCH_BOX(&ipex::program::create));
  m.impl("program_run", TORCH_BOX(&ipex::program::run));
  m.impl("program_free", TORCH_BOX(&ipex::program::free_program));
}
