// SPDX-License-Identifier: Apache-2.0
// Spreads a matrix product with panels of 32 columns over torch's threads. For glue only.
//
// The tasks depend on shapes and never on which thread runs them, and no task splits a sum, so
// results have the same bits for any number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "ipex/glue/dispatch.h"
#include "ipex/kernel/gemm_sizes.h"
#include "linear/packed.h"
#include "runtime/loader.h"
#include "runtime/scratch.h"
#include "runtime/topology.h"

namespace ipex {

// A parallel region costs about as much as this many multiplications on one thread.
inline constexpr int64_t kRegionWork = 60000;

// Rows from which tiles are fed from caches in blocks (gemm_tiles.h), and rows from which AMX units
// are what counts and not the memory the weights come from.
inline constexpr int64_t kManyRows = 64;
inline constexpr int64_t kComputeBound = 128;

struct GemmShape {
  int64_t rows, panels, k;
  int64_t unit = 1;    // panels that belong together: 2 for gate and up
  bool tiles = false;  // the kernel uses AMX tiles at the active level

  bool on_tiles() const { return tiles && rows >= kManyRows; }
  bool limited_by_tiles() const { return tiles && rows >= kComputeBound; }
};

// True if products of `dtype` run on AMX tiles at the active level.
inline bool uses_tiles(ScalarType dtype) {
  return (dtype == ScalarType::BFloat16 || dtype == ScalarType::Char ||
          dtype == ScalarType::Byte) &&
         cpu::active_has_amx();
}

// Rows of a block without tiles: about 192 and whole steps of 24, but no block of few rows, since
// each reads all weights.
inline int64_t block_of_rows(int64_t rows) {
  const int64_t blocks = std::max<int64_t>(1, (rows + 127) / 192);
  return (rows + 24 * blocks - 1) / (24 * blocks) * 24;
}

// Rows from which gemm_block() at the active level converts 16-bit numbers to float first, for
// which it needs memory. Asked once for a call: it takes a lock.
template <class T>
int64_t widened_from() {
  bool converts = sizeof(T) == 2;
  if constexpr (std::is_same_v<T, BFloat16>) converts = !cpu::active_has_avx512_bf16();
  return converts ? kWideRows : std::numeric_limits<int64_t>::max();
}

// Memory of the calling thread for gemm_block(), or nullptr where it needs none or memory is short.
inline char* gemm_scratch(bool needed) {
  return needed ? Scratch<Area::kTiles>::get(kGemmScratch) : nullptr;
}

// Calls worker(next) on as many threads as pay off. next() gives the numbers of the tasks from 0
// on, one after the other, whichever worker asks, and `tasks` or more when none is left. For
// workers that keep something from one task to the next. `work` are the multiplications of all
// tasks. `tiles`: one thread per core.
template <class F>
void run_workers(int64_t tasks, int64_t work, bool tiles, const F& worker) {
  std::atomic<int64_t> count{0};
  const auto next = [&count] { return count.fetch_add(1, std::memory_order_relaxed); };
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const int64_t workers =
      std::clamp<int64_t>(work / kRegionWork, 1, std::max<int64_t>(1, std::min(threads, tasks)));
  if (workers == 1) return worker(next);
  // All threads enter where one per core is to be chosen; a smaller team could sit on half the
  // cores.
  cpu::CorePerThread cores(tiles);
  parallel_for(tiles ? threads : workers, 1, [&](int64_t, int64_t) {
    if (cores.claim()) worker(next);
  });
}

// Calls f(task) for 0 <= task < tasks; threads take the next task when they are done with one.
template <class F>
void run_tasks(int64_t tasks, int64_t work, bool tiles, const F& f) {
  run_workers(tasks, work, tiles, [&](const auto& next) {
    for (int64_t t; (t = next()) < tasks;) f(t);
  });
}

// Calls f(row_begin, row_end, panel_begin, panel_end) so that every row meets every panel once. f
// must not throw. A call gets at most max_rows rows where there are more than 24, and at most
// max_panels panels where there are tasks at all: a product with few rows is cut by panels only.
template <class F>
void run_gemm(const GemmShape& shape, int64_t max_rows, int64_t max_panels, const F& f) {
  if (shape.rows == 0) return;
  const int64_t m = shape.rows, panels = shape.panels, unit = shape.unit;
  const auto threads = static_cast<int64_t>(torch::stable::get_num_threads());
  const bool tiles = shape.on_tiles();
  const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  int64_t block = max_rows, chunk = panels;
  if (tiles) {
    // A task reads block rows and chunk panels for block * chunk products: large and nearly square
    // tasks, but two for a core where that can be had. Multiples of 4 panels, so that halves are
    // even.
    chunk = std::min(max_panels, parts(panels, 4) * 4);
    const bool shared = shape.limited_by_tiles() && cpu::has_shared_cores();
    const int64_t wanted = shared ? threads : 2 * threads;
    while (parts(m, block) * parts(panels, chunk) < wanted && (block > 32 || chunk > 4)) {
      if (block > 32 && (chunk <= 4 || std::min(block, m) >= chunk * kPackedPanel))
        block /= 2;
      else
        chunk = parts(chunk, 8) * 4;
    }
    chunk = parts(parts(panels, parts(panels, chunk)), unit) * unit;  // of equal size
  } else {
    // Small products get smaller blocks of rows so that all threads have work.
    while (block / 2 >= 24 && parts(m, block) * panels < 4 * threads) block /= 2;
    if (m <= block) {
      // The partition of packing: a thread reads the panels whose memory it touched first.
      const int64_t work = std::max<int64_t>(1, m * shape.k * kPackedPanel * unit);
      parallel_for(panels / unit, std::max<int64_t>(1, kRegionWork / work),
                   [&](int64_t begin, int64_t end) { f(0, m, begin * unit, end * unit); });
      return;
    }
    chunk = std::min(panels, max_panels);
    while (chunk > 2 && parts(m, block) * parts(panels, chunk) < 8 * threads)
      chunk = (chunk / 2 + 1) / 2 * 2;
  }
  const int64_t across = parts(panels, chunk);
  run_tasks(parts(m, block) * across, m * shape.k * panels * kPackedPanel, shape.limited_by_tiles(),
            [&](int64_t t) {
              const int64_t row = t / across * block, panel = t % across * chunk;
              f(row, std::min(m, row + block), panel, std::min(panels, panel + chunk));
            });
}

}  // namespace ipex
