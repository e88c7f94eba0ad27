# SPDX-License-Identifier: Apache-2.0
"""Pools of cores and tasks in C++ programs: ipex/runtime.h."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import ipex_cpu_kernels

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(ipex_cpu_kernels.cmake_prefix_path) / "IPEX" / "IPEXConfig.cmake"
COMPILER = os.environ.get("CXX") or shutil.which("g++")
CMAKE = shutil.which("cmake")

# A wheel always has it.
pytestmark = [
    pytest.mark.skipif(
        PACKAGE.resolve().is_relative_to(ROOT) and not PACKAGE.exists(),
        reason="the build folder of the source tree has no CMake package",
    ),
    pytest.mark.skipif(COMPILER is None or CMAKE is None, reason="no C++ compiler or no cmake"),
    pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="pinning is of Linux"),
]

PROGRAM = r"""
#include <ipex/runtime.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <sched.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

using namespace ipex::runtime;
using Cores = std::vector<int32_t>;

#define EXPECT(condition) \
  if (!(condition)) throw std::logic_error(std::string(__func__) + ": " #condition)

// Where the calling thread may run.
std::set<int> here() {
  cpu_set_t set;
  sched_getaffinity(0, sizeof set, &set);
  std::set<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) cpus.insert(cpu);
  return cpus;
}

// Where the threads of a parallel loop may run. The loop is torch's: a program without -fopenmp has none of its own.
std::map<int, std::set<int>> team() {
  static std::mutex mutex;
  std::map<int, std::set<int>> found;
  const auto visit = [](int64_t, int64_t, void* data) {
    const std::lock_guard<std::mutex> lock(mutex);
    uint32_t thread = 0;
    torch_get_thread_idx(&thread);
    (*static_cast<std::map<int, std::set<int>>*>(data))[static_cast<int>(thread)] = here();
  };
  torch_parallel_for(0, at::get_num_threads(), 1, visit, &found);
  return found;
}

at::Tensor twice(at::Tensor x) { return x * 2; }
void add_one(at::Tensor& x) { x += 1; }

void pins(const Cores& cores) {
  const auto before = team();
  const CPUPool pool(cores);
  EXPECT(pool.get_cpu_core_list() == cores);
  {
    const WithCPUPool outer(pool);
    EXPECT(at::get_num_threads() == static_cast<int>(cores.size()));
    const auto pinned = team();
    EXPECT(pinned.size() == cores.size());
    for (const auto& [thread, cpus] : pinned)
      EXPECT(cpus == std::set<int>{cores[static_cast<size_t>(thread)]});
    {
      const WithCPUPool inner(CPUPool({cores.back()}));  // of the cores of the process, not of `outer`
      EXPECT(at::get_num_threads() == 1 && here() == std::set<int>{cores.back()});
    }
    EXPECT(team() == pinned);
    std::thread other([] { CPUPool({0}); });
    other.join();
  }
  EXPECT(team() == before);
}

void tasks(const Cores& cores) {
  const auto executor = std::make_shared<TaskExecutor>(Cores{cores.back()});
  // As programs for IPEX write it.
  torch_ipex::runtime::Task<at::Tensor (*)(at::Tensor), at::Tensor> named(twice, executor);
  at::Tensor x = at::ones({2});
  EXPECT(named(std::move(x)).get().sum().item<float>() == 4);
  // The argument is a copy, here of the handle: what it refers to changes.
  at::Tensor y = at::ones({2});
  torch_ipex::runtime::Task<void (*)(at::Tensor&), at::Tensor&> changing(add_one, executor);
  changing(y).get();
  EXPECT(y.sum().item<float>() == 4);
  // A lambda, with results that can only be moved.
  Task lambda([](int n) { return std::make_unique<std::string>(std::to_string(n)); }, executor);
  EXPECT(*lambda(5).get() == "5");

  Task place([] { return std::make_pair(here(), at::get_num_threads()); }, executor);
  EXPECT(place().get() == std::make_pair(std::set<int>{cores.back()}, 1));

  std::vector<int> order;
  std::vector<std::future<void>> futures;
  Task append([&](int n) { order.push_back(n); }, executor);
  for (int n = 0; n < 100; ++n) futures.push_back(append(n));
  for (auto& future : futures) future.get();
  EXPECT(order.size() == 100 && std::is_sorted(order.begin(), order.end()));

  Task failing([](int n) -> int { throw std::out_of_range(std::to_string(n)); }, executor);
  std::future<int> failed = failing(7);
  std::string text;
  try {
    failed.get();
  } catch (const std::out_of_range& error) {
    text = error.what();
  }
  EXPECT(text == "7");

  Task modes([] { return std::make_pair(c10::InferenceMode::is_enabled(), c10::GradMode::is_enabled()); },
             executor);
  EXPECT(modes().get() == std::make_pair(false, true));
  {
    const c10::InferenceMode guard;
    EXPECT(modes().get() == std::make_pair(true, false));
  }
  EXPECT(modes().get() == std::make_pair(false, true));
}

void team_of_task(const Cores& cores) {
  Task wide([] { return team(); }, std::make_shared<TaskExecutor>(cores));
  const auto pinned = wide().get();
  EXPECT(pinned.size() == cores.size());
  for (const auto& [thread, cpus] : pinned)
    EXPECT(cpus == std::set<int>{cores[static_cast<size_t>(thread)]});
}

void ends(const Cores& cores) {
  int runs = 0;
  std::future<void> last;
  {
    Task count([&] { ++runs; }, std::make_shared<TaskExecutor>(cores));
    for (int i = 0; i < 50; ++i) last = count();
  }  // the queue runs to its end
  EXPECT(runs == 50);
  last.get();
  // A call may be the last owner of its executor.
  auto executor = std::make_shared<TaskExecutor>(cores);
  std::promise<void> go;
  Task owner([kept = executor, wait = go.get_future().share()]() mutable {
    wait.get();
    kept.reset();
  }, executor);
  executor.reset();
  std::future<void> done;
  {
    auto moved = std::move(owner);
    done = moved();
  }
  go.set_value();
  done.get();
}

int main(int, char** argv) {
  try {
    Cores cores;
    for (char** word = argv + 2; *word != nullptr; ++word) cores.push_back(std::atoi(*word));
    if (std::string(argv[1]) == "pool") {
      CPUPool pool(cores);
    } else if (std::string(argv[1]) == "task") {
      TaskExecutor executor(cores);
    } else if (std::string(argv[1]) == "null") {
      Task task([] {}, std::shared_ptr<TaskExecutor>());
    } else {
      EXPECT(is_runtime_ext_enabled());
      pins(cores);
      tasks(cores);
      team_of_task(cores);
      ends(cores);
    }
    std::cout << "fine\n";
    return 0;
  } catch (const std::invalid_argument& error) {
    std::cout << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
"""
LISTS = """
cmake_minimum_required(VERSION 3.22)
project(pools LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(IPEX REQUIRED)
add_executable(pools main.cpp)
target_link_libraries(pools PRIVATE IPEX::ipex)
target_compile_options(pools PRIVATE -Wall -Wextra ${TORCH_IPEX_CXX_FLAGS})
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("program")
    (source / "main.cpp").write_text(PROGRAM)
    (source / "CMakeLists.txt").write_text(LISTS)
    prefix = f"{torch.utils.cmake_prefix_path};{ipex_cpu_kernels.cmake_prefix_path}"
    configure = [
        *(str(CMAKE), "-S", str(source), "-B", str(source / "build"), "-Wno-dev"),
        *(f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_CXX_COMPILER={COMPILER}"),
    ]
    for command in (configure, [str(CMAKE), "--build", str(source / "build")]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return source / "build" / "pools"


def call(
    program: Path, *words: object, cpus: set[int] | None = None, **variables: str
) -> tuple[int, str]:
    """Return exit status and output; ``cpus`` are those that the process may use."""
    command = [str(word) for word in (program, *words)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "2", **variables},
        preexec_fn=None if cpus is None else lambda: os.sched_setaffinity(0, cpus),
    )
    return done.returncode, done.stdout + done.stderr


def cores() -> list[int]:
    """Return two cores that this process may use, or one."""
    return sorted(os.sched_getaffinity(0))[:2]


@pytest.mark.parametrize("binding", ["false", "close"])
def test_pins_and_tasks(program: Path, binding: str) -> None:
    """Threads run where they shall, calls in order; results, errors and modes arrive."""
    assert call(program, "run", *cores(), OMP_PROC_BIND=binding) == (0, "fine\n")


def test_cores_in_any_order(program: Path) -> None:
    assert call(program, "run", *reversed(cores())) == (0, "fine\n")


@pytest.mark.parametrize("kind", ["pool", "task"])
def test_impossible_cores(program: Path, kind: str) -> None:
    """An error says what was expected, what was given, and which cores there are."""
    first = cores()[0]
    missing = next(
        n for n in range(8191, 0, -1) if not Path(f"/sys/devices/system/cpu/cpu{n}").exists()
    )
    for words, text in (
        ((), "must name at least one core, got none"),
        ((first, -1), "must lie in 0..8191, got -1"),
        ((8192,), "must lie in 0..8191, got 8192"),
        ((first, first), f"must name each core once, got {first} more than once"),
        ((first, missing), f"must name cores of this machine, got {missing}"),
    ):
        expected = f"CPUPool: cpu_core_list {text}: choose from the cores that this process may use, {first}\n"
        assert call(program, kind, *words, cpus={first}) == (2, expected)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_of_others(program: Path) -> None:
    first, second = cores()
    status, text = call(program, "pool", first, second, cpus={first})
    assert status == 2
    assert f"must name cores that this process may use, got {second}: choose" in text


def test_a_task_needs_an_executor(program: Path) -> None:
    status, text = call(program, "null")
    assert status == 2
    assert "must point to a TaskExecutor, got a null pointer: create one" in text
