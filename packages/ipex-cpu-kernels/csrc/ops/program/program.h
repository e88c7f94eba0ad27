// SPDX-License-Identifier: Apache-2.0
// A list of op calls, decoded and checked: every register is written before it is read, every index
// is in range, every argument is what its function takes. Running it needs no checks of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ipex/glue/dispatch.h"

namespace ipex::program {

struct Free {
  int32_t index;
  bool recycle;  // nothing else refers to its memory
};

struct Instruction {
  Function function;
  std::vector<Argument> arguments;
  std::vector<int32_t> results;
  std::vector<Free> frees;
  std::string op;
};

struct Output {
  int32_t index;
  const OptionalTensor* constant;
};

struct Program {
  std::vector<OptionalTensor> constants;  // arguments point to them: must not be moved
  std::vector<int32_t> inputs;            // registers of the tensors given at each run
  size_t integers = 0;                    // number of integers given at each run
  size_t registers = 0;
  std::vector<Instruction> instructions;
  std::vector<Output> outputs;
  bool has_team = true;  // every instruction runs within a team
  // Parallel loops of the last run.
  mutable std::atomic<int64_t> loops{std::numeric_limits<int64_t>::max()};
};

// Decodes what ipex_core.program.native encodes: words, and a text that they point into.
std::shared_ptr<const Program> decode(const Tensor& code, const Tensor& text,
                                      const std::vector<Tensor>& constants);

// Whether an instruction calls a library that spreads its work over threads itself, which it cannot
// do within a team.
bool has_own_threads(const std::string& op);

}  // namespace ipex::program
