// SPDX-License-Identifier: Apache-2.0
// Kernels of extensions: a SourceProgram that is compiled when it is first used.
#include <mutex>
#include <optional>
#include <stdexcept>

#include "core.h"
#include "include/ipex/xpu/program.h"
#include "source.h"

namespace ipex::xpu {

struct Program::State {
  std::string source;
  std::vector<std::string> kernels;
  std::vector<std::string> options;
  std::mutex mutex;
  std::optional<SourceProgram> program;
};

Program::Program(const char* source, std::vector<std::string> kernels,
                 std::vector<std::string> options)
    : state_(std::make_unique<State>()) {
  if (kernels.empty())
    throw std::invalid_argument("ipex::xpu::Program: kernels must have a name, got none");
  state_->source = source;
  state_->kernels = std::move(kernels);
  state_->options = std::move(options);
}

// Not destroyed: an extension keeps it in a static object, which goes after the SYCL run-time.
Program::~Program() { (void)state_.release(); }

void Program::start(sycl::queue& queue, const std::string& kernel,
                    const std::vector<std::int64_t>& items,
                    const std::vector<Argument>& arguments) {
  WorkSize size;
  for (const std::int64_t count : items) {
    if (count <= 0) return;  // nothing to do
    const bool last = &count == &items.back();
    const std::size_t group = last ? 256 : 1;
    size.local.push_back(group);
    size.global.push_back((static_cast<std::size_t>(count) + group - 1) / group * group);
  }
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->program) {
      state_->program.emplace(state_->source, state_->kernels, user_headers(), state_->options,
                              queue);
    }
  }
  state_->program->launch(kernel, queue, size, arguments);
}

}  // namespace ipex::xpu
